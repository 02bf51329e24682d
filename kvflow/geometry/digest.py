"""Digests of transferred bytes that are equal on both sides, whatever the layouts.

Each side visits its own regions, strides and page table in logical cell order: layer, tensor, token, head (the heads of
a region slice together). It does not use `plan`, and of the other side it uses only which tokens that side holds. Equal
digests therefore also prove that each cell is where its own side's layout puts it: they detect a plan that misplaces
good bytes as well as a transport that damages bytes.

The digest is CRC-32. It detects any damage within 32 neighbouring bits, and all but one in 2**32 of other damage. It
guards against mistakes, not against malice, and is the fastest checksum in the standard library.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.geometry.expected import ExpectedBytes
from kvflow.geometry.layout import Component, Region
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.pages import PageTable, locate
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange, cell_range
from kvflow.geometry.routes import RegionSlice, slices_in_order

__all__ = ["DigestScope", "View", "digest"]

UInt64Array = NDArray[np.uint64]

View = Callable[[MemoryRange], NDArray[np.uint8]]
"""Returns the bytes of a memory range of this side, without a copy."""

BLOCK_BYTES = 2**18
"""Bytes gathered at once; a block stays in the L2 cache."""

LONG_RUN_BYTES = 2**13
"""Mean run length, in bytes, from which runs are read in place; gathering shorter ones first is faster."""


class DigestScope(NamedTuple):
    """What one prefill rank wrote to one decode rank, of one component.

    Attributes:
        slices: Region slices of the route between the two; those of other components are ignored.
        expected: The component's expected bytes, which determine the tokens that the two hold.
        tokens: `[start, stop)`.
        final: Whether no token of the component follows.
        layers: Global layers.
    """

    slices: Sequence[RegionSlice]
    expected: ExpectedBytes
    tokens: TokenRange
    final: bool
    layers: LayerRange = ALL_LAYERS


class _SliceCells(NamedTuple):
    """The cells of one region slice on one side.

    A *place* holds the wanted heads of one token, or of one cell that several tokens share.

    Attributes:
        region: The region that holds the cells.
        heads: Global heads `(start, stop)` at each place.
        slots: uint64[num_places], page of each place.
        rows: uint64[num_places], index of each place within its page, in cells along the tokens.
    """

    region: Region
    heads: tuple[int, int]
    slots: UInt64Array
    rows: UInt64Array

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def place_bytes(self) -> int:
        return self.num_heads * self.region.head_bytes

    @property
    def offset(self) -> int:
        """Bytes from the region's first head to the first wanted head."""
        return (self.heads[0] - self.region.heads[0]) * self.region.head_stride

    @property
    def heads_contiguous(self) -> bool:
        """Whether the heads of a place follow each other without gaps."""
        return self.num_heads == 1 or self.region.head_stride == self.region.head_bytes


def digest(scope: DigestScope, component: Component, table: PageTable, view: View) -> int:
    """Compute the digest of what was written, below 2**32; 0 if nothing was.

    It takes about 0.3 ms per MB and releases the GIL. The scope is the same on both sides; component, table and view
    are this side's, and the table must cover the tokens.
    """
    regions = {(region.tensor, region.layer): region for region in component.regions}
    places: dict[int, tuple[UInt64Array, UInt64Array]] = {}
    value = 0
    for region_slice in slices_in_order(scope.slices, component.name, scope.layers):
        region = regions[region_slice.tensor, region_slice.layer]
        tokens_per_cell = region.tokens_per_cell
        if tokens_per_cell not in places:
            places[tokens_per_cell] = _places(scope, table, tokens_per_cell)
        cells = _SliceCells(region, region_slice.heads, *places[tokens_per_cell])
        value = _add(value, cells, view(MemoryRange(region.address, region.span)))
    return value


def _places(scope: DigestScope, table: PageTable, tokens_per_cell: int) -> tuple[UInt64Array, UInt64Array]:
    """Return page and row of each cell of one head that both sides hold."""
    cells = cell_range(scope.tokens, tokens_per_cell, final=scope.final)
    positions = np.arange(*cells, dtype=np.uint64)
    for shard in (scope.expected.src, scope.expected.dst):
        positions = positions[shard.in_cells(tokens_per_cell).holds(positions)]
    return locate(positions, table.in_cells(tokens_per_cell))


def _add(value: int, cells: _SliceCells, memory: NDArray[np.uint8]) -> int:
    """Update the digest with some cells; `memory` is the whole region."""
    if cells.heads_contiguous:
        region = cells.region
        starts = cells.slots * np.uint64(region.slot_stride) + cells.rows * np.uint64(region.token_stride)
        breaks = np.flatnonzero(np.diff(starts) != cells.place_bytes) + 1
        if len(starts) * cells.place_bytes >= LONG_RUN_BYTES * (len(breaks) + 1):
            return _add_runs(value, starts + np.uint64(cells.offset), breaks, cells.place_bytes, memory)
    return _add_gathered(value, cells, _grid(cells, memory))


def _add_runs(
    value: int, starts: UInt64Array, breaks: NDArray[np.intp], num_bytes: int, memory: NDArray[np.uint8]
) -> int:
    """Update the digest with mostly contiguous places; `breaks` are the indices of places that start a new run."""
    firsts = starts[np.insert(breaks, 0, 0)].tolist()
    lasts = starts[np.append(breaks - 1, len(starts) - 1)].tolist()
    for first, last in zip(firsts, lasts, strict=True):
        value = zlib.crc32(memory[first : last + num_bytes].data, value)
    return value


def _add_gathered(value: int, cells: _SliceCells, grid: NDArray[np.void]) -> int:
    """Update the digest with scattered places, copied together block by block."""
    step = max(1, BLOCK_BYTES // cells.place_bytes)
    for first in range(0, len(cells.slots), step):
        block = slice(first, first + step)
        value = zlib.crc32(grid[cells.slots[block], cells.rows[block]].data, value)
    return value


def _grid(cells: _SliceCells, memory: NDArray[np.uint8]) -> NDArray[np.void]:
    """View the wanted heads of a region as an array of pages and rows, and of heads if those are not contiguous."""
    region = cells.region
    shape: tuple[int, ...] = (region.slots, region.cells_per_slot)
    strides: tuple[int, ...] = (region.slot_stride, region.token_stride)
    size = cells.place_bytes
    if not cells.heads_contiguous:
        shape, strides, size = (*shape, cells.num_heads), (*strides, region.head_stride), region.head_bytes
    grid: NDArray[np.void] = np.ndarray(shape, f"V{size}", memory, cells.offset, strides)
    return grid
