"""What the two processes are told: how each side keeps the cache, and what to move."""

from typing import Final, Literal

import msgspec

from kvflow.cli.bench.workers.options import PREFILL, SideOptions
from kvflow.config import Packing

__all__ = ["CASES", "WAYS", "Case", "HeteroOptions", "HeteroShape", "Load", "Side"]

WAYS: Final[tuple[Packing, ...]] = ("never", "always", "auto")

Axes = Literal["NHD", "HND"]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """How one instance keeps the cache.

    Attributes:
        ranks: Tensor-parallel size; each rank holds as many heads as any other.
        axes: "NHD" for token-major pages, "HND" for head-major ones.
    """

    ranks: int = 1
    page_size: int = 16
    axes: Axes = "NHD"

    def __str__(self) -> str:
        return f"TP {self.ranks}, page {self.page_size} {self.axes}"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides."""

    prefill: Side = Side()
    decode: Side = Side()


CASES: Final = {
    "tp4-tp2": Case(prefill=Side(ranks=4), decode=Side(ranks=2)),
    "tp2-tp4": Case(prefill=Side(ranks=2), decode=Side(ranks=4)),
    "tp1-tp4": Case(decode=Side(ranks=4)),
    "page16-page64": Case(decode=Side(page_size=64)),
    "hnd-nhd": Case(prefill=Side(axes="HND")),
}


class HeteroShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's cache over all ranks; Llama 3 8B in bfloat16 by default."""

    layers: int = 32
    heads: int = 8
    head_bytes: int = 256


class HeteroOptions(SideOptions, frozen=True, kw_only=True):
    """One process.

    Attributes:
        case: Of `CASES`.
        tokens: Of each request; whole pages on both sides.
        tables: Requests that have pages of their own, in random order over the pool.
    """

    case: str = "tp4-tp2"
    shape: HeteroShape = HeteroShape()
    tokens: int = 512
    tables: int = 4

    @property
    def own(self) -> Side:
        """How this side keeps the cache."""
        case = CASES[self.case]
        return case.prefill if self.side == PREFILL else case.decode

    @property
    def others(self) -> int:
        """Ranks of the other side."""
        case = CASES[self.case]
        return (case.decode if self.side == PREFILL else case.prefill).ranks

    @property
    def request_bytes(self) -> int:
        """Of one request over all ranks."""
        return 2 * self.shape.layers * self.shape.heads * self.shape.head_bytes * self.tokens


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Some requests, one after the other.

    Attributes:
        packing: Of the prefill instance that sends them.
        first_room: Room of the first one; the others follow.
        count: How many; each has the next page table.
    """

    packing: Packing
    first_room: int
    count: int
