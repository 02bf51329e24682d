"""Which KV heads a tensor-parallel rank holds."""

from kvflow.errors import LayoutError

__all__ = ["head_range"]


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
