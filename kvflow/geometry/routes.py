"""Who writes which cells to whom: an exact cover of what one decode rank wants.

Compiled once for each pair of ranks, at the handshake. A *route* names cells by (component, tensor, layer, head), so
it does not depend on how either side lays them out; a *bound route* adds both layouts and is what the planner uses.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import RouteError
from kvflow.geometry.debts import Costs, Debt
from kvflow.geometry.layers import ALL_LAYERS, LayerRange, layers_within
from kvflow.geometry.layout import KVLayout, Region, RegionKey
from kvflow.geometry.tokens import TokenRange, TokenShard, count_shared, overlap_pattern

__all__ = [
    "BoundRoute",
    "Leg",
    "Route",
    "RoutePiece",
    "SlotGeometry",
    "bind_route",
    "compile_routes",
]


class RoutePiece(msgspec.Struct, frozen=True, array_like=True):
    """Heads `[heads[0], heads[1])` of one region."""

    component: str
    tensor: str
    layer: int
    heads: tuple[int, int]

    @property
    def key(self) -> RegionKey:
        """The region it is cut from."""
        return RegionKey(self.component, self.tensor, self.layer)


class Route(msgspec.Struct, frozen=True):
    """Everything that prefill rank `engine_rank` owes to one decode rank; no pieces if it owes nothing."""

    engine_rank: int
    pieces: tuple[RoutePiece, ...]


def compile_routes(prefill: Mapping[int, KVLayout], decode: KVLayout, *, decode_rank: int) -> tuple[Route, ...]:
    """Pick exactly one owner for each cell that a decode rank wants.

    Where several prefill ranks hold the same heads (replicas), layers are dealt out in turn, shifted by the decode
    rank, so that replicas share the work instead of writing twice.

    Args:
        prefill: Layout of each prefill rank of the instance, by engine rank.
        decode: Layout of the decode rank.
        decode_rank: Its engine rank.

    Returns:
        One route for each prefill rank, in order of engine rank.

    Raises:
        RouteError: Fingerprints differ, a wanted cell has no owner, or an owner's cells have another size or type;
            the cell or field is named.
    """
    for engine_rank, layout in sorted(prefill.items()):
        if layout.fingerprint != decode.fingerprint:
            raise RouteError(
                "model fingerprints differ",
                engine_rank=engine_rank,
                prefill=layout.fingerprint,
                decode=decode.fingerprint,
            )
    owners = {engine_rank: _holdings(layout) for engine_rank, layout in sorted(prefill.items())}
    pieces: dict[int, list[RoutePiece]] = {engine_rank: [] for engine_rank in owners}
    for key, wanted in _holdings(decode).items():
        for engine_rank, heads in _deal(key, wanted, owners, decode_rank):
            check_cells_match(key, owners[engine_rank][key], wanted)
            pieces[engine_rank].append(RoutePiece(*key, heads))
    if not any(pieces.values()):
        raise RouteError("no prefill rank holds anything that is wanted", engine_ranks=tuple(owners))
    return tuple(Route(engine_rank, tuple(owed)) for engine_rank, owed in pieces.items())


class _Holding(NamedTuple):
    """A region, and what its component says about it."""

    region: Region
    kind: str
    shard: TokenShard


def _holdings(layout: KVLayout) -> dict[RegionKey, _Holding]:
    return {
        RegionKey(component.name, region.tensor, region.layer): _Holding(region, component.kind, component.shard)
        for component in layout.components
        for region in component.regions
    }


def _deal(
    key: RegionKey, wanted: _Holding, owners: Mapping[int, Mapping[RegionKey, _Holding]], decode_rank: int
) -> Iterable[tuple[int, tuple[int, int]]]:
    """Cut the wanted heads where the set of owners changes, and choose the owners of each cut."""
    holders = {rank: holdings[key] for rank, holdings in owners.items() if key in holdings}
    if not holders and wanted.region.optional:
        return
    first, last = wanted.region.heads
    edges = {first, last}
    for holding in holders.values():
        edges.update(edge for edge in holding.region.heads if first < edge < last)
    for start, stop in itertools.pairwise(sorted(edges)):
        candidates = {
            rank: holding.shard
            for rank, holding in holders.items()
            if holding.region.heads[0] <= start and stop <= holding.region.heads[1]
        }
        chosen = _deal_tokens(candidates, wanted.shard, turn=key.layer + decode_rank)
        if not chosen:
            raise RouteError("no prefill rank holds a wanted cell", **key._asdict(), head=start)
        for rank in chosen:
            yield rank, (start, stop)


def _deal_tokens(candidates: Mapping[int, TokenShard], wanted: TokenShard, turn: int) -> list[int]:
    """Choose ranks that together hold each wanted token exactly once; none if they cannot.

    Ranks that split the tokens in the same way form a family. The family with the fewest members that has all that
    are needed is taken; within it, replicas of one shard take turns.
    """
    families = sorted({(shard.size, shard.interleave) for shard in candidates.values()})
    for size, interleave in families:
        needed = [
            shard
            for shard in (TokenShard(size, rank, interleave) for rank in range(size))
            if count_shared((0, overlap_pattern(shard, wanted)[1]), shard, wanted)
        ]
        replicas = [[rank for rank, shard in candidates.items() if shard == one] for one in needed]
        if all(replicas):
            return [ranks[turn % len(ranks)] for ranks in replicas]
    return []


def check_cells_match(key: RegionKey, src: _Holding, dst: _Holding) -> None:
    """Refuse two regions whose cells are not interchangeable.

    Raises:
        RouteError: Naming the region, the field and both values.
    """
    fields = ["dtype", "head_bytes", "tokens_per_cell", *(["tokens_per_slot"] if dst.kind == "slot" else [])]
    differing = [(field, getattr(src.region, field), getattr(dst.region, field)) for field in fields]
    for field, prefill, decode in [("kind", src.kind, dst.kind), *differing]:
        if prefill != decode:
            raise RouteError("cells differ", **key._asdict(), field=field, prefill=prefill, decode=decode)


class SlotGeometry(NamedTuple):
    """How one side steps through a pool of so many slots, in bytes; equal for all layers of an ordinary pool."""

    slots: int
    slot_stride: int
    tokens_per_slot: int
    token_stride: int
    head_stride: int

    def page_bytes(self, tokens_per_cell: int) -> int:
        """From the first to past the last cell of a page, if they follow each other without gaps."""
        return self.tokens_per_slot // tokens_per_cell * self.token_stride

    @classmethod
    def of(cls, region: Region) -> "SlotGeometry":
        """The steps of a region."""
        return cls(region.slots, region.slot_stride, region.tokens_per_slot, region.token_stride, region.head_stride)


@dataclass(frozen=True, eq=False)
class Leg:
    """Pieces of a route that differ only in where they start.

    Attributes:
        component: Whose page tables apply.
        src: Steps of the sending side.
        dst: Steps of the receiving side.
        num_heads: Heads of every piece.
        head_bytes: Size of a cell.
        tokens_per_cell: Tokens that share a cell.
        layers: int64[num_pieces], global layer of each piece.
        src_bases: uint64[num_pieces], address of the first wanted head of page 0, token 0.
        dst_bases: uint64[num_pieces], the same on the receiving side.
    """

    component: str
    src: SlotGeometry
    dst: SlotGeometry
    num_heads: int
    head_bytes: int
    tokens_per_cell: int
    layers: NDArray[np.int64]
    src_bases: NDArray[np.uint64]
    dst_bases: NDArray[np.uint64]

    @functools.cached_property
    def heads_touch(self) -> bool:
        """The wanted heads of one token are contiguous on both sides."""
        return self.num_heads == 1 or self.src.head_stride == self.dst.head_stride == self.head_bytes

    @functools.cached_property
    def unit_bytes(self) -> int:
        """What is contiguous of one token: all wanted heads, or one."""
        return self.head_bytes * (self.num_heads if self.heads_touch else 1)

    @functools.cached_property
    def tokens_touch(self) -> bool:
        """These units of neighbouring cells of a page are contiguous on both sides."""
        return self.src.token_stride == self.dst.token_stride == self.unit_bytes

    @functools.cached_property
    def pages_touch(self) -> bool:
        """Whole pages that follow each other in a pool are contiguous on both sides."""
        strides = (self.src.page_bytes(self.tokens_per_cell), self.dst.page_bytes(self.tokens_per_cell))
        return self.tokens_touch and strides == (self.src.slot_stride, self.dst.slot_stride)

    def max_rows(self, num_tokens: int, step: int, layers: LayerRange) -> int:
        """Most descriptors for that many tokens, before large ones are split.

        Args:
            num_tokens: Tokens.
            step: Where shards may change, in tokens; 0 if both sides hold every token.
            layers: To move.
        """
        cuts = num_tokens // self.src.tokens_per_slot + num_tokens // self.dst.tokens_per_slot + 3
        if step:
            cuts = num_tokens // math.gcd(step, self.src.tokens_per_slot, self.dst.tokens_per_slot) + 3
        num_cells = num_tokens // self.tokens_per_cell + 2
        pieces = min(cuts, num_cells) if self.tokens_touch else num_cells
        is_whole = layers == ALL_LAYERS
        num_bases = len(self.layers) if is_whole else int(np.count_nonzero(layers_within(self.layers, layers)))
        return num_bases * pieces * (1 if self.heads_touch else self.num_heads)

    def of_layers(self, layers: LayerRange) -> "Leg":
        """The pieces of some layers."""
        if layers == ALL_LAYERS:
            return self
        chosen = layers_within(self.layers, layers)
        return dataclasses.replace(
            self, layers=self.layers[chosen], src_bases=self.src_bases[chosen], dst_bases=self.dst_bases[chosen]
        )


class BoundRoute(NamedTuple):
    """A route with both layouts worked in: offsets are computed once per leg and added to its bases.

    Attributes:
        legs: Pieces, grouped.
        src_device: Device ordinal of the sending side.
        dst_device: The same of the receiving side.
        debts: What each component of the route costs.
    """

    legs: tuple[Leg, ...]
    src_device: int
    dst_device: int
    debts: dict[str, Debt]

    @property
    def num_bases(self) -> int:
        """Descriptors that a run of pages takes which lie together on both sides."""
        return sum(len(leg.src_bases) for leg in self.legs)

    @property
    def pages_touch(self) -> bool:
        """Pages that follow each other in their pools go in one descriptor for each tensor and layer."""
        return all(leg.pages_touch for leg in self.legs)

    def num_bytes(self, component: str, tokens: TokenRange, *, closing: bool) -> int:
        """Bytes that move for a token range of one component; 0 if none of it is owed."""
        return self.debts[component].num_bytes(tokens, closing=closing) if component in self.debts else 0

    def max_rows(self, component: str, num_tokens: int, layers: LayerRange = ALL_LAYERS) -> int:
        """Most descriptors that a plan of that many tokens, and of these layers, of a component can have."""
        debt = self.debts.get(component)
        step = 0
        if debt is not None and not debt.is_whole:
            step = math.gcd(*(shard.interleave for shard in (debt.src, debt.dst) if shard.size > 1))
        return sum(leg.max_rows(num_tokens, step, layers) for leg in self.legs if leg.component == component)


def bind_route(route: Route, src: KVLayout, dst: KVLayout) -> BoundRoute:
    """Check a route against both layouts and group its pieces by geometry.

    The prefill side calls this with a route that came over the network, so nothing in it is believed.

    Raises:
        RouteError: A piece names a region or head that a side does not have, or its cells do not match.
        LayoutError: The two sides' shards of the tokens do not fit each other.
    """
    src_holdings, dst_holdings = _holdings(src), _holdings(dst)
    _check_pieces(route, src_holdings)
    groups: dict[_LegShape, list[tuple[int, int, int]]] = {}
    costs: dict[str, Costs] = {}
    for piece in route.pieces:
        source = _holding_for(piece, src_holdings, "prefill")
        target = _holding_for(piece, dst_holdings, "decode")
        check_cells_match(piece.key, source, target)
        overlap_pattern(source.shard, target.shard)
        num_heads = piece.heads[1] - piece.heads[0]
        region = source.region
        shape = _LegShape(
            piece.component,
            SlotGeometry.of(region),
            SlotGeometry.of(target.region),
            num_heads,
            region.head_bytes,
            region.tokens_per_cell,
        )
        bases = (piece.layer, _base(region, piece), _base(target.region, piece))
        groups.setdefault(shape, []).append(bases)
        of_component = costs.setdefault(piece.component, Costs(source.shard, target.shard, {}))
        of_component.add(region.tokens_per_cell, piece.layer, num_heads * region.head_bytes)
    legs = [
        Leg(
            *shape,
            layers=np.array([layer for layer, _, _ in bases], np.int64),
            src_bases=np.array([base for _, base, _ in bases], np.uint64),
            dst_bases=np.array([base for _, _, base in bases], np.uint64),
        )
        for shape, bases in groups.items()
    ]
    debts = {name: of_component.debt() for name, of_component in costs.items()}
    return BoundRoute(tuple(legs), src.device_id, dst.device_id, debts)


def _check_pieces(route: Route, holdings: Mapping[RegionKey, _Holding]) -> None:
    """Refuse a route that asks for a cell twice, and one that must, because it has more pieces than there are heads."""
    most = sum(holding.region.num_heads for holding in holdings.values())
    if len(route.pieces) > most:
        raise RouteError("route has more pieces than there are heads", pieces=len(route.pieces), heads=most)
    taken: dict[RegionKey, list[tuple[int, int]]] = {}
    for piece in route.pieces:
        others = taken.setdefault(piece.key, [])
        if any(piece.heads[0] < stop and start < piece.heads[1] for start, stop in others):
            raise RouteError("route names heads twice", **piece.key._asdict(), heads=piece.heads)
        others.append(piece.heads)


class _LegShape(NamedTuple):
    component: str
    src: SlotGeometry
    dst: SlotGeometry
    num_heads: int
    head_bytes: int
    tokens_per_cell: int


def _holding_for(piece: RoutePiece, holdings: Mapping[RegionKey, _Holding], side: str) -> _Holding:
    holding = holdings.get(piece.key)
    if holding is None:
        raise RouteError("route names a region that this side does not have", side=side, **piece.key._asdict())
    held = holding.region.heads
    if not held[0] <= piece.heads[0] < piece.heads[1] <= held[1]:
        raise RouteError(
            "route names heads that this side does not have",
            side=side,
            **piece.key._asdict(),
            heads=piece.heads,
            held=held,
        )
    return holding


def _base(region: Region, piece: RoutePiece) -> int:
    return region.address + (piece.heads[0] - region.heads[0]) * region.head_stride
