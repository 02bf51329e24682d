"""KV pools whose every word says where it belongs. Knows nothing of kvflow."""

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
"""Of one page in one region."""

PAGES_PER_LANE: Final = 4
NUM_TOKENS: Final = PAGES_PER_LANE * TOKENS_PER_PAGE
LANE_BYTES: Final = NUM_REGIONS * PAGES_PER_LANE * PAGE_BYTES

WORDS_PER_PAGE: Final = PAGE_BYTES // 8
WORDS_PER_SAMPLE: Final = 128
"""Of so many words of a page one is looked at when many pages are watched: one for each KiB."""

NOBODYS: Final = np.uint64(2**64 - 1)


class LanePool:
    """Memory for a number of rooms. The pages of one room, its lane, lie apart.

    Args:
        num_lanes: Rooms that find place at once.

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
        """Pages of a lane, in the order of a room's tokens."""
        return [lane + self.num_lanes * index for index in range(PAGES_PER_LANE)]

    def fill(self, lane: int, room: int) -> None:
        """Write what belongs to a room."""
        self._lane(lane)[:] = content(room)

    def clear(self, lane: int) -> None:
        """Write what belongs to nobody."""
        self._lane(lane)[:] = NOBODYS

    def holds(self, lane: int, room: int) -> bool:
        """Return whether a lane has all of a room, and nothing else."""
        return bool((self._lane(lane) == content(room)).all())

    def is_clear(self, lane: int) -> bool:
        """Return whether nobody has written since `clear`."""
        return bool((self._lane(lane) == NOBODYS).all())

    def sample(self, lane: int) -> NDArray[np.uint64]:
        """Copy one word of each KiB, uint64[region, page, sample]."""
        found: NDArray[np.uint64] = self._lane(lane)[:, :, ::WORDS_PER_SAMPLE].copy()
        return found

    def _lane(self, lane: int) -> NDArray[np.uint64]:
        """A view: its pages are one slice with a step."""
        found: NDArray[np.uint64] = self.memory[:, lane :: self.num_lanes]
        return found


def content(room: int) -> NDArray[np.uint64]:
    """What a room's pages hold: each word names the room, its region, page and place."""
    blocks = np.arange(NUM_REGIONS * PAGES_PER_LANE, dtype=np.uint64).reshape(NUM_REGIONS, PAGES_PER_LANE, 1)
    words = np.arange(WORDS_PER_PAGE, dtype=np.uint64)
    found: NDArray[np.uint64] = np.uint64(room << 32) | (blocks << np.uint64(16)) | words
    return found
