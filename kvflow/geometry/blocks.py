"""Pages as positions in lists of memory blocks, which a transport prepares once for each peer.

Where a page looks the same on both sides, moving it means naming it: "block 17 here to block 40 there". For each
region a list has a run of blocks as long as a page, and, where pages follow each other without gaps and the cells of a
token do too, a run of blocks as long as those cells, for pages that are not moved whole. A route that cannot be said in
blocks, and a chunk of more blocks than is worth it, is planned as descriptors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvflow.geometry.layers import ALL_LAYERS, LayerRange, layers_within
from kvflow.geometry.pages import PageTable
from kvflow.geometry.plan import Descriptors, Share
from kvflow.geometry.routes import BoundRoute, Leg
from kvflow.geometry.tokens import cell_range

__all__ = ["BlockLists", "Blocks", "RouteBlocks", "spans"]

Words = NDArray[np.uint64]
Positions = NDArray[np.int32]

MAX_BLOCKS: Final = 2**15
"""More blocks than this are long runs of short pages, for which descriptors are fewer."""

MAX_POSITIONS: Final = 2**31


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The blocks of a route, the same number of equally long ones on both sides of each run.

    Attributes:
        src: uint64[num_runs, 5], rows of (address, bytes of a block, device id, bytes from block to block, blocks) on
            the sending side. Positions count the blocks of all runs, one run after another.
        dst: The same on the receiving side, where runs may be shorter or longer.
    """

    src: Words
    dst: Words


class Blocks(NamedTuple):
    """What to copy: block `src[i]` to block `dst[i]`.

    Attributes:
        lists: What is counted.
        src: int32[num_blocks], positions on the sending side.
        dst: The same on the receiving side.
        num_bytes: Of all blocks.
    """

    lists: BlockLists
    src: Positions
    dst: Positions
    num_bytes: int

    def descriptors(self) -> Descriptors:
        """The same without the lists: a row for each block."""
        return Descriptors(_rows(self.lists.src, self.src), _rows(self.lists.dst, self.dst))


class _Starts(NamedTuple):
    """Where the runs of the pieces of a leg begin.

    Attributes:
        src: int32[num_pieces], positions on the sending side.
        dst: The same on the receiving side.
        block_bytes: Of each block of these runs.
    """

    src: Positions
    dst: Positions
    block_bytes: int

    def of_layers(self, leg: Leg, layers: LayerRange) -> "_Starts":
        if layers == ALL_LAYERS:
            return self
        chosen = layers_within(leg.layers, layers)
        return _Starts(self.src[chosen], self.dst[chosen], self.block_bytes)


class _Segment(NamedTuple):
    """Blocks of one kind, which each piece of a leg moves: offsets from its starts, int32[n] each."""

    starts: _Starts
    src: Positions
    dst: Positions

    @property
    def num_blocks(self) -> int:
        return len(self.starts.src) * len(self.src)


