"""Page tables and token ranges: from "these tokens" to "these pages, from this token to that one".

A *page table* lists the pool pages that hold a token range, in token order. It always covers whole pages: the
table for tokens `[start, stop)` has one entry for each page-sized block that the range touches, so its first entry
holds token `start - start % page_size`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.layout import Component, KVLayout
from kvflow.geometry.tokens import WHOLE, TokenRange, TokenShard, check_range, held_range, shared_runs

__all__ = [
    "WIRE_PAGES",
    "PageIndices",
    "PageTable",
    "Pages",
    "Part",
    "TokenRuns",
    "check_part",
    "check_parts",
    "count_runs",
    "locate",
    "pages_spanned",
    "pair_pages",
    "spell_out",
]

WIRE_PAGES: Final = np.dtype("<u4")
"""How page indices travel."""

PageIndices = Sequence[int] | NDArray[Any]
"""Positions in a pool, in token order: any flat sequence of integers."""


class PageTable(NamedTuple):
    """Pool pages of one component on one side, for one token range.

    A rank that holds a shard of the tokens counts only those: its first page begins with the first token it holds.

    Attributes:
        pages: uint32[num_pages], positions in the pool, in token order.
        first_token: Place of the first token of `pages[0]` among the tokens held, a multiple of `page_size`.
        page_size: Tokens of a page.
        shard: Which tokens the side holds.
    """

    pages: NDArray[np.uint32]
    first_token: int
    page_size: int
    shard: TokenShard = WHOLE

    @property
    def end(self) -> int:
        """Place after the last token that the pages have room for."""
        return self.first_token + len(self.pages) * self.page_size

    def covers(self, places: TokenRange) -> bool:
        """Say whether the pages have room for all places of a range among the tokens held."""
        start, stop = places
        return start >= stop or (self.first_token <= start and stop <= self.end)

    def between(self, first: int, last: int) -> NDArray[np.uint32]:
        """The pool pages from page `first` of the tokens held to before page `last`, which must be covered."""
        skipped = self.first_token // self.page_size
        return self.pages[first - skipped : last - skipped]

    def in_cells(self, tokens_per_cell: int) -> "PageTable":
        """The same table for a tensor in which several tokens share a cell: cells take the place of tokens."""
        if tokens_per_cell == 1:
            return self
        first, size = self.first_token // tokens_per_cell, self.page_size // tokens_per_cell
        return PageTable(self.pages, first, size, self.shard.in_cells(tokens_per_cell))


class Part(NamedTuple):
    """A component's share of something that is asked for or sent.

    Attributes:
        tokens: Positions `[start, stop)`; for a component of kind "slot", its rows, which are all or none.
        pages: Pool pages that hold them, in token order.
    """

    tokens: TokenRange
    pages: PageIndices


Pages = PageIndices | Part | None
"""What an engine says about one component: bare indices, indices of other tokens, or that it is left out."""


class TokenRuns(NamedTuple):
    """Pieces of a token range that stay inside one page on both sides; five uint64[num_runs] arrays.

    Run `i` is `lengths[i]` tokens, at token `src_tokens[i]` of page `src_slots[i]` here and at token
    `dst_tokens[i]` of page `dst_slots[i]` there.
    """

    src_slots: NDArray[np.uint64]
    src_tokens: NDArray[np.uint64]
    dst_slots: NDArray[np.uint64]
    dst_tokens: NDArray[np.uint64]
    lengths: NDArray[np.uint64]


def pages_spanned(tokens: TokenRange, page_size: int) -> int:
    """Count the pages that a token range touches.

    Raises:
        PlanError: The range is reversed, negative or absurdly large.
    """
    return _span(check_range(tokens), page_size)


def _span(tokens: TokenRange, page_size: int) -> int:
    start, stop = tokens
    return -(-stop // page_size) - start // page_size if start < stop else 0


def count_runs(pages: NDArray[Any]) -> int:
    """Count runs of pages that follow each other in their pool; `pages` is a flat array of integers."""
    return int(np.count_nonzero(pages[1:] != pages[:-1] + 1)) + bool(len(pages))


def check_part(component: Component, part: Part, *, distinct: bool = False) -> PageTable:
    """Turn page indices from outside into a `PageTable`, or say what is wrong with them.

    Args:
        component: The pool.
        part: Tokens, and one page for each page that the held ones of them touch; integers of any width.
        distinct: Refuse a page that is listed twice (a destination written twice is always a mistake).

    Returns:
        The table, with a copy of the indices that the caller may not change any more.

    Raises:
        PlanError: Wrong type, shape, count or index, or a slot is not meant as a whole.
    """
    check_range(part.tokens)
    size = component.tokens_per_slot
    if component.kind == "slot" and part.tokens not in ((0, size), (0, 0)):
        raise PlanError("a slot moves whole or not at all", component=component.name, rows=part.tokens, whole=(0, size))
    array = _as_integers(component, part.pages)
    held = held_range(part.tokens, component.shard)
    needed = _span(held, size)
    if array.size != needed:
        raise PlanError(
            "page table does not match the token range",
            component=component.name,
            tokens=part.tokens,
            page_size=size,
            pages=int(array.size),
            needed=needed,
        )
    _check_inside(component, array)
    if distinct:
        _check_distinct(component, array)
    table = array.astype(np.uint32)
    table.flags.writeable = False
    return PageTable(table, held[0] - held[0] % size, size, component.shard)


def _as_integers(component: Component, pages: PageIndices) -> NDArray[Any]:
    array = np.asarray(pages)
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
    if not array.size:
        return
    is_low = array.dtype.kind == "i" and np.minimum.reduce(array) < 0
    if is_low or np.maximum.reduce(array) >= component.slots:
        position = int(np.argmax((array < 0) | (array >= component.slots)))
        raise PlanError(
            "page is outside the pool",
            component=component.name,
            position=position,
            page=int(array[position]),
            slots=component.slots,
        )


def _check_distinct(component: Component, array: NDArray[Any]) -> None:
    if array.size < 2:
        return
    values = array.copy()
    values.sort()
    repeats = values[1:] == values[:-1]
    if np.logical_or.reduce(repeats):
        page = int(values[np.argmax(repeats)])
        raise PlanError(
            "page is listed twice",
            component=component.name,
            page=page,
            positions=np.flatnonzero(array == page).tolist(),
        )


def check_parts(parts: Mapping[str, Part], layout: KVLayout, *, distinct: bool = False) -> dict[str, PageTable]:
    """Check the page indices of some components of a layout, see `check_part`.

    Raises:
        PlanError: A part is for an unknown component, or its table does not fit.
    """
    known = layout.by_name
    if not parts.keys() <= known.keys():
        given = sorted(parts.keys() - known.keys())
        raise PlanError("pages are for a component that the layout does not have", given=given, known=sorted(known))
    return {name: check_part(known[name], part, distinct=distinct) for name, part in parts.items()}


def spell_out(pages: Mapping[str, Pages], layout: KVLayout, tokens: TokenRange) -> dict[str, Part]:
    """Spell out what an engine says in short: bare indices stand for `tokens`, or for a whole slot.

    Components that are None are left out; unknown ones are left for `check_parts` to find.

    Raises:
        PlanError: A token range is none.
    """
    tokens = check_range(tokens)
    parts = {}
    for name, given in pages.items():
        if isinstance(given, Part):
            parts[name] = Part(check_range(given.tokens), given.pages)
        elif given is not None:
            parts[name] = Part(layout.whole_slots.get(name, tokens), given)
    return parts


def pair_pages(tokens: TokenRange, src: PageTable, dst: PageTable, *, joined: bool = False) -> TokenRuns:
    """Cut a token range at every page boundary of either side, and leave out what one of them does not hold.

    Args:
        tokens: `[start, stop)`, inside both tables.
        src: Pages on the sending side.
        dst: Pages on the receiving side; its page size and shard may differ.
        joined: Neighbouring pages of the pools touch, so runs may go on over page boundaries where both tables do.

    Returns:
        Runs in token order; with `joined`, as long as is found without looking at single tokens.

    Raises:
        PlanError: A table does not reach over the range.
    """
    for side, table in (("src", src), ("dst", dst)):
        if not table.covers(held_range(tokens, table.shard)):
            covered = (table.first_token, table.end)
            raise PlanError("token range is outside the page table", side=side, tokens=tokens, covered=covered)
    is_plain = src.page_size == dst.page_size and src.shard.size == dst.shard.size == 1
    if joined and is_plain and tokens[0] < tokens[1]:
        return _joined_runs(tokens, src, dst)
    runs = shared_runs(tokens, src.shard, dst.shard, src.page_size, dst.page_size)
    return TokenRuns(*locate(runs.starts, src), *locate(runs.starts, dst), runs.lengths)


def _joined_runs(tokens: TokenRange, src: PageTable, dst: PageTable) -> TokenRuns:
    """Cut a range only where either table does not go on with the next page of its pool."""
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
    """Give page and token within the page for each token position, which must be held and inside the table."""
    page_size = np.uint64(table.page_size)
    places = starts if table.shard.size == 1 else table.shard.locate(starts)
    positions = (places - np.uint64(table.first_token)) // page_size
    return table.pages[positions].astype(np.uint64), places % page_size
