"""Planning transport descriptors from a route, two page tables and a token range.

Offsets are computed once for each copy group of a route (all layers of an ordinary pool share one) and added to the
groups' base addresses, so the cost per descriptor is a few vectorised additions. Everything is uint64. Bounds were
checked when the regions were made, so no sum can wrap.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.binding import BoundRoute, CopyGroup
from kvflow.geometry.pages import PageTable, TokenRuns, pair_pages
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange, cell_range

__all__ = ["ComponentSlice", "Descriptors", "ExtentPlan", "plan", "plan_extents"]

UInt64Array = NDArray[np.uint64]

MAX_DESCRIPTORS = 2**25
"""Maximum descriptors of a plan: 1.5 GiB of them. The number depends on the peer's page size, so it needs a bound."""


class Descriptors(NamedTuple):
    """What to copy: `src[i]` to `dst[i]`.

    Attributes:
        src: uint64[num_descriptors, 3]: address, length in bytes and device id on the sending side.
        dst: The same on the receiving side; lengths are equal pair by pair.
    """

    src: UInt64Array
    dst: UInt64Array

    @property
    def num_bytes(self) -> int:
        """Total bytes to copy."""
        return int(self.src[:, 1].sum())


class ComponentSlice(NamedTuple):
    """Tokens of one component to move, with the pages of both sides.

    Attributes:
        tokens: `[start, stop)`, covered by both tables.
        src: Pages on the sending side.
        dst: Pages on the receiving side.
        final: Whether no token of this component follows.
    """

    tokens: TokenRange
    src: PageTable
    dst: PageTable
    final: bool = True


class _Extents(NamedTuple):
    """Contiguous ranges, the same for every slice of a copy group: offsets from its bases, and lengths, in bytes."""

    src: UInt64Array
    dst: UInt64Array
    lengths: UInt64Array


def plan(
    route: BoundRoute,
    components: Mapping[str, ComponentSlice],
    *,
    layers: LayerRange = ALL_LAYERS,
    max_bytes: int | None = None,
) -> Descriptors:
    """Compute the descriptors that move some tokens along a route.

    Args:
        route: The route, bound to both layouts.
        components: What to move, by component; components that the route does not have are ignored.
        layers: Global layers to move; all by default.
        max_bytes: Longest descriptor that the transport accepts; no limit by default.

    Returns:
        Descriptors, merged where both sides are contiguous within a region; `(0, 3)` arrays if there is nothing to
        move.

    Raises:
        PlanError: A page table does not cover its tokens, or there are too many descriptors.
    """
    return plan_extents(route, components, layers=layers, max_bytes=max_bytes).descriptors()


class ExtentPlan(NamedTuple):
    """Copy groups with their extents: a plan whose descriptors can be counted before they are written out."""

    parts: Sequence[tuple[CopyGroup, _Extents]]
    num_descriptors: int

    def descriptors(self) -> Descriptors:
        """Write out the descriptors; raise PlanError if there are too many."""
        total = self.num_descriptors
        if total > MAX_DESCRIPTORS:
            raise PlanError(
                "plan has too many descriptors; send smaller chunks", descriptors=total, limit=MAX_DESCRIPTORS
            )
        src, dst = np.empty((total, 3), np.uint64), np.empty((total, 3), np.uint64)
        first = 0
        for group, extents in self.parts:
            shape = (len(group.src_bases), len(extents.lengths))
            chosen = slice(first, first + shape[0] * shape[1])
            np.add.outer(group.src_bases, extents.src, out=src[chosen, 0].reshape(shape))
            np.add.outer(group.dst_bases, extents.dst, out=dst[chosen, 0].reshape(shape))
            src[chosen, 1].reshape(shape)[:] = extents.lengths
            dst[chosen, 1].reshape(shape)[:] = extents.lengths
            src[chosen, 2], dst[chosen, 2] = (location.device_id for location in group.locations)
            first = chosen.stop
        return Descriptors(src, dst)


