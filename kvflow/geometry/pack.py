"""The layout of packed payloads, and where each side keeps their cells.

The sending side gathers cells into a payload, which is written at once, and the receiving side scatters it. A payload
holds the cells of some tokens along a route, without gaps, in a logical order that both sides derive from the region
slices and token ranges alone: component by name, then layer, tensor, heads, and within these token by token (the heads
of a token together) or head by head (the tokens of a head together). Neither side needs the other's page table or
strides. As with digests, `plan` is not used.

A *run* is a range of bytes that is contiguous both in this side's memory and in the payload. Runs are found once for
all layers with the same strides and are grouped by length, so that copying takes a few array operations for any number
of pages and layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.binding import BoundRoute, SlotGeometry
from kvflow.geometry.expected import ExpectedBytes
from kvflow.geometry.layout import KVLayout, Region, RegionKey
from kvflow.geometry.pages import PageTable, locate
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange, cell_range, is_final, layers_within
from kvflow.geometry.routes import RegionSlice, slices_in_order

__all__ = ["PackedRuns", "PackedSlices", "Payload", "find_runs", "find_slices", "is_head_major"]

UInt64Array = NDArray[np.uint64]


class Payload(NamedTuple):
    """What one prefill rank packs at once for one decode rank; equal on both sides.

    Attributes:
        expected: Expected bytes by component, which determine the tokens that the two hold.
        ranges: Packed tokens, by component.
        wanted: All tokens of the transfer, for the same components.
        head_major: Whether the tokens of a head are together, instead of the heads of a token.
        layers: Packed layers.
    """

    expected: Mapping[str, ExpectedBytes]
    ranges: Mapping[str, TokenRange]
    wanted: Mapping[str, TokenRange]
    head_major: bool = False
    layers: LayerRange = ALL_LAYERS


class PackedRuns(NamedTuple):
    """Runs of one length.

    Attributes:
        length: Bytes of each run.
        memory: uint64[num_runs], address of each run on this side.
        payload: uint64[num_runs], offset of each run in the payload, in bytes.
    """

    length: int
    memory: UInt64Array
    payload: UInt64Array


def is_head_major(route: BoundRoute) -> bool:
    """Choose the order for a route: head by head if both sides keep the tokens of a head together."""
    split = [group for group in route.copy_groups if group.num_heads > 1]
    return bool(split) and all(
        side.head_stride > side.token_stride
        for group in split
        for side in (group.src, group.dst)
        if side.tokens_per_slot > 1
    )


class _Shape(NamedTuple):
    """What region slices with the same strides have in common."""

    steps: SlotGeometry
    num_heads: int
    head_bytes: int
    tokens_per_cell: int


class _Group(NamedTuple):
    """Region slices of one shape: their places in the payload's order, and addresses of their first heads in page 0."""

    shape: _Shape
    numbers: NDArray[np.intp]
    starts: UInt64Array


class PackedSlices(NamedTuple):
    """The region slices of one component on one side, in payload order. Computed once for each pair of ranks.

    Attributes:
        groups: Slices with the same strides.
        tokens_per_cell: int64[num_slices], tokens that share a cell.
        widths: int64[num_slices], bytes at each place: all wanted heads.
        layers: int64[num_slices], global layer of each slice.
    """

    groups: tuple[_Group, ...]
    tokens_per_cell: NDArray[np.int64]
    widths: NDArray[np.int64]
    layers: NDArray[np.int64]


def find_slices(
    slices: Sequence[RegionSlice], layout: KVLayout, bases: Mapping[RegionKey, int] | None = None
) -> dict[str, PackedSlices]:
    """Find the region slices of a route in the memory of one side, by component.

    Args:
        slices: Region slices of the route.
        layout: This side's layout.
        bases: Start address of each region, where it differs from the layout's (a mapping of the same memory).

    Raises:
        PlanError: This side does not have a region of the route.
    """
    regions = layout.regions()
    found = {}
    for name in sorted({region_slice.component for region_slice in slices}):
        found[name] = _group_by_shape(slices_in_order(slices, name), regions, bases)
    return found


def _group_by_shape(
    slices: Sequence[RegionSlice], regions: Mapping[RegionKey, Region], bases: Mapping[RegionKey, int] | None
) -> PackedSlices:
    groups: dict[_Shape, list[tuple[int, int]]] = {}
    shapes: list[_Shape] = []
    for number, region_slice in enumerate(slices):
        region = regions.get(region_slice.key)
        if region is None:
            raise PlanError("route has a region slice that this side does not have", **region_slice.key._asdict())
        start = region.address if bases is None else bases[region_slice.key]
        start += (region_slice.heads[0] - region.heads[0]) * region.head_stride
        num_heads = region_slice.heads[1] - region_slice.heads[0]
        shapes.append(_Shape(SlotGeometry.from_region(region), num_heads, region.head_bytes, region.tokens_per_cell))
        groups.setdefault(shapes[-1], []).append((number, start))
    return PackedSlices(
        tuple(
            _Group(shape, np.array([number for number, _ in found]), np.array([start for _, start in found], np.uint64))
            for shape, found in groups.items()
        ),
        np.array([shape.tokens_per_cell for shape in shapes]),
        np.array([shape.num_heads * shape.head_bytes for shape in shapes]),
        np.array([region_slice.layer for region_slice in slices]),
    )


