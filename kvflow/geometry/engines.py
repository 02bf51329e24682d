"""Formulas for engine authors: which heads a rank holds, and how an engine's lists map to pages and token ranges.

The adapters use `head_range` and `shard_pages`. The planner uses none of them: it intersects regions
(`compile_routes`), and tests compare the two, and some formulas with SGLang's functions of the same purpose.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import LayoutError, PlanError
from kvflow.geometry.layout import MAX_SLOTS
from kvflow.geometry.pages import PageIndices, TokenPages, pages_spanned
from kvflow.geometry.ranges import MAX_TOKENS, TokenRange, TokenShard, check_range, held_range

__all__ = [
    "HeadSlice",
    "group_concurrent_contiguous",
    "head_range",
    "head_slice",
    "prompt_tokens",
    "ring_pages",
    "shard_pages",
    "stage_slices",
    "total_heads",
    "window_tokens",
]

IndexGroups = list[list[int]]
"""Runs of consecutive indices."""


def head_range(total_kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return the global KV heads that one tensor-parallel rank holds.

    With more heads than ranks each rank holds `total_kv_heads // tp_size` of them. With more ranks than heads each head
    is held by `tp_size // total_kv_heads` neighbouring ranks (grouped-query attention replicates heads).

    Args:
        total_kv_heads: KV heads of the whole model, not of one rank: the rank's own count cannot tell a split head from
            a replicated one.
        tp_size: Number of tensor-parallel ranks.
        tp_rank: This rank, `0 <= tp_rank < tp_size`.

    Returns:
        `(start, stop)`, never empty.

    Raises:
        LayoutError: A count is not positive, the rank is out of range, or neither count divides the other.

    Source: head distribution of SGLang and vLLM (Megatron-style); SGLang #22145 shows the errors that the per-rank
    count causes.
    """
    if total_kv_heads <= 0 or tp_size <= 0:
        raise LayoutError("head and rank counts must be positive", total_kv_heads=total_kv_heads, tp_size=tp_size)
    if not 0 <= tp_rank < tp_size:
        raise LayoutError("tensor-parallel rank is out of range", tp_rank=tp_rank, tp_size=tp_size)
    if total_kv_heads % tp_size and tp_size % total_kv_heads:
        raise LayoutError(
            "KV heads cannot be split evenly among the ranks", total_kv_heads=total_kv_heads, tp_size=tp_size
        )
    heads_per_rank = max(1, total_kv_heads // tp_size)
    replication = max(1, tp_size // total_kv_heads)
    start = (tp_rank // replication) * heads_per_rank
    return start, start + heads_per_rank


def total_heads(total_kv_heads: int | None, *, heads_per_rank: int, tp_size: int) -> int:
    """Return the number of KV heads of the whole model, even if an engine knows only that of one rank.

    Args:
        total_kv_heads: The model's own count, or None if unknown. 0 is refused.
        heads_per_rank: KV heads that each rank holds.
        tp_size: Number of tensor-parallel ranks.

    Returns:
        `total_kv_heads`, or `heads_per_rank * tp_size`, which is right only if no head is replicated.

    Raises:
        LayoutError: A count is not positive.

    Source: SGLang #22145.
    """
    if heads_per_rank <= 0 or tp_size <= 0 or (total_kv_heads is not None and total_kv_heads <= 0):
        raise LayoutError(
            "head and rank counts must be positive",
            total_kv_heads=total_kv_heads,
            heads_per_rank=heads_per_rank,
            tp_size=tp_size,
        )
    return heads_per_rank * tp_size if total_kv_heads is None else total_kv_heads


class HeadSlice(NamedTuple):
    """The heads that two ranks both hold.

    Attributes:
        heads: Global KV heads `(start, stop)`.
        src_first: Index of the first of them among the prefill rank's heads.
        dst_first: Index of the first of them among the decode rank's heads.
    """

    heads: tuple[int, int]
    src_first: int
    dst_first: int

    def token_bytes(self, head_bytes: int) -> tuple[int, int, int]:
        """Locate the slice within one token of an NHD item.

        Returns:
            Offset in the prefill rank's token, offset in the decode rank's token, and length; all in bytes.
        """
        return self.src_first * head_bytes, self.dst_first * head_bytes, (self.heads[1] - self.heads[0]) * head_bytes


def head_slice(total_kv_heads: int, *, src: tuple[int, int], dst: tuple[int, int]) -> HeadSlice | None:
    """Return the heads that a prefill rank and a decode rank both hold.

    Where heads are replicated on the prefill side, several ranks have the same slice for a decode rank. One of them
    sends it; `compile_routes` chooses.

    Args:
        total_kv_heads: KV heads of the whole model.
        src: The prefill rank, as `(tp_size, tp_rank)`.
        dst: The decode rank, as `(tp_size, tp_rank)`.

    Returns:
        The shared heads; None if there are none.

    Raises:
        LayoutError: A count or rank is impossible, see `head_range`.

    Source: SGLang #22145, whose offsets are remainders of head counts. Intersecting the ranges also covers TP sizes of
    which neither divides the other.
    """
    src_heads, dst_heads = head_range(total_kv_heads, *src), head_range(total_kv_heads, *dst)
    start, stop = max(src_heads[0], dst_heads[0]), min(src_heads[1], dst_heads[1])
    if start >= stop:
        return None
    return HeadSlice((start, stop), start - src_heads[0], start - dst_heads[0])


def stage_slices(
    num_src: int, num_dst: int, *, groups: int, start_layer: int, total_kv_layers: int = 0
) -> tuple[slice, ...]:
    """Find the buffers of one pipeline stage in the pointer list of a rank that holds the whole model.

    Lists are `[group 0 layer 0, ..., group 1 layer 0, ..., draft...]`. Draft pointers come after all groups, so groups
    are as far apart as the model has layers.

    Args:
        num_src: Pointers of the prefill stage.
        num_dst: Pointers of the decode rank.
        groups: Buffer groups: 1 for a latent, 2 for K and V, 3 with an index-k.
        start_layer: First layer of the stage, in the model's numbers.
        total_kv_layers: Layers of the whole model without draft layers; 0 if unknown. Draft layers are then not
            possible, because nothing tells them from ordinary layers.

    Returns:
        Slices of the decode list whose concatenation pairs with the prefill list: one for each group, or a single one
        of everything where both lists are equally long (same stages on both sides, draft layers included).

    Raises:
        LayoutError: The lists fit no arrangement.

    Source: SGLang #23893.
    """
    values = {
        "num_src": num_src,
        "num_dst": num_dst,
        "groups": groups,
        "start_layer": start_layer,
        "total_kv_layers": total_kv_layers,
    }
    if min(num_src, num_dst, groups) < 1 or start_layer < 0 or total_kv_layers < 0:
        raise LayoutError("counts of pointers and groups must be positive", **values)
    if num_src == num_dst:
        return (slice(0, num_dst),)
    if num_src % groups:
        raise LayoutError("number of prefill pointers must be a multiple of the number of groups", **values)
    if num_dst < groups * total_kv_layers:
        raise LayoutError("decode list does not have all layers of the model", **values)
    if not total_kv_layers and num_dst % groups:
        raise LayoutError("number of decode pointers must be a multiple of the number of groups", **values)
    src_layers, dst_layers = num_src // groups, total_kv_layers or num_dst // groups
    if start_layer + src_layers > dst_layers:
        raise LayoutError("prefill stage extends beyond the layers of decode", **values)
    starts = (group * dst_layers + start_layer for group in range(groups))
    return tuple(slice(start, start + src_layers) for start in starts)


def group_concurrent_contiguous(src: PageIndices, dst: PageIndices) -> tuple[IndexGroups, IndexGroups]:
    """Split two paired index lists wherever either of them is not consecutive.

    Args:
        src: Flat integers of any width.
        dst: Equally many integers, paired with `src`.

    Returns:
        The groups of `src` and of `dst`, equal in number and lengths; `([], [])` if either list is empty.

    Raises:
        ValueError: Neither list is empty, and their lengths differ; the message has both.
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


def prompt_tokens(num_with_sampled: int, num_prompt: int) -> TokenRange:
    """Return the tokens whose state a transfer carries: the prompt, never the token sampled from it.

    Args:
        num_with_sampled: Length of the sequence as the engine holds it after sampling, in tokens.
        num_prompt: Length of the prompt, in tokens.

    Returns:
        `(0, min(num_with_sampled, num_prompt))`.

    Raises:
        PlanError: A length is negative.

    Source: SGLang #27004: the sampled token may start a page that decode never asked for.
    """
    _check_lengths(num_with_sampled=num_with_sampled, num_prompt=num_prompt)
    return 0, min(num_with_sampled, num_prompt)


def window_tokens(num_tokens: int, window: int, page_size: int) -> TokenRange:
    """Return the tokens that sliding-window attention still sees, from a page boundary.

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


def ring_pages(tokens: TokenRange, ring_size: int, *, row: int) -> TokenPages:
    """Return the places of tokens in a ring: a row of a request, with the token at position `p` in place `p mod n`.

    The ring's pool is described with pages of one token, so rings of different sizes are compatible, and a range may
    start and wrap around anywhere.

    Args:
        tokens: Positions `[start, stop)` that are still in the ring. For the tail of a pool of compressed keys, those
            since the last complete group: `(n - n % group, n)`, which is empty after a complete group.
        ring_size: Tokens of a row on this side.
        row: The request's row in the pool.

    Returns:
        The tokens and, for each of them, the page of one token `row * ring_size + position % ring_size`.

    Raises:
        PlanError: The range is reversed or negative, or longer than the ring, which then no longer holds its first
            tokens; the ring size is not positive, or the row is negative or outside any pool.

    Source: DSA tails and SWA rings of SGLang.
    """
    start, stop = check_range(tokens)
    if ring_size < 1 or row < 0 or (row + 1) * ring_size > MAX_SLOTS:
        raise PlanError("ring is out of range", row=row, ring_size=ring_size)
    if stop - start > ring_size:
        raise PlanError("token range is longer than the ring", tokens=(start, stop), ring_size=ring_size)
    places = np.arange(start, stop, dtype=np.int64) % ring_size + row * ring_size
    return TokenPages((start, stop), places.astype(np.uint32))


def shard_pages(tokens: TokenRange, pages: PageIndices, shard: TokenShard, page_size: int) -> TokenPages:
    """Return the pages of one context-parallel rank, from a table that is the same on all ranks of its group.

    Engines allocate one page on every rank for each `page_size * shard.size` tokens (a *virtual* block or page in vLLM
    and SGLang). The first and the last of these may hold none of the tokens on this rank.

    Args:
        tokens: Positions `[start, stop)`.
        pages: One page for each `page_size * shard.size` tokens that the range touches, in token order.
        shard: The tokens that this rank holds; `interleave` divides the page size.
        page_size: Tokens of a page on one rank.

    Returns:
        The tokens, and the pages that hold those of the rank.

    Raises:
        PlanError: There are too many or too few pages, the range is invalid, or `interleave` does not divide the page
            size, so that the ranks' pages hold tokens of different ranges.
    """
    first, needed = tokens[0] // (page_size * shard.size), pages_spanned(tokens, page_size * shard.size)
    if len(pages) != needed or (shard.size > 1 and page_size % shard.interleave):
        raise PlanError(
            "pages do not fit the tokens and the shard",
            tokens=tokens,
            pages=len(pages),
            needed=needed,
            page_size=page_size,
            shard=shard,
        )
    start, stop = held_range(tokens, shard)
    held = pages_spanned((start, stop), page_size)
    skipped = start // page_size - first
    return TokenPages(tokens, pages[skipped : skipped + held])


def _indices(indices: PageIndices, name: str) -> NDArray[Any]:
    array = np.asarray(indices)
    if array.size == 0:
        return np.empty(0, np.uint64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PlanError("indices must be a flat list of integers", name=name, dtype=str(array.dtype), ndim=array.ndim)
    return array


def _steps_by_one(indices: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each index is one more than the one before; a difference that wraps around does not count."""
    steps: NDArray[np.bool_] = (indices[1:] > indices[:-1]) & (np.diff(indices) == 1)
    return steps


def _check_lengths(**lengths: int) -> None:
    for name, value in lengths.items():
        if not 0 <= value <= MAX_TOKENS:
            raise PlanError("length is out of range", field=name, value=value, limit=MAX_TOKENS)
