"""The order of cells in a packed payload, and where each side keeps them: gather here, one write, scatter there.

A payload holds the cells of some tokens along a route, without gaps, in a logical order that both sides derive from the
route's pieces and the token ranges alone: component by name, then layer, tensor, heads, and within these token by token
(the heads of a token together) or head by head (the tokens of a head together). Neither side needs the page table or
the strides of the other one. As with digests, nothing of `plan` is used.

On one side the cells of a payload are *runs*: bytes that lie together both in its memory and in the payload. Runs are
found once for all layers that step alike, and grouped by length, so that copying them is a few array operations however
many pages and layers there are.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.debts import Debt
from kvflow.geometry.layers import ALL_LAYERS, LayerRange, layers_within
from kvflow.geometry.layout import KVLayout, Region, RegionKey
from kvflow.geometry.pages import PageTable, locate
from kvflow.geometry.routes import BoundRoute, RoutePiece, SlotGeometry
from kvflow.geometry.tokens import TokenRange, cell_range, closes, held_range

__all__ = ["PackedPieces", "PackedRuns", "Payload", "find_pieces", "is_head_major", "pack"]

Words = NDArray[np.uint64]


class Payload(NamedTuple):
    """What one prefill rank packs for one decode rank at once; equal on both sides.

    Attributes:
        debts: By component, which tokens the two hold.
        ranges: By component, the tokens.
        wanted: For the same components, all tokens of the transfer.
        head_major: Tokens of one head lie together, instead of heads of one token.
        layers: That are in it.
    """

    debts: Mapping[str, Debt]
    ranges: Mapping[str, TokenRange]
    wanted: Mapping[str, TokenRange]
    head_major: bool = False
    layers: LayerRange = ALL_LAYERS


class PackedRuns(NamedTuple):
    """Runs of one length.

    Attributes:
        length: Bytes of each run.
        memory: uint64[num_runs], address of each run on this side.
        payload: uint64[num_runs], its place in the payload.
    """

    length: int
    memory: Words
    payload: Words

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.length * len(self.memory)


def is_head_major(route: BoundRoute) -> bool:
    """Say which order suits a route: head by head if both sides keep the tokens of a head together."""
    split = [leg for leg in route.legs if leg.num_heads > 1]
    return bool(split) and all(
        side.head_stride > side.token_stride for leg in split for side in (leg.src, leg.dst) if side.tokens_per_slot > 1
    )


class _Shape(NamedTuple):
    """What pieces have in common that step alike."""

    steps: SlotGeometry
    num_heads: int
    head_bytes: int
    tokens_per_cell: int


class _Group(NamedTuple):
    """Pieces of one shape: which they are, and the address of the first wanted head of page 0 of each."""

    shape: _Shape
    numbers: NDArray[np.intp]
    starts: Words


class PackedPieces(NamedTuple):
    """The pieces of one component in the order of a payload, as one side holds them; made once for each pair of ranks.

    Attributes:
        groups: Pieces that step alike.
        grains: int64[num_pieces], tokens that share a cell.
        widths: int64[num_pieces], bytes at each place: all wanted heads.
        layers: int64[num_pieces], layer of each.
    """

    groups: tuple[_Group, ...]
    grains: NDArray[np.int64]
    widths: NDArray[np.int64]
    layers: NDArray[np.int64]


def find_pieces(
    pieces: Sequence[RoutePiece], layout: KVLayout, bases: Mapping[RegionKey, int] | None = None
) -> dict[str, PackedPieces]:
    """Find the pieces of a route on one side.

    Args:
        pieces: Of the route between the two.
        layout: This side's.
        bases: Where the regions really begin, if that is not where the layout says.

    Returns:
        Pieces by component.

    Raises:
        PlanError: The route has a piece that this side does not have.
    """
    regions = layout.regions()
    found = {}
    for name in sorted({piece.component for piece in pieces}):
        own = [piece for piece in pieces if piece.component == name]
        found[name] = _order(sorted(own, key=lambda piece: (piece.layer, piece.tensor, piece.heads)), regions, bases)
    return found


def _order(
    pieces: Sequence[RoutePiece], regions: Mapping[RegionKey, Region], bases: Mapping[RegionKey, int] | None
) -> PackedPieces:
    groups: dict[_Shape, list[tuple[int, int]]] = {}
    shapes: list[_Shape] = []
    for number, piece in enumerate(pieces):
        region = regions.get(piece.key)
        if region is None:
            raise PlanError("route has a piece that this side does not have", **piece.key._asdict())
        start = region.address if bases is None else bases[piece.key]
        start += (piece.heads[0] - region.heads[0]) * region.head_stride
        num_heads = piece.heads[1] - piece.heads[0]
        shapes.append(_Shape(SlotGeometry.of(region), num_heads, region.head_bytes, region.tokens_per_cell))
        groups.setdefault(shapes[-1], []).append((number, start))
    return PackedPieces(
        tuple(
            _Group(shape, np.array([number for number, _ in found]), np.array([start for _, start in found], np.uint64))
            for shape, found in groups.items()
        ),
        np.array([shape.tokens_per_cell for shape in shapes]),
        np.array([shape.num_heads * shape.head_bytes for shape in shapes]),
        np.array([piece.layer for piece in pieces]),
    )


def pack(
    payload: Payload, pieces: Mapping[str, PackedPieces], tables: Mapping[str, PageTable]
) -> tuple[list[PackedRuns], int]:
    """Find the cells of a payload in the memory of one side.

    Args:
        payload: The same on both sides.
        pieces: Of the route between the two, on this side.
        tables: This side's pages, by component; they reach over the tokens.

    Returns:
        The runs, which cover each byte of the payload once; and its size in bytes.

    Raises:
        PlanError: A table does not reach over its tokens.
    """
    runs: list[PackedRuns] = []
    at = 0
    for name in sorted(payload.ranges):
        own = pieces[name]
        is_in = layers_within(own.layers, payload.layers)
        grains = sorted({group.shape.tokens_per_cell for group in own.groups})
        cells = {grain: _positions(payload, name, grain) for grain in grains}
        counts = np.select([own.grains == grain for grain in grains], [len(cells[grain]) for grain in grains])
        sizes = own.widths * counts * is_in
        places = (at + np.cumsum(sizes) - sizes).astype(np.uint64)
        for group in own.groups:
            chosen = is_in[group.numbers]
            positions = cells[group.shape.tokens_per_cell]
            if len(positions) and chosen.any():
                _check_covered(payload.ranges[name], tables[name])
                table = tables[name].in_cells(group.shape.tokens_per_cell)
                ours = group._replace(numbers=group.numbers[chosen], starts=group.starts[chosen])
                runs += _runs_of(ours, positions, table, places[ours.numbers], head_major=payload.head_major)
        at += int(sizes.sum())
    return runs, at


def _positions(payload: Payload, name: str, tokens_per_cell: int) -> Words:
    """Cells of one head that both sides hold, in token order."""
    tokens, debt = payload.ranges[name], payload.debts[name]
    closing = closes(tokens, payload.wanted[name])
    positions = np.arange(*cell_range(tokens, tokens_per_cell, closing=closing), dtype=np.uint64)
    for shard in (debt.src, debt.dst):
        if shard.size > 1:
            positions = positions[shard.in_cells(tokens_per_cell).holds(positions)]
    return positions


def _runs_of(
    group: _Group, positions: Words, table: PageTable, places: Words, *, head_major: bool
) -> Iterator[PackedRuns]:
    """Runs of all pieces of one shape, by length; `table` counts in cells."""
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


def _check_covered(tokens: TokenRange, table: PageTable) -> None:
    if not table.covers(held_range(tokens, table.shard)):
        raise PlanError("token range is outside the page table", tokens=tokens, covered=(table.first_token, table.end))


class _Units(NamedTuple):
    """Smallest pieces that lie together on this side and in the payload; three uint64[num_units] arrays."""

    slots: Words
    memory: Words
    payload: Words
    num_bytes: int


def _units(shape: _Shape, slots: Words, memory: Words, *, head_major: bool) -> _Units:
    """Cut cells into units.

    Args:
        shape: How this side steps.
        slots: uint64[num_cells], page of each cell of the first head.
        memory: uint64[num_cells], where it is, from the piece's start.
        head_major: Order of the payload.
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
    """Join neighbours that lie together on both sides, within a page, so that there are few different lengths.

    Returns:
        The first unit of each run, and the length of each run in bytes.
    """
    step = np.uint64(units.num_bytes)
    goes_on = units.slots[1:] == units.slots[:-1]
    for offsets in (units.memory, units.payload):
        goes_on &= offsets[1:] == offsets[:-1] + step
    firsts = np.insert(np.flatnonzero(~goes_on) + 1, 0, 0)
    return firsts, np.diff(np.append(firsts, len(units.memory))) * units.num_bytes
