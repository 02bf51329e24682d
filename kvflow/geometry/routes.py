"""Who writes which cells to whom: an exact cover of what one decode rank wants.

Compiled once for each pair of ranks, at the handshake. A *route* names cells by (component, tensor, layer, head), so
it does not depend on how either side lays them out; a *bound route* adds both layouts and is what the planner uses.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import RouteError
from kvflow.geometry.layout import KVLayout, Region, RegionKey

__all__ = ["BoundRoute", "Leg", "Route", "RoutePiece", "SlotGeometry", "bind_route", "compile_routes"]


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
    owners = {engine_rank: layout.regions() for engine_rank, layout in sorted(prefill.items())}
    pieces: dict[int, list[RoutePiece]] = {engine_rank: [] for engine_rank in owners}
    for key, wanted in decode.regions().items():
        for engine_rank, heads in _deal_heads(key, wanted, owners, decode_rank):
            check_cells_match(key, owners[engine_rank][key], wanted)
            pieces[engine_rank].append(RoutePiece(*key, heads))
    if not any(pieces.values()):
        raise RouteError("no prefill rank holds anything that is wanted", engine_ranks=tuple(owners))
    return tuple(Route(engine_rank, tuple(owed)) for engine_rank, owed in pieces.items())


def _deal_heads(
    key: RegionKey, wanted: Region, owners: Mapping[int, Mapping[RegionKey, Region]], decode_rank: int
) -> Iterable[tuple[int, tuple[int, int]]]:
    """Cut the wanted heads where the set of owners changes, and choose one owner for each cut."""
    holders = {rank: regions[key].heads for rank, regions in owners.items() if key in regions}
    if not holders and wanted.optional:
        return
    edges = {wanted.heads[0], wanted.heads[1]}
    for heads in holders.values():
        edges.update(edge for edge in heads if wanted.heads[0] < edge < wanted.heads[1])
    cuts = sorted(edges)
    for start, stop in itertools.pairwise(cuts):
        candidates = [rank for rank, heads in holders.items() if heads[0] <= start and stop <= heads[1]]
        if not candidates:
            raise RouteError("no prefill rank holds a wanted cell", **key._asdict(), head=start)
        yield candidates[(key.layer + decode_rank) % len(candidates)], (start, stop)


def check_cells_match(key: RegionKey, src: Region, dst: Region) -> None:
    """Refuse two regions whose cells are not interchangeable.

    Raises:
        RouteError: Naming the region, the field and both values.
    """
    for field in ("dtype", "head_bytes"):
        prefill, decode = getattr(src, field), getattr(dst, field)
        if prefill != decode:
            raise RouteError("cells differ", **key._asdict(), field=field, prefill=prefill, decode=decode)


class SlotGeometry(NamedTuple):
    """How one side steps through a pool, in bytes; equal for all layers of an ordinary pool."""

    slot_stride: int
    tokens_per_slot: int
    token_stride: int
    head_stride: int

    @classmethod
    def of(cls, region: Region) -> "SlotGeometry":
        """The steps of a region."""
        return cls(region.slot_stride, region.tokens_per_slot, region.token_stride, region.head_stride)


class Leg(NamedTuple):
    """Pieces of a route that differ only in where they start.

    Attributes:
        component: Whose page tables apply.
        src: Steps of the sending side.
        dst: Steps of the receiving side.
        num_heads: Heads of every piece.
        head_bytes: Size of a cell.
        src_bases: uint64[num_pieces], address of the first wanted head of page 0, token 0.
        dst_bases: uint64[num_pieces], the same on the receiving side.
    """

    component: str
    src: SlotGeometry
    dst: SlotGeometry
    num_heads: int
    head_bytes: int
    src_bases: NDArray[np.uint64]
    dst_bases: NDArray[np.uint64]

    @property
    def heads_touch(self) -> bool:
        """The wanted heads of one token are contiguous on both sides."""
        return self.num_heads == 1 or self.src.head_stride == self.dst.head_stride == self.head_bytes

    @property
    def unit_bytes(self) -> int:
        """What is contiguous of one token: all wanted heads, or one."""
        return self.head_bytes * (self.num_heads if self.heads_touch else 1)

    @property
    def tokens_touch(self) -> bool:
        """These units of neighbouring tokens of a page are contiguous on both sides."""
        return self.src.token_stride == self.dst.token_stride == self.unit_bytes

    def max_rows(self, num_tokens: int) -> int:
        """Most descriptors for that many tokens: pages of either side cut the range, and nothing merges."""
        cuts = num_tokens // self.src.tokens_per_slot + num_tokens // self.dst.tokens_per_slot + 3
        pieces = min(cuts, num_tokens) if self.tokens_touch else num_tokens
        return len(self.src_bases) * pieces * (1 if self.heads_touch else self.num_heads)


class BoundRoute(NamedTuple):
    """A route with both layouts worked in: offsets are computed once per leg and added to its bases."""

    legs: tuple[Leg, ...]
    src_device: int
    dst_device: int

    @property
    def bytes_per_token(self) -> int:
        """What one token costs, over all layers and heads of the route."""
        return sum(len(leg.src_bases) * leg.num_heads * leg.head_bytes for leg in self.legs)

    def max_rows(self, num_tokens: int) -> int:
        """Most descriptors that a plan of that many tokens can have."""
        return sum(leg.max_rows(num_tokens) for leg in self.legs)

    @property
    def components(self) -> tuple[str, ...]:
        """Components that need page tables."""
        return tuple(dict.fromkeys(leg.component for leg in self.legs))


def bind_route(route: Route, src: KVLayout, dst: KVLayout) -> BoundRoute:
    """Check a route against both layouts and group its pieces by geometry.

    The prefill side calls this with a route that came over the network, so nothing in it is believed.

    Raises:
        RouteError: A piece names a region or head that a side does not have, or its cells do not match.
    """
    src_regions, dst_regions = src.regions(), dst.regions()
    groups: dict[tuple[str, SlotGeometry, SlotGeometry, int, int], list[tuple[int, int]]] = {}
    for piece in route.pieces:
        source = _region_for(piece, src_regions, "prefill")
        target = _region_for(piece, dst_regions, "decode")
        check_cells_match(piece.key, source, target)
        num_heads = piece.heads[1] - piece.heads[0]
        shape = (piece.component, SlotGeometry.of(source), SlotGeometry.of(target), num_heads, source.head_bytes)
        groups.setdefault(shape, []).append((_first_cell(source, piece), _first_cell(target, piece)))
    legs = tuple(
        Leg(*shape, np.array([base[0] for base in bases], np.uint64), np.array([base[1] for base in bases], np.uint64))
        for shape, bases in groups.items()
    )
    return BoundRoute(legs, src.device_id, dst.device_id)


def _region_for(piece: RoutePiece, regions: Mapping[RegionKey, Region], side: str) -> Region:
    region = regions.get(piece.key)
    if region is None:
        raise RouteError("route names a region that this side does not have", side=side, **piece.key._asdict())
    if not region.heads[0] <= piece.heads[0] < piece.heads[1] <= region.heads[1]:
        raise RouteError(
            "route names heads that this side does not have",
            side=side,
            **piece.key._asdict(),
            heads=piece.heads,
            held=region.heads,
        )
    return region


def _first_cell(region: Region, piece: RoutePiece) -> int:
    return region.address + (piece.heads[0] - region.heads[0]) * region.head_stride
