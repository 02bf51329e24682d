"""Page tables and token ranges: from "these tokens" to "these pages, from this token to that one".

A *page table* lists the pool pages that hold a token range, in token order. It always covers whole pages: the
table for tokens `[start, stop)` has one entry for each page-sized block that the range touches, so its first entry
holds token `start - start % page_size`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.layout import KVLayout

__all__ = [
    "PageIndices",
    "PageTable",
    "TokenRange",
    "TokenRuns",
    "check_page_table",
    "check_page_tables",
    "pages_spanned",
    "pair_pages",
]

TokenRange = tuple[int, int]
"""Token positions `[start, stop)` of one request."""

PageIndices = Sequence[int] | NDArray[Any]
"""Positions in a pool, in token order: any flat sequence of integers."""

MAX_TOKENS = 2**40
"""Far above any context length; keeps every product of a token position well inside 64 bits."""


class PageTable(NamedTuple):
    """Pool pages of one component on one side, for one token range.

    Attributes:
        pages: uint32[num_pages], positions in the pool, in token order.
        first_token: Position of the first token of `pages[0]`, a multiple of `page_size`.
        page_size: Tokens of a page.
    """

    pages: NDArray[np.uint32]
    first_token: int
    page_size: int


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
    start, stop = tokens
    if not 0 <= start <= stop <= MAX_TOKENS:
        raise PlanError("token range is not 0 <= start <= stop", tokens=tokens, limit=MAX_TOKENS)
    if start == stop:
        return 0
    return -(-stop // page_size) - start // page_size


def check_page_table(
    pages: PageIndices,
    *,
    component: str,
    tokens: TokenRange,
    page_size: int,
    slots: int,
    distinct: bool = False,
) -> PageTable:
    """Turn page indices from outside into a `PageTable`, or say what is wrong with them.

    Args:
        pages: 1-D, integers of any width, one for each page that `tokens` touches.
        component: Named in errors.
        tokens: The token range the pages hold.
        page_size: Tokens of a page.
        slots: Pages of the pool; every index must be below.
        distinct: Refuse a page that is listed twice (a destination written twice is always a mistake).

    Returns:
        The table, with a copy of the indices that the caller may not change any more.

    Raises:
        PlanError: Wrong type, shape, count or index.
    """
    array = np.asarray(pages)
    if array.size == 0:
        array = array.astype(np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PlanError(
            "page table must be a flat list of integers", component=component, dtype=str(array.dtype), ndim=array.ndim
        )
    needed = pages_spanned(tokens, page_size)
    if array.size != needed:
        raise PlanError(
            "page table does not match the token range",
            component=component,
            tokens=tokens,
            page_size=page_size,
            pages=int(array.size),
            needed=needed,
        )
    outside = np.flatnonzero((array < 0) | (array >= slots))
    if outside.size:
        position = int(outside[0])
        raise PlanError(
            "page is outside the pool", component=component, position=position, page=int(array[position]), slots=slots
        )
    if distinct:
        _check_distinct(array, component)
    table = array.astype(np.uint32)
    table.flags.writeable = False
    return PageTable(table, tokens[0] - tokens[0] % page_size, page_size)


def check_page_tables(
    pages: Mapping[str, PageIndices], layout: KVLayout, tokens: TokenRange, *, distinct: bool = False
) -> dict[str, PageTable]:
    """Check the page indices of every component of a layout, see `check_page_table`.

    Raises:
        PlanError: A component has no pages, pages are for an unknown component, or a table does not fit.
    """
    known = [component.name for component in layout.components]
    if sorted(pages) != sorted(known):
        raise PlanError("pages must be given for each component", given=sorted(pages), components=known)
    return {
        component.name: check_page_table(
            pages[component.name],
            component=component.name,
            tokens=tokens,
            page_size=component.tokens_per_slot,
            slots=component.slots,
            distinct=distinct,
        )
        for component in layout.components
    }


def _check_distinct(array: NDArray[Any], component: str) -> None:
    values, counts = np.unique(array, return_counts=True)
    repeated = values[counts > 1]
    if repeated.size:
        page = int(repeated[0])
        raise PlanError(
            "page is listed twice",
            component=component,
            page=page,
            positions=np.flatnonzero(array == page).tolist(),
        )


def pair_pages(tokens: TokenRange, src: PageTable, dst: PageTable) -> TokenRuns:
    """Cut a token range at every page boundary of either side.

    Args:
        tokens: `[start, stop)`, inside both tables.
        src: Pages on the sending side.
        dst: Pages on the receiving side; its page size may differ.

    Returns:
        Runs in token order whose lengths add up to `stop - start`.

    Raises:
        PlanError: A table does not reach over the range.
    """
    start, stop = tokens
    for side, table in (("src", src), ("dst", dst)):
        end = table.first_token + len(table.pages) * table.page_size
        if start < stop and not table.first_token <= start <= stop <= end:
            raise PlanError(
                "token range is outside the page table", side=side, tokens=tokens, covered=(table.first_token, end)
            )
    starts = _cuts(start, stop, src.page_size)
    if dst.page_size != src.page_size:
        starts = np.union1d(starts, _cuts(start, stop, dst.page_size))
    lengths = np.diff(np.append(starts, np.uint64(stop)))
    src_slots, src_tokens = _locate(starts, src)
    dst_slots, dst_tokens = _locate(starts, dst)
    return TokenRuns(src_slots, src_tokens, dst_slots, dst_tokens, lengths)


def _cuts(start: int, stop: int, page_size: int) -> NDArray[np.uint64]:
    """First token of each page-bounded piece of `[start, stop)`."""
    if start == stop:
        return np.empty(0, np.uint64)
    first_boundary = start - start % page_size + page_size
    boundaries = np.arange(first_boundary, stop, page_size, dtype=np.uint64)
    return np.insert(boundaries, 0, np.uint64(start))


def _locate(starts: NDArray[np.uint64], table: PageTable) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Page and token within the page, for each token position."""
    page_size = np.uint64(table.page_size)
    positions = (starts - np.uint64(table.first_token)) // page_size
    return table.pages[positions].astype(np.uint64), starts % page_size
