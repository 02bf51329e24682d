"""Which prefill rank writes which cells: an exact cover of what one decode rank wants.

Compiled once for each pair of ranks, at the handshake. A *route* names cells by (component, tensor, layer, head), so it
does not depend on either side's layout; `binding` combines it with both.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from kvflow.errors import RouteError
from kvflow.geometry.layout import HeldRegion, KVLayout, Name, RegionKey
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenShard, count_shared, overlap_pattern

__all__ = ["RegionSlice", "Route", "check_cells_match", "compile_routes", "slices_in_order"]


MAX_SLICES = 16_384
"""Maximum slices of a route. A region has several if its heads come from several ranks in turn."""

Index = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class RegionSlice(msgspec.Struct, frozen=True, array_like=True):
    """Heads `[heads[0], heads[1])` of one region."""

    component: Name
    tensor: Name
    layer: Index
    heads: tuple[Index, Index]

    @property
    def key(self) -> RegionKey:
        """Key of the region."""
        return RegionKey(self.component, self.tensor, self.layer)


def slices_in_order(
    slices: Iterable[RegionSlice], component: str, layers: LayerRange = ALL_LAYERS
) -> list[RegionSlice]:
    """Return the slices of one component, in the order in which digests and packed payloads visit them.

    Both sides of a transfer rely on it: layer, tensor, heads.
    """
    start, stop = layers
    chosen = (one for one in slices if one.component == component and start <= one.layer)
    own = [one for one in chosen if stop is None or one.layer < stop]
    return sorted(own, key=lambda one: (one.layer, one.tensor, one.heads))


class Route(msgspec.Struct, frozen=True):
    """The region slices that one prefill rank writes to one decode rank; empty if there are none.

    Attributes:
        engine_rank: The prefill rank.
        slices: Disjoint region slices.
    """

    engine_rank: Index
    slices: Annotated[tuple[RegionSlice, ...], msgspec.Meta(max_length=MAX_SLICES)]


def compile_routes(prefill: Mapping[int, KVLayout], decode: KVLayout, *, decode_rank: int) -> tuple[Route, ...]:
    """Choose exactly one owner for each cell that a decode rank wants.

    Where several prefill ranks hold the same heads (replicas), they take turns by layer, shifted by the decode rank, so
    that they share the work.

    Args:
        prefill: Layout of each prefill rank of the instance, by engine rank.
        decode: Layout of the decode rank.
        decode_rank: Its engine rank.

    Returns:
        One route for each prefill rank, in order of engine rank.

    Raises:
        RouteError: Fingerprints differ, a wanted cell has no owner, or an owner's cells have another size or type; the
            cell or field is named.
    """
    for engine_rank, layout in sorted(prefill.items()):
        if layout.fingerprint != decode.fingerprint:
            raise RouteError(
                "model fingerprints differ",
                engine_rank=engine_rank,
                prefill=layout.fingerprint,
                decode=decode.fingerprint,
            )
    owners = {engine_rank: layout.held_regions() for engine_rank, layout in sorted(prefill.items())}
    slices: dict[int, list[RegionSlice]] = {engine_rank: [] for engine_rank in owners}
    for key, wanted in decode.held_regions().items():
        for engine_rank, heads in _assign(key, wanted, owners, decode_rank):
            check_cells_match(key, owners[engine_rank][key], wanted)
            slices[engine_rank].append(RegionSlice(*key, heads))
    if not any(slices.values()):
        raise RouteError("no prefill rank has any part of this cache", engine_ranks=tuple(owners))
    return tuple(Route(engine_rank, tuple(own)) for engine_rank, own in slices.items())


def _assign(
    key: RegionKey, wanted: HeldRegion, owners: Mapping[int, Mapping[RegionKey, HeldRegion]], decode_rank: int
) -> Iterable[tuple[int, tuple[int, int]]]:
    """Split the wanted heads where the set of owners changes, and choose the owners of each range."""
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
        chosen = _assign_tokens(candidates, wanted.shard, turn=key.layer + decode_rank)
        if not chosen:
            raise RouteError("no prefill rank has this part of the cache", **key._asdict(), head=start)
        for rank in chosen:
            yield rank, (start, stop)


def _assign_tokens(candidates: Mapping[int, TokenShard], wanted: TokenShard, turn: int) -> list[int]:
    """Choose ranks that together hold each wanted token exactly once; none if they cannot.

    Candidates are grouped by how they shard the tokens. Of the groups that hold all wanted tokens, the one with the
    fewest shards is taken; within it, replicas of one shard take turns.
    """
    schemes = sorted({(shard.size, shard.interleave) for shard in candidates.values()})
    for size, interleave in schemes:
        needed = [
            shard
            for shard in (TokenShard(size, rank, interleave) for rank in range(size))
            if count_shared((0, overlap_pattern(shard, wanted)[1]), shard, wanted)
        ]
        replicas = [[rank for rank, shard in candidates.items() if shard == one] for one in needed]
        if all(replicas):
            return [ranks[turn % len(ranks)] for ranks in replicas]
    return []


def check_cells_match(key: RegionKey, src: HeldRegion, dst: HeldRegion) -> None:
    """Raise RouteError if the cells of two regions differ; it names the region, the field and both values."""
    opaque = [side.region for side in (src, dst) if side.region.tokens_per_cell == side.region.tokens_per_slot]
    if len(opaque) == 2 and src.region.head_bytes != dst.region.head_bytes:  # a page is one cell
        sizes = [region.tokens_per_slot for region in opaque]
        if sizes[0] != sizes[1]:
            raise RouteError(
                "pages are copied as a whole, so their sizes must be equal",
                **key._asdict(),
                field="page_size",
                prefill=sizes[0],
                decode=sizes[1],
            )
    fields = ["dtype", "head_bytes", "tokens_per_cell", *(["tokens_per_slot"] if dst.kind == "slot" else [])]
    differing = [(field, getattr(src.region, field), getattr(dst.region, field)) for field in fields]
    for field, prefill, decode in [("kind", src.kind, dst.kind), *differing]:
        if prefill != decode:
            raise RouteError("layouts differ", **key._asdict(), field=field, prefill=prefill, decode=decode)
