"""KV pools in which every word encodes its room and position. Independent of kvflow."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LANE_BYTES",
    "NUM_REGIONS",
    "NUM_TOKENS",
    "PAGES_PER_LANE",
    "PAGE_BYTES",
    "TOKENS_PER_PAGE",
    "TOKEN_BYTES",
    "LanePool",
]

NUM_LAYERS: Final = 4
NUM_REGIONS: Final = 2 * NUM_LAYERS
"""K and V of each layer."""

TOKENS_PER_PAGE: Final = 16
TOKEN_BYTES: Final = 2_048
PAGE_BYTES: Final = TOKENS_PER_PAGE * TOKEN_BYTES
"""Bytes of one page in one region."""

PAGES_PER_LANE: Final = 4
NUM_TOKENS: Final = PAGES_PER_LANE * TOKENS_PER_PAGE
LANE_BYTES: Final = NUM_REGIONS * PAGES_PER_LANE * PAGE_BYTES

WORDS_PER_PAGE: Final = PAGE_BYTES // 8
WORDS_PER_SAMPLE: Final = 128
"""A sample has one of this many words of a page: one word for each KiB."""

NOBODYS: Final = np.uint64(2**64 - 1)


class LanePool:
    """Memory for a number of rooms. The pages of one room form a lane; they are not adjacent.

    Args:
        num_lanes: Number of rooms that fit at once.

    Attributes:
        memory: uint64[region, page, word].
    """

    def __init__(self, num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self.memory = np.full((NUM_REGIONS, num_lanes * PAGES_PER_LANE, WORDS_PER_PAGE), NOBODYS, np.uint64)

    @property
    def num_pages(self) -> int:
        """Pages of each region."""
        return self.num_lanes * PAGES_PER_LANE

    def pages(self, lane: int) -> list[int]:
        """Return the pages of a lane, in the order of a room's tokens."""
        return [lane + self.num_lanes * index for index in range(PAGES_PER_LANE)]

    def fill(self, lane: int, room: int) -> None:
        """Write the content of a room."""
        self._lane(lane)[:] = content(room)

    def clear(self, lane: int) -> None:
        """Write the fill of free pages."""
        self._lane(lane)[:] = NOBODYS

    def holds(self, lane: int, room: int) -> bool:
        """Return whether a lane holds exactly the content of a room."""
        return bool((self._lane(lane) == content(room)).all())

    def is_clear(self, lane: int) -> bool:
        """Return whether a lane is unchanged since `clear`."""
        return bool((self._lane(lane) == NOBODYS).all())

    def sample(self, lane: int) -> NDArray[np.uint64]:
        """Copy one word of each KiB, uint64[region, page, sample]."""
        found: NDArray[np.uint64] = self._lane(lane)[:, :, ::WORDS_PER_SAMPLE].copy()
        return found

    def _lane(self, lane: int) -> NDArray[np.uint64]:
        """Return a view of a lane: its pages are one strided slice."""
        found: NDArray[np.uint64] = self.memory[:, lane :: self.num_lanes]
        return found


def content(room: int) -> NDArray[np.uint64]:
    """Return the content of a room's pages: each word encodes room, region, page and position."""
    blocks = np.arange(NUM_REGIONS * PAGES_PER_LANE, dtype=np.uint64).reshape(NUM_REGIONS, PAGES_PER_LANE, 1)
    words = np.arange(WORDS_PER_PAGE, dtype=np.uint64)
    found: NDArray[np.uint64] = np.uint64(room << 32) | (blocks << np.uint64(16)) | words
    return found
