"""Page tables: which pool pages hold a token range.

A *page table* lists the pool pages that hold a token range, in token order. It always covers whole pages: the table for
tokens `[start, stop)` has one entry for each page-sized block that the range touches, so its first entry holds token
`start - start % page_size`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.layout import Component, KVLayout
from kvflow.geometry.ranges import WHOLE, TokenRange, TokenShard, check_range, held_range, shared_runs

__all__ = [
    "DENSE",
    "WIRE_PAGES",
    "PageIndices",
    "PageTable",
    "Pages",
    "TokenPages",
    "TokenRuns",
    "build_page_table",
    "build_page_tables",
    "count_runs",
    "locate",
    "normalize",
    "pages_spanned",
    "pair_pages",
    "read_page_tables",
]

FEW: Final = 64
"""Pages of a table that is checked without numpy."""

PAGES_AT_ONCE: Final = 2**15
"""Pages of a long table that are looked at together, as their intermediate results fit the CPU's cache."""

WIRE_PAGES: Final = np.dtype("<u4")
"""Page indices on the wire."""

DENSE: Final = 8
"""A page table that lists more than 1/8 of a pool is looked through by marking pages."""

TRUSTED_PAGES: Final = 65_536
"""Longer tables from a peer are not searched for repeated pages, which would take long: the pages belong to the peer,
which has searched the table, and whose own transfer a repeated page would spoil."""

PageIndices = Sequence[int] | NDArray[Any]
"""Positions in a pool, in token order: any flat sequence of integers."""


class PageTable(NamedTuple):
    """Pool pages of one component on one side, for one token range.

    *Places* number the tokens that this side holds, from 0. Without a shard a token's place is its position.

    Attributes:
        pages: uint32[num_pages], pool pages in token order; read-only.
        first_token: Place of the first token of `pages[0]`, a multiple of `page_size`.
        page_size: Tokens of a page.
        shard: Tokens that this side holds.
    """

    pages: NDArray[np.uint32]
    first_token: int
    page_size: int
    shard: TokenShard = WHOLE

    def check_covers(self, tokens: TokenRange, **where: str) -> None:
        """Raise PlanError, with `where`, if the pages cannot hold all tokens of a range that this side holds."""
        start, stop = held_range(tokens, self.shard)
        end = self.first_token + len(self.pages) * self.page_size
        if start < stop and not self.first_token <= start <= stop <= end:
            covered = (self.first_token, end)
            raise PlanError("token range is outside the page table", **where, tokens=tokens, covered=covered)

    def between(self, first: int, last: int) -> NDArray[np.uint32]:
        """Return the pool pages for page numbers `[first, last)` of this side's tokens; must be covered."""
        skipped = self.first_token // self.page_size
        return self.pages[first - skipped : last - skipped]

    def in_places(self) -> "PageTable":
        """Return the table as if the held tokens were all, for two sides that hold the same: ranges are then places."""
        return self._replace(shard=WHOLE)

    def in_cells(self, tokens_per_cell: int) -> "PageTable":
        """Return the table for a tensor in which several tokens share a cell, counted in cells."""
        if tokens_per_cell == 1:
            return self
        first, size = self.first_token // tokens_per_cell, self.page_size // tokens_per_cell
        return PageTable(self.pages, first, size, self.shard.in_cells(tokens_per_cell))


class TokenPages(NamedTuple):
    """Tokens of one component, and the pages that hold them.

    Attributes:
        tokens: Positions `[start, stop)`; for a component of kind "slot" its rows, all or none of them.
        pages: Pool pages that hold them, in token order.
    """

    tokens: TokenRange
    pages: PageIndices


Pages = PageIndices | TokenPages | None
"""What an engine passes for one component: bare indices, indices of other tokens, or None to leave it out."""


class TokenRuns(NamedTuple):
    """Runs of tokens that stay inside one page on both sides.

    Run `i` is `lengths[i]` tokens long. It starts at token `src_tokens[i]` of page `src_slots[i]` on the sending side,
    and at token `dst_tokens[i]` of page `dst_slots[i]` on the receiving side. All arrays are uint64[num_runs].
    """

    src_slots: NDArray[np.uint64]
    src_tokens: NDArray[np.uint64]
    dst_slots: NDArray[np.uint64]
    dst_tokens: NDArray[np.uint64]
    lengths: NDArray[np.uint64]


def pages_spanned(tokens: TokenRange, page_size: int) -> int:
    """Count the pages that a token range touches; PlanError if it is reversed, negative or above `MAX_TOKENS`."""
    return _span(check_range(tokens), page_size)


