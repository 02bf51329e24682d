"""Number of examples for property tests."""

from typing import Final

from hypothesis import settings

__all__ = ["QUICK", "THOROUGH", "examples"]

THOROUGH: Final = 300
"""Default number of examples of a property in `make test-all`."""

QUICK: Final = 25
"""Default number in `make test`."""


def examples(thorough: int) -> int:
    """Scale a number of examples to the active hypothesis profile.

    Args:
        thorough: The number for `make test-all`.

    Returns:
        At least 1.
    """
    return max(1, thorough * settings().max_examples // THOROUGH)
