"""A digest of the bytes of some cells that comes out the same on both sides of a transfer, whatever their layouts.

Each side goes through its own regions, strides and page table in the cells' logical order: layer, tensor, token, head
(the heads of a route's piece together). Nothing of `plan` is used and nothing about the other side but which tokens it
holds, so two equal digests also say that each cell lies where its own side's layout has it: a plan that puts good
bytes in a wrong place is found like a transport that damages them.

The digest is CRC-32: it finds every damage within 32 neighbouring bits and all other damage but for one in 2**32. It
guards against mistakes, not against malice, and is the fastest function of the standard library.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.geometry.debts import Debt
from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.layout import Component, MemoryRange, Region
from kvflow.geometry.pages import PageTable, locate
from kvflow.geometry.routes import RoutePiece
from kvflow.geometry.tokens import TokenRange, cell_range

__all__ = ["Cells", "View", "Written", "digest", "find_cells"]

Words = NDArray[np.uint64]

View = Callable[[MemoryRange], NDArray[np.uint8]]
"""Gives the bytes at some addresses of this side, without a copy."""

BLOCK_BYTES = 2**18
"""Gathered at once: stays in the processor's second cache."""

LONG_RUN_BYTES = 2**13
"""Pieces that are as long as this on average are read where they are; gathering shorter ones first is quicker."""


class Written(NamedTuple):
    """What one prefill rank wrote to one decode rank of one component.

    Attributes:
        pieces: Of the route between the two; those of other components are ignored.
        debt: Which tokens the two hold.
        tokens: `[start, stop)`.
        closing: No token of the component follows.
        layers: Global layers.
    """

    pieces: Sequence[RoutePiece]
    debt: Debt
    tokens: TokenRange
    closing: bool
    layers: LayerRange = ALL_LAYERS

    def has(self, piece: RoutePiece, component: str) -> bool:
        """Say whether a piece of the route is a part of it."""
        start, stop = self.layers
        return piece.component == component and start <= piece.layer and (stop is None or piece.layer < stop)


class Cells(NamedTuple):
    """Cells of one region on one side, some heads of one place after the other.

    Attributes:
        region: Where they are.
        heads: Global heads `(start, stop)` at each place.
        slots: uint64[num_places], page of each place.
        rows: uint64[num_places], position along the tokens of the page, in cells.
    """

    region: Region
    heads: tuple[int, int]
    slots: Words
    rows: Words

    @property
    def num_heads(self) -> int:
        """Heads at each place."""
        return self.heads[1] - self.heads[0]

    @property
    def place_bytes(self) -> int:
        """What lies at each place."""
        return self.num_heads * self.region.head_bytes

    @property
    def offset(self) -> int:
        """Where the first head lies at a place, from its first byte."""
        return (self.heads[0] - self.region.heads[0]) * self.region.head_stride

    @property
    def heads_touch(self) -> bool:
        """A place is in one piece."""
        return self.num_heads == 1 or self.region.head_stride == self.region.head_bytes


def find_cells(written: Written, component: Component, table: PageTable) -> Iterator[Cells]:
    """Go through what was written, as one of the two sides has it.

    Args:
        written: The same on both sides.
        component: This side's.
        table: This side's pages; reaches over the tokens.
    """
    regions = {(region.tensor, region.layer): region for region in component.regions}
    pieces = [piece for piece in written.pieces if written.has(piece, component.name)]
    places: dict[int, tuple[Words, Words]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.layer, piece.tensor, piece.heads)):
        region = regions[piece.tensor, piece.layer]
        grain = region.tokens_per_cell
        if grain not in places:
            places[grain] = _places(written, table, grain)
        yield Cells(region, piece.heads, *places[grain])


def _places(written: Written, table: PageTable, tokens_per_cell: int) -> tuple[Words, Words]:
    """Page and row of each cell of one head that both sides hold."""
    cells = cell_range(written.tokens, tokens_per_cell, closing=written.closing)
    positions = np.arange(*cells, dtype=np.uint64)
    for shard in (written.debt.src, written.debt.dst):
        positions = positions[shard.in_cells(tokens_per_cell).holds(positions)]
    return locate(positions, table.in_cells(tokens_per_cell))


def digest(written: Written, component: Component, table: PageTable, view: View) -> int:
    """Work out the digest of what was written; 0 if that is nothing.

    It takes about 0.3 ms for each MB and lets other threads run meanwhile.

    Args:
        written: The same on both sides.
        component: This side's.
        table: This side's pages; reaches over the tokens.
        view: Of this side's memory.

    Returns:
        A number below 2**32.
    """
    value = 0
    for cells in find_cells(written, component, table):
        region = cells.region
        value = _add(value, cells, view(MemoryRange(region.address, region.span)))
    return value


def _add(value: int, cells: Cells, memory: NDArray[np.uint8]) -> int:
    """Go on with a digest; `memory` is the whole region."""
    if cells.heads_touch:
        region = cells.region
        starts = cells.slots * np.uint64(region.slot_stride) + cells.rows * np.uint64(region.token_stride)
        breaks = np.flatnonzero(np.diff(starts) != cells.place_bytes) + 1
        if len(starts) * cells.place_bytes >= LONG_RUN_BYTES * (len(breaks) + 1):
            return _add_runs(value, starts + np.uint64(cells.offset), breaks, cells.place_bytes, memory)
    return _add_gathered(value, cells, _grid(cells, memory))


def _add_runs(value: int, starts: Words, breaks: NDArray[np.intp], num_bytes: int, memory: NDArray[np.uint8]) -> int:
    """Go on with places that mostly touch the next one: `breaks` are those that do not touch the one before."""
    firsts = starts[np.insert(breaks, 0, 0)].tolist()
    lasts = starts[np.append(breaks - 1, len(starts) - 1)].tolist()
    for first, last in zip(firsts, lasts, strict=True):
        value = zlib.crc32(memory[first : last + num_bytes].data, value)
    return value


def _add_gathered(value: int, cells: Cells, grid: NDArray[np.void]) -> int:
    """Go on with places that lie apart, copied together block by block."""
    step = max(1, BLOCK_BYTES // cells.place_bytes)
    for first in range(0, len(cells.slots), step):
        block = slice(first, first + step)
        value = zlib.crc32(grid[cells.slots[block], cells.rows[block]].data, value)
    return value


def _grid(cells: Cells, memory: NDArray[np.uint8]) -> NDArray[np.void]:
    """The wanted heads of the whole region as an array of pages and rows, and of heads if those lie apart."""
    region = cells.region
    shape: tuple[int, ...] = (region.slots, region.cells_per_slot)
    strides: tuple[int, ...] = (region.slot_stride, region.token_stride)
    size = cells.place_bytes
    if not cells.heads_touch:
        shape, strides, size = (*shape, cells.num_heads), (*strides, region.head_stride), region.head_bytes
    grid: NDArray[np.void] = np.ndarray(shape, f"V{size}", memory, cells.offset, strides)
    return grid
