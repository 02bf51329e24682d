"""Which part of a model a tensor-parallel or pipeline-parallel rank holds, and what two ranks have in common.

The planner does not use the formulas for pairs: it intersects regions (`compile_routes`). They are here for engines
that work with pointer lists, and the tests hold them against the planner.
"""

from typing import NamedTuple

from kvflow.errors import LayoutError

__all__ = ["HeadSlice", "head_range", "head_slice", "stage_slices", "total_heads"]


def head_range(total_kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Give the global KV heads that one tensor-parallel rank holds.

    With more heads than ranks each rank holds `total_kv_heads // tp_size` of them; with more ranks than heads each
    head is held by `tp_size // total_kv_heads` neighbouring ranks (grouped-query attention replicates heads).

    Args:
        total_kv_heads: KV heads of the whole model, not of one rank: the rank's own count cannot tell a split head
            from a replicated one.
        tp_size: Number of tensor-parallel ranks.
        tp_rank: This rank, `0 <= tp_rank < tp_size`.

    Returns:
        `(start, stop)`, never empty.

    Raises:
        LayoutError: A count is not positive, the rank is out of range, or neither count divides the other.

    Source: head distribution of SGLang and vLLM (Megatron-style); SGLang #22145 shows what the per-rank count costs.
    """
    if total_kv_heads <= 0 or tp_size <= 0:
        raise LayoutError("head and rank counts must be positive", total_kv_heads=total_kv_heads, tp_size=tp_size)
    if not 0 <= tp_rank < tp_size:
        raise LayoutError("tensor-parallel rank is out of range", tp_rank=tp_rank, tp_size=tp_size)
    if total_kv_heads % tp_size and tp_size % total_kv_heads:
        raise LayoutError(
            "KV heads cannot be spread evenly over the ranks", total_kv_heads=total_kv_heads, tp_size=tp_size
        )
    heads_per_rank = max(1, total_kv_heads // tp_size)
    replication = max(1, tp_size // total_kv_heads)
    start = (tp_rank // replication) * heads_per_rank
    return start, start + heads_per_rank


def total_heads(total_kv_heads: int | None, *, heads_per_rank: int, tp_size: int) -> int:
    """Give the KV heads of the whole model, also where an engine knows only those of a rank.

    Args:
        total_kv_heads: What the model says, or None. Only None is absent: 0 is a mistake, and refused.
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
    """The heads that two ranks both hold, and where each of them has them.

    Attributes:
        heads: Global KV heads `(start, stop)`.
        src_first: The first of them, counted within the prefill rank's heads.
        dst_first: The first of them, counted within the decode rank's heads.
    """

    heads: tuple[int, int]
    src_first: int
    dst_first: int

    def token_bytes(self, head_bytes: int) -> tuple[int, int, int]:
        """Locate the slice within the row of a token of an NHD item.

        Returns:
            Offset in the prefill rank's row, offset in the decode rank's row, and length; all in bytes.
        """
        return self.src_first * head_bytes, self.dst_first * head_bytes, (self.heads[1] - self.heads[0]) * head_bytes


def head_slice(total_kv_heads: int, *, src: tuple[int, int], dst: tuple[int, int]) -> HeadSlice | None:
    """Give the heads that a prefill rank and a decode rank both hold.

    Where heads are replicated on the prefill side several ranks have the same slice for a decode rank; one of them is
    to send it (`compile_routes` picks).

    Args:
        total_kv_heads: KV heads of the whole model.
        src: The prefill rank, as `(tp_size, tp_rank)`.
        dst: The decode rank, as `(tp_size, tp_rank)`.

    Returns:
        None if they have no head in common.

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

    Lists are `[group 0 layer 0, ..., group 1 layer 0, ..., draft...]`. Draft pointers come after all groups, so the
    model's own layer count is also the distance from one group to the next.

    Args:
        num_src: Pointers of the prefill stage.
        num_dst: Pointers of the decode rank.
        groups: Buffer groups: 1 for a latent, 2 for K and V, 3 with an index-k.
        start_layer: The stage's first layer, in the model's numbers.
        total_kv_layers: Layers of the whole model without draft layers; 0 if unknown, and then there can be no draft
            layer, because nothing tells one from an ordinary layer.

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
        raise LayoutError("pointers of the stage cannot be spread over the groups", **values)
    if num_dst < groups * total_kv_layers:
        raise LayoutError("decode list does not hold the whole model", **values)
    if not total_kv_layers and num_dst % groups:
        raise LayoutError("pointers of decode cannot be spread over the groups", **values)
    src_layers, dst_layers = num_src // groups, total_kv_layers or num_dst // groups
    if start_layer + src_layers > dst_layers:
        raise LayoutError("stage reaches beyond the layers of decode", **values)
    starts = (group * dst_layers + start_layer for group in range(groups))
    return tuple(slice(start, start + src_layers) for start in starts)