def _span(tokens: TokenRange, page_size: int) -> int:
    start, stop = tokens
    return -(-stop // page_size) - start // page_size if start < stop else 0


def count_runs(pages: NDArray[Any]) -> int:
    """Count the runs of consecutive pages; `pages` is a flat array of integers."""
    num_breaks = 0
    for start in range(0, len(pages) - 1, PAGES_AT_ONCE):
        some = pages[start : start + PAGES_AT_ONCE + 1]
        num_breaks += int(np.count_nonzero(some[1:] != some[:-1] + 1))
    return num_breaks + bool(len(pages))


def build_page_table(component: Component, given: TokenPages, *, distinct: bool = False) -> PageTable:
    """Check page indices from outside and turn them into a `PageTable`.

    Args:
        component: The pool.
        given: Tokens, and one page for each page-sized block that the held ones touch; integers of any width.
        distinct: Refuse a page that is listed twice. A destination that is written twice is always a mistake.

    Returns:
        The table, with its own read-only copy of the indices.

    Raises:
        PlanError: The indices have a wrong type, shape, count or value, or are for a part of a slot.
    """
    return _build_table(component, TokenPages(check_range(given.tokens), given.pages), distinct=distinct)


def _build_table(component: Component, given: TokenPages, *, distinct: bool, is_kept: bool = False) -> PageTable:
    size = component.tokens_per_slot
    if component.kind == "slot" and given.tokens not in ((0, size), (0, 0)):
        raise PlanError(
            "slot must be transferred as a whole", component=component.name, rows=given.tokens, whole=(0, size)
        )
    array = _as_integers(component, given.pages)
    held = held_range(given.tokens, component.shard)
    needed = _span(held, size)
    if array.size != needed:
        raise PlanError(
            "page table has the wrong number of pages for its token range",
            component=component.name,
            tokens=given.tokens,
            page_size=size,
            pages=int(array.size),
            needed=needed,
        )
    _check_inside(component, array)
    if distinct and needed > 1:
        _check_distinct(component, array)
    table = array.astype(np.uint32, copy=not is_kept)
    table.flags.writeable = False
    return PageTable(table, held[0] - held[0] % size, size, component.shard)


def _as_integers(component: Component, pages: PageIndices) -> NDArray[Any]:
    try:
        array = np.asarray(pages)
    except ValueError:  # lists of different lengths
        array = np.asarray(pages, object)
    if array.size == 0:
        array = array.astype(np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PlanError(
            "page table must be a flat list of integers",
            component=component.name,
            dtype=str(array.dtype),
            ndim=array.ndim,
        )
    return array


def _check_inside(component: Component, array: NDArray[Any]) -> None:
    if array.size <= FEW:  # where a reduction costs more
        pages = array.tolist()
        is_inside = not pages or (min(pages) >= 0 and max(pages) < component.slots)
    else:
        # Negative numbers are large without their sign.
        unsigned = array.view(array.dtype.str.replace("i", "u")) if array.dtype.kind == "i" else array
        is_inside = bool(np.maximum.reduce(unsigned) < component.slots)
    if not is_inside:
        position = int(np.argmax((array < 0) | (array >= component.slots)))
        raise PlanError(
            "page index is out of range",
            component=component.name,
            position=position,
            page=int(array[position]),
            num_pages=component.slots,
        )


def _check_distinct(component: Component, array: NDArray[Any]) -> None:
    if array.size * DENSE > component.slots:  # faster than sorting
        seen = np.zeros(component.slots, np.bool_)
        for start in range(0, array.size, PAGES_AT_ONCE):
            seen[array[start : start + PAGES_AT_ONCE]] = True
        if np.count_nonzero(seen) == array.size:
            return
    values = array.copy()
    values.sort()
    repeats = values[1:] == values[:-1]
    if np.logical_or.reduce(repeats):
        page = int(values[np.argmax(repeats)])
        raise PlanError(
            "page appears twice in the page table",
            component=component.name,
            page=page,
            positions=np.flatnonzero(array == page).tolist(),
        )


def build_page_tables(
    given: Mapping[str, TokenPages], layout: KVLayout, *, distinct: bool = False, is_kept: bool = False
) -> dict[str, PageTable]:
    """Check the page indices of several components of a layout, whose ranges must have been checked.

    If `is_kept`, nobody changes the indices any more, so they need not be copied. See `build_page_table`.

    Raises:
        PlanError: The layout has no such component, or the indices do not fit.
    """
    known = layout.by_name
    if not given.keys() <= known.keys():
        unknown = sorted(given.keys() - known.keys())
        raise PlanError("layout has no such component", given=unknown, known=sorted(known))
    return {name: _build_table(known[name], pages, distinct=distinct, is_kept=is_kept) for name, pages in given.items()}


def normalize(pages: Mapping[str, Pages], layout: KVLayout, tokens: TokenRange) -> dict[str, TokenPages]:
    """Turn what an engine passes into `TokenPages`: bare indices are for `tokens`, or for the whole slot.

    Components that are None are left out. Unknown components are kept; `build_page_tables` refuses them. `tokens` must
    have been checked.

    Raises:
        PlanError: Another token range is invalid, or the pages are not a mapping.
    """
    if not isinstance(pages, (dict, Mapping)):  # checking for the abstract class takes long
        raise PlanError("pages must be a mapping from component names to page lists", type=type(pages).__name__)
    normalized = {}
    for name, given in pages.items():
        if isinstance(given, TokenPages):
            normalized[name] = TokenPages(check_range(given.tokens), given.pages)
        elif given is not None:
            normalized[name] = TokenPages(layout.whole_slots.get(name, tokens), given)
    return normalized


def pair_pages(tokens: TokenRange, src: PageTable, dst: PageTable, *, joined: bool = False) -> TokenRuns:
    """Split a token range at every page boundary of either side, and drop the tokens that either side does not hold.

    Args:
        tokens: `[start, stop)`, covered by both tables.
        src: Pages on the sending side.
        dst: Pages on the receiving side; page size and shard may differ.
        joined: Whether neighbouring pages are contiguous in both pools, so that runs may cross page boundaries.

    Returns:
        Runs in token order. With `joined`, they are merged where page numbers alone show that they are contiguous.

    Raises:
        PlanError: A table does not cover the range.
    """
    src.check_covers(tokens, side="src")
    dst.check_covers(tokens, side="dst")
    if src.shard.size > 1 and src.shard == dst.shard:
        tokens, src, dst = held_range(tokens, src.shard), src.in_places(), dst.in_places()
    is_plain = src.page_size == dst.page_size and src.shard.size == dst.shard.size == 1
    if joined and is_plain and tokens[0] < tokens[1]:
        return _joined_runs(tokens, src, dst)
    starts, lengths = shared_runs(tokens, src.shard, dst.shard, src.page_size, dst.page_size)
    return TokenRuns(*locate(starts, src), *locate(starts, dst), lengths)


def _joined_runs(tokens: TokenRange, src: PageTable, dst: PageTable) -> TokenRuns:
    """Split a range only where either table does not continue with the next page of its pool."""
    start, stop = tokens
    size = src.page_size
    first, last = start // size, -(-stop // size)
    src_pages, dst_pages = src.between(first, last), dst.between(first, last)
    breaks = (src_pages[1:] - src_pages[:-1] != 1) | (dst_pages[1:] - dst_pages[:-1] != 1)
    numbers = np.empty(np.count_nonzero(breaks) + 1, np.int64)
    numbers[0] = 0
    np.add(breaks.nonzero()[0], 1, out=numbers[1:])
    edges = np.empty(len(numbers) + 1, np.uint64)
    np.multiply(numbers + first, size, out=edges[:-1], casting="unsafe")
    edges[0], edges[-1] = start, stop
    within = np.zeros(len(numbers), np.uint64)
    within[0] = start % size
    src_slots, dst_slots = src_pages[numbers].astype(np.uint64), dst_pages[numbers].astype(np.uint64)
    return TokenRuns(src_slots, within, dst_slots, within, edges[1:] - edges[:-1])


def locate(starts: NDArray[np.uint64], table: PageTable) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the page of each token, and its index within the page; tokens must be held and covered."""
    page_size = np.uint64(table.page_size)
    places = starts if table.shard.size == 1 else table.shard.locate(starts)
    positions = (places - np.uint64(table.first_token)) // page_size
    return table.pages[positions].astype(np.uint64), places % page_size


def read_page_tables(
    ranges: Mapping[str, TokenRange], pages: Mapping[str, bytes], layout: KVLayout
) -> dict[str, PageTable]:
    """Decode page tables from their wire format, and check them.

    Args:
        ranges: Tokens that the pages hold, by component.
        pages: Page indices by component, encoded as `WIRE_PAGES`; not trusted, and not changed any more.
        layout: Layout of the rank that owns the pages.

    Raises:
        PlanError: A table is missing, malformed, or does not fit the pool or the tokens. Pages that are listed twice
            are only found in tables of up to `TRUSTED_PAGES`.
    """
    cut_off = [name for name, data in pages.items() if len(data) % WIRE_PAGES.itemsize]
    if cut_off:
        raise PlanError("page table of a grant is truncated", components=cut_off)
    if pages.keys() != ranges.keys():
        raise PlanError("grant must have a page table for each token range", wanted=sorted(ranges), pages=sorted(pages))
    parts = {
        name: TokenPages(check_range(tokens), np.frombuffer(pages[name], WIRE_PAGES)) for name, tokens in ranges.items()
    }
    num_bytes = sum(map(len, pages.values()))
    return build_page_tables(parts, layout, distinct=num_bytes <= TRUSTED_PAGES * WIRE_PAGES.itemsize, is_kept=True)
