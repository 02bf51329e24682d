"""Helpers for engines: from their token slots and lengths to kvflow's pages and token ranges."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.layout import MAX_SLOTS
from kvflow.geometry.pages import PageIndices
from kvflow.geometry.tokens import MAX_TOKENS, TokenRange

__all__ = ["group_concurrent_contiguous", "kv_to_page_indices", "prompt_tokens", "window_tokens"]

IndexGroups = list[list[int]]
"""Runs of consecutive indices."""


def group_concurrent_contiguous(src: PageIndices, dst: PageIndices) -> tuple[IndexGroups, IndexGroups]:
    """Split two paired index lists wherever either of them stops being consecutive.

    Args:
        src: Flat integers of any width.
        dst: As many, paired with `src`.

    Returns:
        The groups of `src` and those of `dst`, equally many and of equal lengths; `([], [])` if either is empty.

    Raises:
        ValueError: Neither is empty and their lengths differ; the message has both.
        PlanError: A list is not flat, or not of integers.

    Source: SGLang #27004, where unequal lists crashed inside NumPy.
    """
    sources, targets = _indices(src, "src"), _indices(dst, "dst")
    if sources.size == 0 or targets.size == 0:
        return [], []
    if sources.size != targets.size:
        raise ValueError(f"paired indices differ in length: {sources.size} in src, {targets.size} in dst")
    breaks = np.flatnonzero(~(_steps_by_one(sources) & _steps_by_one(targets))) + 1
    groups = [[group.tolist() for group in np.split(indices, breaks)] for indices in (sources, targets)]
    return groups[0], groups[1]


def kv_to_page_indices(kv_indices: PageIndices, page_size: int) -> NDArray[np.uint32]:
    """Turn the token slots of a request into the pages that hold them.

    Args:
        kv_indices: Position of each token in the pool, counted in tokens, in token order from a page boundary. Each
            page's slots lie one after another from the start of the page; only the last page may be partly used.
        page_size: Tokens of a page.

    Returns:
        uint32[num_pages], the last partly used page included.

    Raises:
        PlanError: The page size is not positive, or a slot does not continue its page; position and slot are named.

    Source: the function of this name in SGLang, which takes every `page_size`-th slot and does not look at the others.
    """
    if page_size < 1:
        raise PlanError("page size must be positive", page_size=page_size)
    slots = _indices(kv_indices, "kv_indices")
    if slots.size == 0:
        return np.empty(0, np.uint32)
    outside = np.flatnonzero((slots < 0) | (slots // page_size >= MAX_SLOTS))
    if outside.size:
        position = int(outside[0])
        raise PlanError("token slot is outside any pool", position=position, slot=int(slots[position]))
    wide = slots.astype(np.uint64)
    first_slots, size = wide[::page_size], np.uint64(page_size)
    pages = first_slots // size
    within = np.arange(slots.size, dtype=np.uint64) % size
    expected = np.repeat(pages * size, page_size)[: slots.size] + within
    wrong = np.flatnonzero(wide != expected)
    if wrong.size:
        position = int(wrong[0])
        raise PlanError(
            "token slots are not page-aligned runs",
            position=position,
            slot=int(wide[position]),
            expected=int(expected[position]),
            page_size=page_size,
        )
    indices: NDArray[np.uint32] = pages.astype(np.uint32)
    return indices


def prompt_tokens(num_with_sampled: int, num_prompt: int) -> TokenRange:
    """Give the tokens whose state a transfer carries: the prompt, never the token sampled from it.

    Args:
        num_with_sampled: Length of the sequence as the engine holds it after sampling, in tokens.
        num_prompt: Length of the prompt, in tokens.

    Returns:
        `(0, min(num_with_sampled, num_prompt))`.

    Raises:
        PlanError: A length is negative.

    Source: SGLang #27004: the sampled token may open a page that decode never asked for.
    """
    _check_lengths(num_with_sampled=num_with_sampled, num_prompt=num_prompt)
    return 0, min(num_with_sampled, num_prompt)


def window_tokens(num_tokens: int, window: int, page_size: int) -> TokenRange:
    """Give the tokens that sliding-window attention still sees, from a page boundary.

    Args:
        num_tokens: Length of the prompt, in tokens.
        window: Size of the attention window, in tokens.
        page_size: Tokens of a page of the sliding-window pool on the side that declares the range (decode).

    Returns:
        From `max(0, num_tokens - window)` rounded down to a page, to `num_tokens`.

    Raises:
        PlanError: The length is negative, or window or page size are not positive.

    Source: SGLang #27004.
    """
    _check_lengths(num_tokens=num_tokens)
    if window < 1 or page_size < 1:
        raise PlanError("window and page size must be positive", window=window, page_size=page_size)
    first = max(0, num_tokens - window)
    return first - first % page_size, num_tokens


def _indices(indices: PageIndices, name: str) -> NDArray[Any]:
    array = np.asarray(indices)
    if array.size == 0:
        return np.empty(0, np.uint64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PlanError("indices must be a flat list of integers", name=name, dtype=str(array.dtype), ndim=array.ndim)
    return array


def _steps_by_one(indices: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each index is one more than the one before; a difference that wraps is none."""
    steps: NDArray[np.bool_] = (indices[1:] > indices[:-1]) & (np.diff(indices) == 1)
    return steps


def _check_lengths(**lengths: int) -> None:
    for name, value in lengths.items():
        if not 0 <= value <= MAX_TOKENS:
            raise PlanError("length is out of range", field=name, value=value, limit=MAX_TOKENS)
