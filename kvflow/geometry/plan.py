"""From a route, two page tables and a token range to transport descriptors.

Offsets are worked out once for each leg of a route (all layers of an ordinary pool step alike) and then added to the
legs' base addresses, so the cost per descriptor is a few vectorised additions. Everything is uint64: bounds were
checked when the regions were made, so no sum can wrap.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.pages import PageTable, TokenRuns, pair_pages
from kvflow.geometry.routes import BoundRoute, Leg
from kvflow.geometry.tokens import TokenRange, cell_range

__all__ = ["Descriptors", "Outline", "Share", "outline", "plan"]

Words = NDArray[np.uint64]

MAX_ROWS = 2**25
"""1.5 GiB of descriptors; the peer's page size has a part in how many there are."""


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


class Share(NamedTuple):
    """What of one component is to be moved.

    Attributes:
        tokens: `[start, stop)`, inside both tables.
        src: Pages on the sending side.
        dst: Pages on the receiving side.
        closing: No token of this component follows.
    """

    tokens: TokenRange
    src: PageTable
    dst: PageTable
    closing: bool = True


class _Extents(NamedTuple):
    """Offsets from a leg's bases and lengths, in bytes; three uint64[n] arrays."""

    src: Words
    dst: Words
    lengths: Words


def plan(
    route: BoundRoute,
    shares: Mapping[str, Share],
    *,
    layers: LayerRange = ALL_LAYERS,
    max_bytes: int | None = None,
) -> Descriptors:
    """Work out the descriptors that move some tokens along a route.

    Args:
        route: Who sends what, with both layouts worked in.
        shares: Components to move; those that the route does not have are ignored.
        layers: Global layers to move; all by default.
        max_bytes: Longest descriptor that the transport takes; no limit by default.

    Returns:
        Descriptors merged as far as both sides are contiguous within a region; `(0, 3)` arrays if there is nothing
        to move.

    Raises:
        PlanError: Page tables do not reach over their tokens, or there are too many descriptors.
    """
    return outline(route, shares, layers=layers, max_bytes=max_bytes).descriptors()


class Outline(NamedTuple):
    """A plan that is worked out, but not written down.

    Attributes:
        parts: What each leg has to move, from its bases.
        src_device: Device ordinal of the sending side.
        dst_device: The same of the receiving side.
    """

    parts: Sequence[tuple[Leg, _Extents]]
    src_device: int
    dst_device: int

    @property
    def num_rows(self) -> int:
        """Descriptors that it has."""
        return sum(len(leg.src_bases) * len(extents.lengths) for leg, extents in self.parts)

    def descriptors(self) -> Descriptors:
        """Write it down.

        Raises:
            PlanError: There are too many descriptors.
        """
        total = self.num_rows
        if total > MAX_ROWS:
            raise PlanError("plan has too many descriptors; send smaller chunks", descriptors=total, limit=MAX_ROWS)
        src, dst = np.empty((total, 3), np.uint64), np.empty((total, 3), np.uint64)
        src[:, 2], dst[:, 2] = self.src_device, self.dst_device
        row = 0
        for leg, extents in self.parts:
            shape = (len(leg.src_bases), len(extents.lengths))
            rows = slice(row, row + shape[0] * shape[1])
            np.add.outer(leg.src_bases, extents.src, out=src[rows, 0].reshape(shape))
            np.add.outer(leg.dst_bases, extents.dst, out=dst[rows, 0].reshape(shape))
            src[rows, 1].reshape(shape)[:] = extents.lengths
            dst[rows, 1].reshape(shape)[:] = extents.lengths
            row = rows.stop
        return Descriptors(src, dst)


def outline(
    route: BoundRoute,
    shares: Mapping[str, Share],
    *,
    layers: LayerRange = ALL_LAYERS,
    max_bytes: int | None = None,
) -> Outline:
    """Work a plan out as far as is needed to count its descriptors; arguments and errors as in `plan`."""
    return Outline(list(_parts(route, shares, layers, max_bytes)), route.src_device, route.dst_device)


def _parts(
    route: BoundRoute, shares: Mapping[str, Share], layers: LayerRange, max_bytes: int | None
) -> Iterator[tuple[Leg, _Extents]]:
    """What each leg of a route has to move, from its bases."""
    runs: dict[tuple[str, int, bool], TokenRuns] = {}
    for leg in route.legs:
        if leg.component not in shares:
            continue
        chosen = leg.of_layers(layers)
        if not chosen.layers.size:
            continue
        key = (leg.component, leg.tokens_per_cell, leg.pages_touch)
        if key not in runs:
            runs[key] = _cell_runs(shares[leg.component], leg.tokens_per_cell, joined=leg.pages_touch)
        yield chosen, _split(_merge(_extents(leg, runs[key])), max_bytes)


def _cell_runs(share: Share, tokens_per_cell: int, *, joined: bool) -> TokenRuns:
    """Runs of cells; where every token has cells of its own, these are runs of tokens."""
    cells = cell_range(share.tokens, tokens_per_cell, closing=share.closing)
    return pair_pages(cells, share.src.in_cells(tokens_per_cell), share.dst.in_cells(tokens_per_cell), joined=joined)


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


def _split(extents: _Extents, max_bytes: int | None) -> _Extents:
    """Cut extents that are too long into pieces of `max_bytes` and a rest."""
    if max_bytes is None or not len(extents.lengths) or int(extents.lengths.max()) <= max_bytes:
        return extents
    limit = np.uint64(max_bytes)
    counts = ((extents.lengths + (limit - np.uint64(1))) // limit).astype(np.intp)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(firsts)) - firsts).astype(np.uint64) * limit
    lengths = np.minimum(np.repeat(extents.lengths, counts) - offsets, limit)
    return _Extents(np.repeat(extents.src, counts) + offsets, np.repeat(extents.dst, counts) + offsets, lengths)
