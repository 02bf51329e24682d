"""vLLM's caches as a layout.

vLLM gives each layer's cache as a tensor of blocks, heads, tokens and content, whatever the order in memory is; the
content of a token has its K and V, or what else the attention backend keeps. Only the CPU backend orders a block in a
way of its own, so there a block of a head is one opaque cell.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvflow import ConfigError, KVLayout, head_range, layout_from_tensors

__all__ = ["Caches", "describe_caches"]

OPAQUE: Final = frozenset({"CPU_ATTN"})
"""Attention backends that do not keep tokens apart within a block and head."""

CELLS_APART: Final = "page head token dim"
CELLS_TOGETHER: Final = "page head dim dim"


class Caches:
    """The caches of one worker.

    Args:
        layout: Of the caches.
        block_size: Tokens of a block.
        layers: Names of the layers, in order, with the global number of each.
    """

    def __init__(self, layout: KVLayout, block_size: int, layers: Mapping[str, int]) -> None:
        self.layout = layout
        self.block_size = block_size
        self.layers = layers

    def pages(self, blocks: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """Give the page tables of a chunk."""
        return {"kv": list(blocks[0])}


def describe_caches(  # noqa: PLR0913 - what vLLM knows, by keyword
    caches: Mapping[str, Any],
    groups: Sequence[Any],
    *,
    backend: str,
    layers: Mapping[str, int],
    total_kv_heads: int,
    tp_size: int,
    tp_rank: int,
    fingerprint: str,
) -> Caches:
    """Describe the caches of a worker.

    Args:
        caches: By name of the layer.
        groups: vLLM's `KVCacheGroupSpec` of each group.
        backend: Name of the attention backend.
        layers: Global number of each layer, by name.
        total_kv_heads: Of the model.
        tp_size: Workers that share the heads.
        tp_rank: Which of them this is.
        fingerprint: What makes two caches interchangeable.

    Raises:
        ConfigError: They are of a kind that kvflow does not move; says which.
        LayoutError: A tensor is not as vLLM describes it.
    """
    spec = _only_spec(groups)
    is_latent = "mla" in type(spec).__name__.lower()
    heads = (0, 1) if is_latent else head_range(total_kv_heads, tp_size, tp_rank)
    is_opaque = backend in OPAQUE
    ordered = dict(sorted(layers.items(), key=lambda item: item[1]))
    tensors = [caches[name] for name in ordered]
    if any(tensor.ndim != 4 for tensor in tensors):
        shapes = [list(tensor.shape) for tensor in tensors]
        raise ConfigError("caches must have blocks, heads, tokens and content", found=shapes)
    layout = layout_from_tensors(
        {"kv": tensors},
        axes=CELLS_TOGETHER if is_opaque else CELLS_APART,
        heads=heads,
        page_size=spec.block_size,
        tokens_per_cell=spec.block_size if is_opaque else 1,
        layers=list(ordered.values()),
        fingerprint=fingerprint,
    )
    return Caches(layout, spec.block_size, ordered)


def _only_spec(groups: Sequence[Any]) -> Any:
    """Give the one kind of cache that there is.

    Raises:
        ConfigError: There are several, or it is none that is known.
    """
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1:
        raise ConfigError("models with several groups of caches are not served yet", found=kinds)
    spec = groups[0].kv_cache_spec
    if kinds[0] not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise ConfigError("caches of this kind are not served", found=kinds[0])
    num_slots = getattr(spec, "num_head_slots", None)
    if num_slots is not None and num_slots != spec.num_kv_heads:
        raise ConfigError("heads packed together are not served", slots=num_slots, heads=spec.num_kv_heads)
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise ConfigError("compressed tokens are not served", tokens_per_state=str(spec.tokens_per_state))
    return spec
