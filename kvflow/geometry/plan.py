"""From a route, two page tables and a token range to transport descriptors.

Offsets are worked out once for each leg of a route (all layers of an ordinary pool step alike) and then added to the
legs' base addresses, so the cost per descriptor is a few vectorised additions. Everything is uint64: bounds were
checked when the regions were made, so no sum can wrap.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.pages import PageTable, TokenRange, TokenRuns, pair_pages
from kvflow.geometry.routes import BoundRoute, Leg

__all__ = ["Descriptors", "plan"]

Words = NDArray[np.uint64]


class Descriptors(NamedTuple):
    """What to copy: row `i` of `src` to row `i` of `dst`.

    Attributes:
        src: uint64[num_descriptors, 3], rows of (address, length in bytes, device id) on the sending side.
        dst: The same on the receiving side; lengths are equal row by row.
    """

    src: Words
    dst: Words

    @property
    def num_bytes(self) -> int:
        """Bytes that the descriptors move."""
        return int(self.src[:, 1].sum())


class _Extents(NamedTuple):
    """Offsets from a leg's bases and lengths, in bytes; three uint64[n] arrays."""

    src: Words
    dst: Words
    lengths: Words


def plan(route: BoundRoute, tables: Mapping[str, tuple[PageTable, PageTable]], tokens: TokenRange) -> Descriptors:
    """Work out the descriptors that move a token range along a route.

    Args:
        route: Who sends what, with both layouts worked in.
        tables: For each component of the route, the page tables of the (sending, receiving) side.
        tokens: `[start, stop)`, inside every table.

    Returns:
        Descriptors merged as far as both sides are contiguous within a region; `(0, 3)` arrays if there is nothing
        to move.

    Raises:
        PlanError: A component has no page tables, or tables do not reach over the range.
    """
    runs = {component: pair_pages(tokens, *_tables_of(component, tables)) for component in route.components}
    parts = [(leg, _merge(_extents(leg, runs[leg.component]))) for leg in route.legs]
    total = sum(len(leg.src_bases) * len(extents.lengths) for leg, extents in parts)
    src, dst = np.empty((total, 3), np.uint64), np.empty((total, 3), np.uint64)
    src[:, 2], dst[:, 2] = route.src_device, route.dst_device
    row = 0
    for leg, extents in parts:
        shape = (len(leg.src_bases), len(extents.lengths))
        rows = slice(row, row + shape[0] * shape[1])
        src[rows, 0] = np.add.outer(leg.src_bases, extents.src).ravel()
        dst[rows, 0] = np.add.outer(leg.dst_bases, extents.dst).ravel()
        src[rows, 1] = dst[rows, 1] = np.broadcast_to(extents.lengths, shape).ravel()
        row = rows.stop
    return Descriptors(src, dst)


def _tables_of(component: str, tables: Mapping[str, tuple[PageTable, PageTable]]) -> tuple[PageTable, PageTable]:
    if component not in tables:
        raise PlanError("component has no page tables", component=component, known=sorted(tables))
    return tables[component]


def _extents(leg: Leg, runs: TokenRuns) -> _Extents:
    """Contiguous pieces of one leg, unmerged, in an order in which neighbours in memory are neighbours here."""
    units = _run_extents(leg, runs if leg.tokens_touch else _single_tokens(runs))
    return units if leg.heads_touch else _head_extents(leg, units)


def _run_extents(leg: Leg, runs: TokenRuns) -> _Extents:
    """One extent for each run, one unit for each of its tokens."""
    src = runs.src_slots * np.uint64(leg.src.slot_stride) + runs.src_tokens * np.uint64(leg.src.token_stride)
    dst = runs.dst_slots * np.uint64(leg.dst.slot_stride) + runs.dst_tokens * np.uint64(leg.dst.token_stride)
    return _Extents(src, dst, runs.lengths * np.uint64(leg.unit_bytes))


def _head_extents(leg: Leg, first_head: _Extents) -> _Extents:
    """Repeat the extents of the first head for every head, heads innermost."""
    heads = np.arange(leg.num_heads, dtype=np.uint64)
    return _Extents(
        np.add.outer(first_head.src, heads * np.uint64(leg.src.head_stride)).ravel(),
        np.add.outer(first_head.dst, heads * np.uint64(leg.dst.head_stride)).ravel(),
        np.repeat(first_head.lengths, leg.num_heads),
    )


def _single_tokens(runs: TokenRuns) -> TokenRuns:
    """The same runs cut into runs of one token."""
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
