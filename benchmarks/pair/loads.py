"""Options and loads of both processes."""

from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.pools import PoolShape, page_tables
from benchmarks.sides import SideOptions

__all__ = [
    "BARE_WAYS",
    "MAX_TABLES",
    "SHAPES",
    "TABLES",
    "WAYS",
    "Load",
    "PairOptions",
    "Table",
    "Tables",
    "Way",
    "tables_of",
]

Table = Literal["contiguous", "random"]
TABLES: Final[tuple[Table, ...]] = ("contiguous", "random")

MAX_TABLES: Final = 128
"""Page tables of one load: enough that no cache holds the pages of requests that are worth moving."""

Way = Literal["kvflow", "bare", "bare-napping"]
"""What moves the bytes: kvflow; the bare transport in a busy loop; or the same with a nap whenever there is nothing to
do, which is cheaper, and faster with few cores."""

BARE_WAYS: Final[tuple[Way, ...]] = ("bare", "bare-napping")
WAYS: Final[tuple[Way, ...]] = ("kvflow", *BARE_WAYS)

SHAPES: Final = {
    "llama3-8b": PoolShape(layers=32, heads=(0, 8), head_bytes=256),
    "mla": PoolShape(layers=61, tensors=("latent",), head_bytes=1152),
    "tiny": PoolShape(layers=2, heads=(0, 2), head_bytes=64),
}
"""A model's cache on one rank, by name; `tiny` is for tests."""


class PairOptions(SideOptions, frozen=True, kw_only=True):
    """Options of one process of a pair; its transport is "nixl" or "mooncake".

    Attributes:
        shape: Name in `SHAPES`.
        num_pages: Pages of its pool.
        memory: Where the pool is, a name in `MEMORIES`.
    """

    shape: str = "llama3-8b"
    num_pages: int = 1
    memory: str = "host"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One round.

    Attributes:
        way: What moves the bytes.
        tokens: Tokens of each request, in whole pages.
        table: Order of the pages on both sides.
        count: Number of requests.
        tables: Number of page tables, which requests use in turn; a multiple of `lanes`.
        lanes: Requests in flight at once; each lane starts its next request when its last one has ended.
        is_announced: The sender starts a request only when the receiver is known to wait for it; requires a single
            lane.
        first_room: Room of the first request; the others follow.
    """

    way: Way
    tokens: int
    table: Table
    count: int = 1
    tables: int = 1
    lanes: int = 1
    is_announced: bool = True
    first_room: int = 1

    @property
    def rooms(self) -> range:
        """Rooms of the requests, in order."""
        return range(self.first_room, self.first_room + self.count)


class Tables(NamedTuple):
    """Pages of one request on both sides, int64[num_pages] each."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]


def tables_of(load: Load, options: PairOptions) -> list[Tables]:
    """Return the page tables of a load; both sides compute the same ones."""
    size = load.tokens // SHAPES[options.shape].page_size
    src, dst = (
        page_tables(options.num_pages, load.tables, size, side if load.table == "random" else None) for side in range(2)
    )
    return [Tables(*pair) for pair in zip(src, dst, strict=True)]