def plan_extents(
    route: BoundRoute,
    components: Mapping[str, ComponentSlice],
    *,
    layers: LayerRange = ALL_LAYERS,
    max_bytes: int | None = None,
) -> ExtentPlan:
    """Compute a plan without writing out its descriptors; arguments and errors as in `plan`."""
    parts: list[tuple[CopyGroup, _Extents]] = []
    num_descriptors = 0
    runs: dict[tuple[str, int, bool], TokenRuns] = {}
    for group in route.copy_groups:
        if group.component not in components:
            continue
        included = group if layers == ALL_LAYERS else group.of_layers(layers)
        if not included.layers.size:
            continue
        key = (group.component, group.tokens_per_cell, group.pages_contiguous)
        if key not in runs:
            runs[key] = _cell_runs(components[group.component], group.tokens_per_cell, joined=group.pages_contiguous)
        extents = _merge(_extents(group, runs[key]))
        if max_bytes is not None:
            extents = _split(extents, max_bytes)
        parts.append((included, extents))
        num_descriptors += len(included.src_bases) * len(extents.lengths)
    return ExtentPlan(parts, num_descriptors)


def _cell_runs(component: ComponentSlice, tokens_per_cell: int, *, joined: bool) -> TokenRuns:
    """Find runs of cells; runs of tokens where each token has its own cells."""
    cells = cell_range(component.tokens, tokens_per_cell, final=component.final)
    return pair_pages(
        cells, component.src.in_cells(tokens_per_cell), component.dst.in_cells(tokens_per_cell), joined=joined
    )


def _extents(group: CopyGroup, runs: TokenRuns) -> _Extents:
    """Return the contiguous ranges of one group, unmerged, ordered so that ranges that can be merged are neighbours."""
    if not group.tokens_contiguous:
        runs = _single_tokens(runs)
    src = runs.src_slots * np.uint64(group.src.slot_stride) + runs.src_tokens * np.uint64(group.src.token_stride)
    dst = runs.dst_slots * np.uint64(group.dst.slot_stride) + runs.dst_tokens * np.uint64(group.dst.token_stride)
    units = _Extents(src, dst, runs.lengths * np.uint64(group.unit_bytes))
    return units if group.heads_contiguous else _head_extents(group, units)


def _head_extents(group: CopyGroup, first_head: _Extents) -> _Extents:
    """Repeat the extents of the first head for every head, heads innermost."""
    heads = np.arange(group.num_heads, dtype=np.uint64)
    return _Extents(
        np.add.outer(first_head.src, heads * np.uint64(group.src.head_stride)).ravel(),
        np.add.outer(first_head.dst, heads * np.uint64(group.dst.head_stride)).ravel(),
        np.repeat(first_head.lengths, group.num_heads),
    )


def _single_tokens(runs: TokenRuns) -> TokenRuns:
    """Split runs into runs of one token."""
    counts = runs.lengths.astype(np.intp)
    total = int(counts.sum())
    run_starts = np.repeat(np.cumsum(counts) - counts, counts)
    within = (np.arange(total) - run_starts).astype(np.uint64)
    return TokenRuns(
        np.repeat(runs.src_slots, counts),
        np.repeat(runs.src_tokens, counts) + within,
        np.repeat(runs.dst_slots, counts),
        np.repeat(runs.dst_tokens, counts) + within,
        np.ones(total, np.uint64),
    )


def _merge(extents: _Extents) -> _Extents:
    """Join neighbours that are contiguous on both sides."""
    if len(extents.lengths) < 2:
        return extents
    src_joins = extents.src[1:] == extents.src[:-1] + extents.lengths[:-1]
    dst_joins = extents.dst[1:] == extents.dst[:-1] + extents.lengths[:-1]
    starts = np.append(0, np.flatnonzero(~(src_joins & dst_joins)) + 1)
    if len(starts) == len(extents.lengths):
        return extents
    return _Extents(extents.src[starts], extents.dst[starts], np.add.reduceat(extents.lengths, starts))


def _split(extents: _Extents, max_bytes: int) -> _Extents:
    """Split extents that are longer than `max_bytes`."""
    if not len(extents.lengths) or int(extents.lengths.max()) <= max_bytes:
        return extents
    limit = np.uint64(max_bytes)
    counts = ((extents.lengths + (limit - np.uint64(1))) // limit).astype(np.intp)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(firsts)) - firsts).astype(np.uint64) * limit
    lengths = np.minimum(np.repeat(extents.lengths, counts) - offsets, limit)
    return _Extents(np.repeat(extents.src, counts) + offsets, np.repeat(extents.dst, counts) + offsets, lengths)
