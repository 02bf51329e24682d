"""Who is at the other end of a connection, as far as keys tell.

A *principal* stands for everyone whose keys are listed for the same instances. A peer can make up rank names, and
instance names that match a `*`, but not principals, so limits are shared among principals.
"""

from kvflow.trust import ANY, is_named

__all__ = ["principal_of", "speaks_for"]


def principal_of(names: tuple[str, ...]) -> str | None:
    """Return a text that identifies a principal, from the names it may use; None without keys."""
    return None if names == (ANY,) else "\n".join(names)


def speaks_for(names: tuple[str, ...], instance: str) -> bool:
    """Return whether an instance is among those that the other end of a connection may speak for."""
    return any(is_named(name, instance) for name in names)
