"""How many examples a property is tested with."""

from typing import Final

from hypothesis import settings

__all__ = ["QUICK", "THOROUGH", "examples"]

THOROUGH: Final = 300
"""Examples of a property in `make test-all`, unless it says otherwise."""

QUICK: Final = 60
"""Examples in `make test`."""


def examples(thorough: int) -> int:
    """Scale a number of examples to the profile that the tests run with.

    Args:
        thorough: The number for `make test-all`.

    Returns:
        At least 1.
    """
    return max(1, thorough * settings().max_examples // THOROUGH)
