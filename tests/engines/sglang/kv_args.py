"""Pointer lists as SGLang keeps them, with invented addresses that are never read."""

from types import SimpleNamespace
from typing import Any, Final

__all__ = ["PAGE", "kv_args", "with_state"]

PAGE: Final = 16
SLOTS: Final = 8


def lists(count: int, item: int, first: int) -> tuple[list[int], list[int], list[int]]:
    """Return addresses, lengths and item lengths of adjacent buffers."""
    length = item * SLOTS
    return [first + number * length for number in range(count)], [length] * count, [item] * count


def kv_args(layers: int = 4, heads: int = 8, *, draft: int = 0, groups: int = 2, **more: Any) -> Any:
    """Return the `KVArgs` of a rank.

    Args:
        layers: Layers that the rank holds.
        heads: KV heads that it holds, 128 bytes each.
        draft: Layers of a draft model.
        groups: 2 for K and V, 1 for latents.
        **more: Other attributes of `KVArgs`.
    """
    addresses, lengths, items = lists(groups * (layers + draft), PAGE * heads * 128, first=1 << 20)
    args = SimpleNamespace(
        kv_data_ptrs=addresses,
        kv_data_lens=lengths,
        kv_item_lens=items,
        num_draft_entries=groups * draft,
        page_size=PAGE,
        kv_cache_dtype_str="bfloat16",
        state_types=[],
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        state_layer_ids=[],
        state_dim_per_tensor=[],
        state_conv_shard_groups=[],
        state_slice_outer_counts=[],
    )
    vars(args).update(more)
    return args


def with_state(args: Any, kind: str, items: list[int], **more: list[Any]) -> Any:
    """Add a state whose buffers have these item lengths, and SGLang's attributes for each buffer."""
    number = len(args.state_types)
    args.state_types.append(kind)
    buffers = [lists(1, item, first=(64 + number) * (1 << 20) + place * (1 << 16)) for place, item in enumerate(items)]
    for field, column in (("ptrs", 0), ("lens", 1)):
        getattr(args, f"state_data_{field}").append([one[column][0] if one[column][0] else 0 for one in buffers])
    args.state_item_lens.append(list(items))
    for field in ("layer_ids", "dim_per_tensor", "conv_shard_groups", "slice_outer_counts"):
        getattr(args, f"state_{field}").append(more.get(field, []))
    return args
