"""What measurements write into memory, so that each word says where it was written."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["WORD_BYTES", "named"]

WORD_BYTES: Final = 8

PATTERN_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no two words of a pool are equal."""


def named(places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Give the words of some places, of the same shape; none is 0."""
    names: NDArray[np.uint64] = (places + np.uint64(1)) * PATTERN_STEP
    return names
