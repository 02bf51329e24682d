"""What the two processes are told: how they are, and what to move."""

from typing import Final, Literal

import msgspec

from kvflow.cli.bench.workers.options import SideOptions

__all__ = ["MAX_TABLES", "SHAPES", "Load", "PairOptions", "Shape", "Table", "Way"]

Table = Literal["contiguous", "random"]

MAX_TABLES: Final = 128
"""Page tables of one load: enough that no cache keeps the pages of requests that are worth moving."""

Way = Literal["kvflow", "bare", "bare-napping", "bare-embedded", "bare-whole", "memcpy"]
"""Who moves the bytes: kvflow; the bare transport in a straight loop; the same with a nap whenever there is nothing to
do, which is cheaper, and faster where cores are few; the same from an event loop through a thread; the same bytes in
one descriptor; or numpy's `copyto` within the prefill process."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's cache on one rank.

    Attributes:
        tensors: Of each layer.
        head_bytes: Of one head of one token in one tensor.
    """

    layers: int
    tensors: tuple[str, ...]
    heads: int
    head_bytes: int
    page_size: int = 16

    @property
    def num_tensors(self) -> int:
        """Over all layers."""
        return self.layers * len(self.tensors)

    @property
    def page_bytes(self) -> int:
        """Of one page in one tensor."""
        return self.page_size * self.heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Of one token in all tensors."""
        return self.num_tensors * self.heads * self.head_bytes


SHAPES: Final = {
    "llama3-8b": Shape(layers=32, tensors=("k", "v"), heads=8, head_bytes=256),
    "mla": Shape(layers=61, tensors=("latent",), heads=1, head_bytes=1152),
    "tiny": Shape(layers=2, tensors=("k", "v"), heads=2, head_bytes=64),
}
"""By name; `tiny` is for tests."""


class PairOptions(SideOptions, frozen=True, kw_only=True):
    """One process of a pair; its transport is "nixl" or "mooncake".

    Attributes:
        shape: Of `SHAPES`.
        slots: Pages of its pool.
    """

    shape: str = "llama3-8b"
    slots: int = 2


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One round.

    Attributes:
        way: Who moves the bytes.
        tokens: Of each request, whole pages.
        table: Order of the pages on both sides.
        count: Requests.
        tables: Page tables that the requests have in turn, a multiple of `lanes`.
        lanes: Requests under way at once; each lane takes its next request when its last one has ended.
        is_announced: The sender begins a request when the receiver has said that it waits, with one lane only.
        first_room: Room of the first request; the others follow.
        seed: Of the page tables.
    """

    way: Way
    tokens: int
    table: Table
    count: int = 1
    tables: int = 1
    lanes: int = 1
    is_announced: bool = True
    first_room: int = 1
    seed: int = 0
