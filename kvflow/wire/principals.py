"""Identifies peers by their keys.

A *principal* is the set of peers whose keys are listed for the same instances. A peer can invent rank names, and
instance names that match a `*`, but not principals. So limits apply to principals.
"""

from kvflow.trust import ANY, matches_instance

__all__ = ["principal_of", "speaks_for"]


def principal_of(names: tuple[str, ...]) -> str | None:
    """Return a string that identifies a principal, given the instance names it may use; None without keys."""
    return None if names == (ANY,) else "\n".join(names)


def speaks_for(names: tuple[str, ...], instance: str) -> bool:
    """Return whether an instance matches one of the names that a peer may act for."""
    return any(matches_instance(name, instance) for name in names)