@dataclass(frozen=True, eq=False)
class _LegBlocks:
    """A leg, and where its blocks are; single cells have no blocks if `cells` is None."""

    leg: Leg
    pages: _Starts
    cells: _Starts | None

    def segments(self, share: Share, layers: LayerRange) -> list[_Segment] | None:
        """What of a share is whole pages, and what is single cells; None if that cannot be said in blocks."""
        src, dst = share.src.in_cells(self.leg.tokens_per_cell), share.dst.in_cells(self.leg.tokens_per_cell)
        if src.shard.size > 1 or dst.shard.size > 1:
            return None
        size = src.page_size
        start, stop = cell_range(share.tokens, self.leg.tokens_per_cell, closing=share.closing)
        if start == stop:
            return []
        if not (src.covers((start, stop)) and dst.covers((start, stop))):
            return None
        segments = []
        first, last = -(-start // size), stop // size
        if first < last:
            starts = self.pages.of_layers(self.leg, layers)
            pages = (side.between(first, last).astype(np.int32) for side in (src, dst))
            segments.append(_Segment(starts, *pages))
        for page, begin, end in _partial_pages(start, stop, size):
            if self.cells is None:
                return None
            starts = self.cells.of_layers(self.leg, layers)
            segments.append(_Segment(starts, _cells(src, page, begin, end), _cells(dst, page, begin, end)))
        return segments


class RouteBlocks:
    """Plans chunks for one peer in blocks.

    Args:
        legs: With the places of their blocks.

    Attributes:
        lists: What positions of its plans count.
    """

    def __init__(self, lists: BlockLists, legs: tuple[_LegBlocks, ...]) -> None:
        self.lists = lists
        self._legs = legs

    @classmethod
    def of(cls, route: BoundRoute) -> Self | None:
        """Find the blocks of a route; None if it has pages that are not blocks, or too many."""
        if not route.legs or not all(map(_page_is_block, route.legs)) or _most_blocks(route) > MAX_POSITIONS:
            return None
        lists = _Lists(route)
        legs = []
        for leg in route.legs:
            num_cells = _cells_per_page(leg)
            pages = lists.add(leg, num_cells * leg.num_heads * leg.head_bytes, blocks_per_page=1)
            cells = lists.add(leg, leg.unit_bytes, blocks_per_page=num_cells) if leg.pages_touch else None
            legs.append(_LegBlocks(leg, pages, cells))
        return cls(lists.finished(), tuple(legs))

    def plan(self, shares: Mapping[str, Share], layers: LayerRange = ALL_LAYERS) -> Blocks | None:
        """Work out the blocks that move some tokens.

        Args:
            shares: Components to move; those that the route does not have are ignored.
            layers: Global layers to move.

        Returns:
            None if there are none or too many, or if it has to be said in descriptors: token ranges that begin or end
            within pages of interleaved tensors, shards, page tables that do not fit.
        """
        segments: list[_Segment] = []
        for leg in self._legs:
            if leg.leg.component in shares:
                found = leg.segments(shares[leg.leg.component], layers)
                if found is None:
                    return None
                segments += found
        counts = [segment.num_blocks for segment in segments]
        if not 0 < sum(counts) <= MAX_BLOCKS:
            return None
        num_bytes = sum(count * segment.starts.block_bytes for count, segment in zip(counts, segments, strict=True))
        src = [np.add.outer(segment.starts.src, segment.src).ravel() for segment in segments]
        dst = [np.add.outer(segment.starts.dst, segment.dst).ravel() for segment in segments]
        if len(segments) == 1:
            return Blocks(self.lists, src[0], dst[0], num_bytes)
        return Blocks(self.lists, np.concatenate(src), np.concatenate(dst), num_bytes)


class _Lists:
    """Block lists that are being made."""

    def __init__(self, route: BoundRoute) -> None:
        self._devices = (route.src_device, route.dst_device)
        self._runs: tuple[list[Words], list[Words]] = ([], [])
        self._counts = [0, 0]

    def add(self, leg: Leg, block_bytes: int, *, blocks_per_page: int) -> _Starts:
        """Add a run of blocks for each piece of a leg."""
        starts = []
        for side, (bases, steps) in enumerate(((leg.src_bases, leg.src), (leg.dst_bases, leg.dst))):
            count = steps.slots * blocks_per_page
            runs = np.empty((len(bases), 5), np.uint64)
            runs[:, 0] = bases
            runs[:, 1:] = (
                block_bytes,
                self._devices[side],
                max(block_bytes, steps.slot_stride // blocks_per_page),
                count,
            )
            starts.append(self._counts[side] + np.arange(len(bases), dtype=np.int64) * count)
            self._runs[side].append(runs)
            self._counts[side] += len(bases) * count
        src, dst = (positions.astype(np.int32) for positions in starts)
        return _Starts(src, dst, block_bytes)

    def finished(self) -> BlockLists:
        return BlockLists(*(np.concatenate(runs) for runs in self._runs))


def _cells_per_page(leg: Leg) -> int:
    return leg.src.tokens_per_slot // leg.tokens_per_cell


def _most_blocks(route: BoundRoute) -> int:
    """How many blocks the lists of a route have, on the side that has more."""
    counts = [
        sum(len(leg.layers) * side.slots * (1 + _cells_per_page(leg)) for leg, side in sides)
        for sides in ([(leg, leg.src) for leg in route.legs], [(leg, leg.dst) for leg in route.legs])
    ]
    return max(counts)


def _page_is_block(leg: Leg) -> bool:
    """The wanted cells of a page lie without gaps and in the same order on both sides."""
    if leg.src.tokens_per_slot != leg.dst.tokens_per_slot:
        return False
    head_bytes = _cells_per_page(leg) * leg.head_bytes
    is_head_major = all(
        side.token_stride == leg.head_bytes and side.head_stride == head_bytes for side in (leg.src, leg.dst)
    )
    return is_head_major or (leg.heads_touch and leg.tokens_touch)


def _cells(table: PageTable, page: int, begin: int, end: int) -> Positions:
    """Cells `begin` to `end` of one page of a request."""
    first = int(table.between(page, page + 1)[0]) * table.page_size
    return np.arange(first + begin, first + end, dtype=np.int32)


def _partial_pages(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Pages of which a range has some cells only, and which."""
    first, last = start // size, stop // size
    if start % size:
        yield first, start % size, min(size, stop - first * size)
    if stop % size and (last > first or not start % size):
        yield last, 0, stop % size


def spans(runs: Words) -> Words:
    """Give what each run of a list takes: uint64[num_runs, 3], rows of (address, bytes, device id)."""
    found: Words = runs[:, :3].copy()
    found[:, 1] += (runs[:, 4] - np.uint64(1)) * runs[:, 3]
    return found


def _rows(runs: Words, positions: Positions) -> Words:
    counts = runs[:, 4].astype(np.int64)
    firsts = np.cumsum(counts) - counts
    owner = firsts.searchsorted(positions, side="right") - 1
    rows: Words = runs[owner, :3].copy()
    rows[:, 0] += (positions - firsts[owner]).astype(np.uint64) * runs[owner, 3]
    return rows
