"""Who is at the other end of a connection, as far as keys tell.

A *principal* is all who have keys of the same instances. Names of ranks, and of instances that a `*` in a list stands
for, are made up at will; what is shared out among principals is not had by more of them.
"""

from kvflow.trust import ANY, is_named

__all__ = ["principal_of", "speaks_for"]


def principal_of(names: tuple[str, ...]) -> str | None:
    """Give one text for the instances that the other end of a connection may speak for; None where nobody is asked."""
    return None if names == (ANY,) else "\n".join(names)


def speaks_for(names: tuple[str, ...], instance: str) -> bool:
    """Return whether an instance is among those that the other end of a connection may speak for."""
    return any(is_named(name, instance) for name in names)
