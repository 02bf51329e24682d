"""Plans in terms of memory blocks, whose lists a transport prepares once for each peer.

Where pages have the same form on both sides, a copy is a pair of block numbers instead of addresses and lengths. For
each region slice a list has one run of blocks that are as long as a page. Where pages and cells follow each other
without gaps, it also has a run of blocks that are as long as the cells of a token, for pages that are moved in part.
Routes that blocks cannot express, and chunks of too many blocks, are planned as descriptors. Each pair of memory
locations has its own lists.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvflow.geometry.binding import BoundRoute, CopyGroup
from kvflow.geometry.memory import Location
from kvflow.geometry.pages import PageTable
from kvflow.geometry.plan import ComponentSlice, Descriptors
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, cell_range, held_range, layers_within

__all__ = ["BlockLists", "Blocks", "RouteBlocks", "run_extents"]

UInt64Array = NDArray[np.uint64]
Positions = NDArray[np.int32]
Locations = tuple[Location, Location]

MAX_BLOCKS: Final = 2**15
"""Maximum blocks of a plan. With more, pages are short and form long runs, which need fewer descriptors."""

MAX_POSITIONS: Final = 2**31


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The blocks of a route, in runs. Both sides have the same runs, with blocks of the same size.

    Attributes:
        src: uint64[num_runs, 5] for the sending side: address, bytes of a block, device id, bytes from one block to the
            next, number of blocks. Block positions count through all runs in order.
        dst: The same for the receiving side; its runs may have more or fewer blocks.
    """

    src: UInt64Array
    dst: UInt64Array


class Blocks(NamedTuple):
    """What to copy: block `src[i]` to block `dst[i]`.

    Attributes:
        lists: The lists that the positions refer to.
        src: int32[num_blocks], positions on the sending side.
        dst: int32[num_blocks], positions on the receiving side.
        num_bytes: Total bytes of the blocks.
    """

    lists: BlockLists
    src: Positions
    dst: Positions
    num_bytes: int

    def descriptors(self) -> Descriptors:
        """Convert to descriptors, one for each block."""
        return Descriptors(_descriptors(self.lists.src, self.src), _descriptors(self.lists.dst, self.dst))


class _Starts(NamedTuple):
    """Positions, int32[num_slices], of the first block of each run of a copy group, and the bytes of its blocks."""

    src: Positions
    dst: Positions
    block_bytes: int

    def of_layers(self, group: CopyGroup, layers: LayerRange) -> "_Starts":
        if layers == ALL_LAYERS:
            return self
        chosen = layers_within(group.layers, layers)
        return _Starts(self.src[chosen], self.dst[chosen], self.block_bytes)


class _Segment(NamedTuple):
    """Blocks of one size that every slice of a copy group moves; `src` and `dst` are int32[n] offsets from `starts`."""

    starts: _Starts
    src: Positions
    dst: Positions

    @property
    def num_blocks(self) -> int:
        return len(self.starts.src) * len(self.src)


