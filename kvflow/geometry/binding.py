"""Routes combined with the layouts of both sides, grouped so that the planner computes offsets only once.

Both sides do this once for each pair of ranks, at the handshake.
"""

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import RouteError
from kvflow.geometry.expected import ExpectedBytes
from kvflow.geometry.layout import HeldRegion, KVLayout, Region, RegionKey
from kvflow.geometry.memory import Location
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, count_shared, layers_within, overlap_pattern
from kvflow.geometry.routes import RegionSlice, Route, check_cells_match

__all__ = ["BoundRoute", "CopyGroup", "ShardOverlap", "SlotGeometry", "bind_route"]


class ShardOverlap(NamedTuple):
    """The tokens that both sides hold.

    Attributes:
        period: Tokens after which the pattern repeats.
        held: Tokens in a period that both sides hold.
        runs: Upper bound for the runs that these form, without crossing a page boundary of either side; 0 if both sides
            hold the same tokens, whose runs end at page boundaries alone.
    """

    period: int
    held: int
    runs: int

    @classmethod
    def from_regions(cls, source: HeldRegion, target: HeldRegion) -> "ShardOverlap":
        """Compare the token shards of two regions; raise LayoutError if they are incompatible."""
        src, dst = source.shard, target.shard
        _, period = overlap_pattern(src, dst)
        held = count_shared((0, period), src, dst)
        if src == dst or src.size == dst.size == 1:
            return cls(period, held, 0)
        steps = (shard.interleave for shard in (src, dst) if shard.size > 1)
        return cls(period, held, held // math.gcd(source.region.tokens_per_slot, target.region.tokens_per_slot, *steps))


class SlotGeometry(NamedTuple):
    """Size and strides of a region on one side, strides in bytes. Equal for all layers of an ordinary pool."""

    slots: int
    slot_stride: int
    tokens_per_slot: int
    token_stride: int
    head_stride: int

    def page_bytes(self, tokens_per_cell: int) -> int:
        """Bytes from the first cell of a page to the end of the last, if there are no gaps."""
        return self.tokens_per_slot // tokens_per_cell * self.token_stride

    @classmethod
    def from_region(cls, region: Region) -> "SlotGeometry":
        """Describe the geometry of a region."""
        return cls(region.slots, region.slot_stride, region.tokens_per_slot, region.token_stride, region.head_stride)


@dataclass(frozen=True, eq=False)
class CopyGroup:
    """Region slices that differ only in their start addresses, so that offsets are computed once for all of them.

    Attributes:
        component: Name of the component, whose page tables apply.
        src: Geometry on the sending side.
        dst: Geometry on the receiving side.
        num_heads: Heads of each slice.
        head_bytes: Size of a cell.
        tokens_per_cell: Tokens that share a cell.
        shards: How the token shards of the two sides overlap.
        layers: int64[num_slices], global layer of each slice.
        src_bases: uint64[num_slices], address of the first wanted head of page 0, token 0 on the sending side.
        dst_bases: uint64[num_slices], the same on the receiving side.
        locations: Memory locations of the sending and the receiving side.
    """

    component: str
    src: SlotGeometry
    dst: SlotGeometry
    num_heads: int
    head_bytes: int
    tokens_per_cell: int
    shards: ShardOverlap
    layers: NDArray[np.int64]
    src_bases: NDArray[np.uint64]
    dst_bases: NDArray[np.uint64]
    locations: tuple[Location, Location]

    @functools.cached_property
    def heads_contiguous(self) -> bool:
        """Whether the wanted heads of a token are contiguous on both sides."""
        return self.num_heads == 1 or self.src.head_stride == self.dst.head_stride == self.head_bytes

    @functools.cached_property
    def unit_bytes(self) -> int:
        """Contiguous bytes of one token: all wanted heads, or one head."""
        return self.head_bytes * (self.num_heads if self.heads_contiguous else 1)

    @functools.cached_property
    def tokens_contiguous(self) -> bool:
        """Whether the units of neighbouring cells of a page are contiguous on both sides."""
        return self.src.token_stride == self.dst.token_stride == self.unit_bytes

    @functools.cached_property
    def pages_contiguous(self) -> bool:
        """Whether neighbouring pages of the pools are contiguous on both sides, and hold the same tokens."""
        strides = (self.src.page_bytes(self.tokens_per_cell), self.dst.page_bytes(self.tokens_per_cell))
        is_dense = self.tokens_contiguous and not self.shards.runs
        return is_dense and strides == (self.src.slot_stride, self.dst.slot_stride)

    def max_descriptors(self, num_tokens: int, layers: LayerRange = ALL_LAYERS) -> int:
        """Return an upper bound for the number of descriptors of some tokens and layers, before long ones are split."""
        num_periods = -(-num_tokens // self.shards.period)
        held = num_periods * self.shards.held
        cuts = held // self.src.tokens_per_slot + held // self.dst.tokens_per_slot + 3
        if self.shards.runs:
            cuts = num_periods * self.shards.runs + 2
        num_cells = held // self.tokens_per_cell + 2
        runs = min(cuts, num_cells) if self.tokens_contiguous else num_cells
        num_slices = len(self.layers) if layers == ALL_LAYERS else np.count_nonzero(layers_within(self.layers, layers))
        return int(num_slices) * runs * (1 if self.heads_contiguous else self.num_heads)

    def of_layers(self, layers: LayerRange) -> "CopyGroup":
        """Return the group restricted to the slices of some layers."""
        chosen = layers_within(self.layers, layers)
        return dataclasses.replace(
            self, layers=self.layers[chosen], src_bases=self.src_bases[chosen], dst_bases=self.dst_bases[chosen]
        )


class BoundRoute(NamedTuple):
    """A route combined with both layouts.

    Attributes:
        copy_groups: The route's region slices, grouped by geometry.
        src_device: Device ordinal of the sending side's staging memory, which exists only if all of its memory is in
            one location.
        dst_device: The same on the receiving side.
        expected: Expected bytes of each component of the route.
        in_one_write: Components whose memory is in the same locations on both sides: a write has one at each end.
    """

    copy_groups: tuple[CopyGroup, ...]
    src_device: int
    dst_device: int
    expected: dict[str, ExpectedBytes]
    in_one_write: tuple[tuple[str, ...], ...]

    @property
    def descriptors_per_run(self) -> int:
        """Descriptors of a run of pages that is contiguous on both sides."""
        return sum(len(group.src_bases) for group in self.copy_groups)

    @property
    def pages_contiguous(self) -> bool:
        """Whether neighbouring pages of the pools share one descriptor for each tensor and layer."""
        return all(group.pages_contiguous for group in self.copy_groups)


_GroupShape = tuple[str, SlotGeometry, SlotGeometry, int, int, int, ShardOverlap]
"""The first fields of a `CopyGroup`."""


def bind_route(route: Route, src: KVLayout, dst: KVLayout) -> BoundRoute:
    """Check a route against both layouts and group its region slices by geometry.

    The prefill side calls this with a route from the network, so nothing in it is trusted.

    Raises:
        RouteError: A slice names a region or head that a side does not have, or the cells do not match.
        LayoutError: The token shards of the two sides are incompatible.
    """
    src_holdings, dst_holdings = src.held_regions(), dst.held_regions()
    _check_slices(route, src_holdings)
    groups: dict[_GroupShape, list[tuple[int, int, int]]] = {}
    costs: defaultdict[str, defaultdict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    for region_slice in route.slices:
        source = _holding_for(region_slice, src_holdings, "prefill")
        target = _holding_for(region_slice, dst_holdings, "decode")
        check_cells_match(region_slice.key, source, target)
        num_heads = region_slice.heads[1] - region_slice.heads[0]
        region = source.region
        shape = (
            region_slice.component,
            SlotGeometry.from_region(region),
            SlotGeometry.from_region(target.region),
            num_heads,
            region.head_bytes,
            region.tokens_per_cell,
            ShardOverlap.from_regions(source, target),
        )
        bases = (region_slice.layer, _base(region, region_slice), _base(target.region, region_slice))
        groups.setdefault(shape, []).append(bases)
        costs[region_slice.component][region.tokens_per_cell][region_slice.layer] += num_heads * region.head_bytes
    locations = {name: (src.locations[name], dst.locations[name]) for name in costs}
    copy_groups = [
        CopyGroup(
            *shape,
            layers=np.array([layer for layer, _, _ in bases], np.int64),
            src_bases=np.array([base for _, base, _ in bases], np.uint64),
            dst_bases=np.array([base for _, _, base in bases], np.uint64),
            locations=locations[shape[0]],
        )
        for shape, bases in groups.items()
    ]
    expected = {
        name: ExpectedBytes.from_costs(src.by_name[name].shard, dst.by_name[name].shard, own)
        for name, own in costs.items()
    }
    src_device, dst_device = (min(side.registered_locations).device_id for side in (src, dst))
    in_one_write: dict[tuple[Location, Location], tuple[str, ...]] = {}
    for name, ends in locations.items():
        in_one_write[ends] = (*in_one_write.get(ends, ()), name)
    return BoundRoute(tuple(copy_groups), src_device, dst_device, expected, tuple(in_one_write.values()))


def _check_slices(route: Route, holdings: Mapping[RegionKey, HeldRegion]) -> None:
    """Refuse a route that names a cell twice. The count is checked first, because the check is quadratic."""
    most = sum(holding.region.num_heads for holding in holdings.values())
    if len(route.slices) > most:
        raise RouteError("route has more slices than there are heads", slices=len(route.slices), heads=most)
    taken: dict[RegionKey, list[tuple[int, int]]] = {}
    for region_slice in route.slices:
        others = taken.setdefault(region_slice.key, [])
        if any(region_slice.heads[0] < stop and start < region_slice.heads[1] for start, stop in others):
            raise RouteError("route names the same heads twice", **region_slice.key._asdict(), heads=region_slice.heads)
        others.append(region_slice.heads)


def _holding_for(region_slice: RegionSlice, holdings: Mapping[RegionKey, HeldRegion], side: str) -> HeldRegion:
    holding = holdings.get(region_slice.key)
    if holding is None:
        raise RouteError("route names a region that this side does not have", side=side, **region_slice.key._asdict())
    held = holding.region.heads
    if not held[0] <= region_slice.heads[0] < region_slice.heads[1] <= held[1]:
        raise RouteError(
            "route names heads that this side does not have",
            side=side,
            **region_slice.key._asdict(),
            heads=region_slice.heads,
            held=held,
        )
    return holding


def _base(region: Region, region_slice: RegionSlice) -> int:
    return region.address + (region_slice.heads[0] - region.heads[0]) * region.head_stride
