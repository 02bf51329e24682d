"""An engine's priority as one of kvflow's priority classes. Pure."""

from typing import Final

__all__ = ["priority_class"]

ORDINARY: Final = 4
"""Class of a request without a priority of its own, of 0 to 7; 0 is served first."""


def priority_class(steps: int) -> int:
    """Return the class of a request that an engine serves `steps` steps after ordinary ones; negative for before."""
    return min(max(ORDINARY + steps, 0), 7)