@dataclass(frozen=True, eq=False)
class _GroupBlocks:
    """A copy group and the runs of its blocks; `cells` is None if it has no blocks for single cells."""

    group: CopyGroup
    pages: _Starts
    cells: _Starts | None

    def segments(self, component: ComponentSlice, layers: LayerRange) -> list[_Segment] | None:
        """Divide a component slice into whole pages and single cells; None if blocks cannot express it."""
        tokens_per_cell = self.group.tokens_per_cell
        src, dst = component.src.in_cells(tokens_per_cell), component.dst.in_cells(tokens_per_cell)
        size = src.page_size
        start, stop = cell_range(component.tokens, tokens_per_cell, final=component.final)
        if src.shard.size > 1:  # both sides hold the same tokens, or the route would have no blocks
            start, stop = held_range((start, stop), src.shard)
            src, dst = src.in_places(), dst.in_places()
        if start == stop:
            return []
        src.check_covers((start, stop), side="src")
        dst.check_covers((start, stop), side="dst")
        segments = []
        first, last = -(-start // size), stop // size
        if first < last:
            starts = self.pages.of_layers(self.group, layers)
            pages = (side.between(first, last).astype(np.int32) for side in (src, dst))
            segments.append(_Segment(starts, *pages))
        for page, begin, end in _partial_pages(start, stop, size):
            if self.cells is None:
                return None
            starts = self.cells.of_layers(self.group, layers)
            segments.append(_Segment(starts, _cells(src, page, begin, end), _cells(dst, page, begin, end)))
        return segments


class RouteBlocks:
    """A planner of chunks for one peer, in blocks.

    Attributes:
        lists: The block lists that the positions of its plans refer to, by the memory locations of both sides.
    """

    def __init__(self, lists: Mapping[Locations, BlockLists], groups: tuple[_GroupBlocks, ...]) -> None:
        self.lists = lists
        self._groups = groups

    @classmethod
    def from_route(cls, route: BoundRoute) -> Self | None:
        """Build the block lists of a route; None if its pages are not blocks, or too many."""
        pages_are_blocks = route.copy_groups and all(map(_page_is_block, route.copy_groups))
        if not pages_are_blocks or _most_blocks(route) > MAX_POSITIONS:
            return None
        built: dict[Locations, _Lists] = {}
        groups = []
        for group in route.copy_groups:
            lists = built.setdefault(group.locations, _Lists(group.locations))
            num_cells = _cells_per_page(group)
            pages = lists.add(group, num_cells * group.num_heads * group.head_bytes, blocks_per_page=1)
            cells = lists.add(group, group.unit_bytes, blocks_per_page=num_cells) if group.pages_contiguous else None
            groups.append(_GroupBlocks(group, pages, cells))
        return cls({locations: lists.finished() for locations, lists in built.items()}, tuple(groups))

    def plan(self, components: Mapping[str, ComponentSlice], layers: LayerRange = ALL_LAYERS) -> Blocks | None:
        """Compute the blocks that move some tokens; components that the route does not have are ignored.

        Returns:
            None if there are no blocks or too many, or if the chunk needs descriptors: it begins or ends within a page
            of interleaved tensors, or components are in several locations.

        Raises:
            PlanError: A page table does not cover its tokens.
        """
        segments: list[_Segment] = []
        used: set[Locations] = set()
        for blocks in self._groups:
            if blocks.group.component in components:
                found = blocks.segments(components[blocks.group.component], layers)
                if found is None:
                    return None
                segments += found
                used.add(blocks.group.locations)
        if len(used) != 1:
            return None
        lists = self.lists[used.pop()]
        counts = [segment.num_blocks for segment in segments]
        if not 0 < sum(counts) <= MAX_BLOCKS:
            return None
        num_bytes = sum([count * segment.starts.block_bytes for count, segment in zip(counts, segments, strict=True)])
        src = [np.add.outer(segment.starts.src, segment.src).ravel() for segment in segments]
        dst = [np.add.outer(segment.starts.dst, segment.dst).ravel() for segment in segments]
        if len(segments) == 1:
            return Blocks(lists, src[0], dst[0], num_bytes)
        return Blocks(lists, np.concatenate(src), np.concatenate(dst), num_bytes)


class _Lists:
    """Builds block lists for memory in one location on each side."""

    def __init__(self, locations: Locations) -> None:
        self._devices = tuple(location.device_id for location in locations)
        self._runs: tuple[list[UInt64Array], list[UInt64Array]] = ([], [])
        self._counts = [0, 0]

    def add(self, group: CopyGroup, block_bytes: int, *, blocks_per_page: int) -> _Starts:
        """Add a run of blocks for each slice of a copy group."""
        starts = []
        for side, (bases, steps) in enumerate(((group.src_bases, group.src), (group.dst_bases, group.dst))):
            count = steps.slots * blocks_per_page
            runs = np.empty((len(bases), 5), np.uint64)
            distance = max(block_bytes, steps.slot_stride // blocks_per_page)
            runs[:, 0] = bases
            runs[:, 1:] = block_bytes, self._devices[side], distance, count
            starts.append(self._counts[side] + np.arange(len(bases), dtype=np.int64) * count)
            self._runs[side].append(runs)
            self._counts[side] += len(bases) * count
        src, dst = (positions.astype(np.int32) for positions in starts)
        return _Starts(src, dst, block_bytes)

    def finished(self) -> BlockLists:
        return BlockLists(*(np.concatenate(runs) for runs in self._runs))


def _cells_per_page(group: CopyGroup) -> int:
    return group.src.tokens_per_slot // group.tokens_per_cell


def _most_blocks(route: BoundRoute) -> int:
    """Count the blocks in a route's lists, on the side that has more."""
    blocks_per_slot = [len(group.layers) * (1 + _cells_per_page(group)) for group in route.copy_groups]
    return max(
        sum(count * side.slots for count, side in zip(blocks_per_slot, sides, strict=True))
        for sides in ([group.src for group in route.copy_groups], [group.dst for group in route.copy_groups])
    )


def _page_is_block(group: CopyGroup) -> bool:
    """Return whether the wanted cells of a page have no gaps, and are the same in the same order on both sides."""
    if group.src.tokens_per_slot != group.dst.tokens_per_slot or group.shards.runs:
        return False
    head_bytes = _cells_per_page(group) * group.head_bytes
    is_head_major = all(
        side.token_stride == group.head_bytes and side.head_stride == head_bytes for side in (group.src, group.dst)
    )
    return is_head_major or (group.heads_contiguous and group.tokens_contiguous)


def _cells(table: PageTable, page: int, begin: int, end: int) -> Positions:
    """Return the positions of cells `begin` to `end` of one page of a request."""
    first = int(table.between(page, page + 1)[0]) * table.page_size
    return np.arange(first + begin, first + end, dtype=np.int32)


def _partial_pages(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the pages that a range covers only in part: page, first cell, end cell."""
    first, last = start // size, stop // size
    if start % size:
        yield first, start % size, min(size, stop - first * size)
    if stop % size and (last > first or not start % size):
        yield last, 0, stop % size


def run_extents(runs: UInt64Array) -> UInt64Array:
    """Return the memory of each run: uint64[num_runs, 3] of address, length in bytes and device id."""
    found: UInt64Array = runs[:, :3].copy()
    found[:, 1] += (runs[:, 4] - np.uint64(1)) * runs[:, 3]
    return found


def _descriptors(runs: UInt64Array, positions: Positions) -> UInt64Array:
    counts = runs[:, 4].astype(np.int64)
    firsts = np.cumsum(counts) - counts
    owner = firsts.searchsorted(positions, side="right") - 1
    found: UInt64Array = runs[owner, :3].copy()
    found[:, 0] += (positions - firsts[owner]).astype(np.uint64) * runs[owner, 3]
    return found