def find_runs(
    payload: Payload, slices: Mapping[str, PackedSlices], tables: Mapping[str, PageTable]
) -> tuple[list[PackedRuns], int]:
    """Find the cells of a payload in the memory of the side to which the slices and the tables belong.

    Returns:
        Runs, which cover each byte of the payload once, and the size of the payload in bytes.

    Raises:
        PlanError: A page table does not cover its tokens.
    """
    runs: list[PackedRuns] = []
    at = 0
    for name in sorted(payload.ranges):
        own = slices[name]
        is_included = layers_within(own.layers, payload.layers)
        cell_sizes = sorted({group.shape.tokens_per_cell for group in own.groups})
        cells = {size: _positions(payload, name, size) for size in cell_sizes}
        counts = np.select(
            [own.tokens_per_cell == size for size in cell_sizes], [len(cells[size]) for size in cell_sizes]
        )
        sizes = own.widths * counts * is_included
        places = (at + np.cumsum(sizes) - sizes).astype(np.uint64)
        for group in own.groups:
            chosen = is_included[group.numbers]
            positions = cells[group.shape.tokens_per_cell]
            if len(positions) and chosen.any():
                tables[name].check_covers(payload.ranges[name], component=name)
                table = tables[name].in_cells(group.shape.tokens_per_cell)
                included = group._replace(numbers=group.numbers[chosen], starts=group.starts[chosen])
                runs += _runs_of(included, positions, table, places[included.numbers], head_major=payload.head_major)
        at += int(sizes.sum())
    return runs, at


def _positions(payload: Payload, name: str, tokens_per_cell: int) -> UInt64Array:
    """Return the cells of one head that both sides hold, in token order."""
    tokens, expected = payload.ranges[name], payload.expected[name]
    final = is_final(tokens, payload.wanted[name])
    positions = np.arange(*cell_range(tokens, tokens_per_cell, final=final), dtype=np.uint64)
    for shard in (expected.src, expected.dst):
        if shard.size > 1:
            positions = positions[shard.in_cells(tokens_per_cell).holds(positions)]
    return positions


def _runs_of(
    group: _Group, positions: UInt64Array, table: PageTable, places: UInt64Array, *, head_major: bool
) -> Iterator[PackedRuns]:
    """Find the runs of all slices of one shape, by length; `table` counts in cells."""
    steps = group.shape.steps
    slots, rows = locate(positions, table)
    memory = slots * np.uint64(steps.slot_stride) + rows * np.uint64(steps.token_stride)
    units = _units(group.shape, slots, memory, head_major=head_major)
    firsts, lengths = _join(units)
    for length in np.unique(lengths).tolist():
        chosen = firsts[lengths == length]
        yield PackedRuns(
            int(length),
            np.add.outer(group.starts, units.memory[chosen]).ravel(),
            np.add.outer(places, units.payload[chosen]).ravel(),
        )


class _Units(NamedTuple):
    """Units: the smallest ranges that are contiguous on this side and in the payload, all of one size.

    `memory` and `payload` are offsets in bytes, from the slice's start and from its place in the payload.
    """

    slots: UInt64Array
    memory: UInt64Array
    payload: UInt64Array
    num_bytes: int


def _units(shape: _Shape, slots: UInt64Array, memory: UInt64Array, *, head_major: bool) -> _Units:
    """Divide cells into units.

    `slots` and `memory` are, of each cell of the first head, its page and its offset in bytes from the slice's start.
    """
    size, num_heads = shape.head_bytes, shape.num_heads
    cells, heads = np.arange(len(memory), dtype=np.uint64), np.arange(num_heads, dtype=np.uint64)
    if num_heads == 1 or (shape.steps.head_stride == size and not head_major):
        unit = size * num_heads
        return _Units(slots, memory, cells * np.uint64(unit), unit)
    steps = heads * np.uint64(shape.steps.head_stride)
    if head_major:
        places = np.add.outer(heads * np.uint64(len(memory)), cells).ravel()
        return _Units(np.tile(slots, num_heads), np.add.outer(steps, memory).ravel(), places * np.uint64(size), size)
    places = np.add.outer(cells * np.uint64(num_heads), heads).ravel()
    return _Units(np.repeat(slots, num_heads), np.add.outer(memory, steps).ravel(), places * np.uint64(size), size)


def _join(units: _Units) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Join consecutive units that are contiguous on both sides; return the first of each run, and the run's bytes.

    Units of different pages are not joined, which keeps the number of different lengths small.
    """
    step = np.uint64(units.num_bytes)
    goes_on = units.slots[1:] == units.slots[:-1]
    for offsets in (units.memory, units.payload):
        goes_on &= offsets[1:] == offsets[:-1] + step
    firsts = np.insert(np.flatnonzero(~goes_on) + 1, 0, 0)
    return firsts, np.diff(np.append(firsts, len(units.memory))) * units.num_bytes
