"""vLLM's caches as a layout.

vLLM passes each layer's cache as a tensor of blocks, heads, tokens and content, whatever the order in memory. The
content of a token is its K and V, or whatever else the attention backend stores. Only the CPU backend uses its own
order within a block, so there, a block of a head is one opaque cell.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvflow import ConfigError, KVLayout, TokenPages, head_range
from kvflow.engines.vllm.groups import Group
from kvflow.engines.vllm.metadata import GroupBlocks
from kvflow.geometry import Axes, Component, TokenShard, shard_pages
from kvflow.geometry.tensors import layout_from_components, regions_from_tensors

__all__ = ["Caches", "describe_caches"]

OPAQUE: Final = frozenset({"CPU_ATTN"})
"""Attention backends that do not store tokens separately within a block and head."""

REFUSED: Final = {
    "CPU_MLA": "vLLM 0.32 answers wrongly with it once the cache of a prompt was loaded, by any connector"
}
"""Attention backends that are not supported, and why."""

ALL_TOKENS: Final = TokenShard()

CELLS_APART: Final = "page head token dim"
CELLS_TOGETHER: Final = "page head dim dim"


class Caches:
    """The caches of one worker; `layers` has the global number of each layer, by name, in order."""

    def __init__(self, layout: KVLayout, groups: Sequence[Group], layers: Mapping[str, int]) -> None:
        self.layout = layout
        self.layers = layers
        self._groups = groups

    def pages(self, blocks: Sequence[GroupBlocks | None], stop: int) -> dict[str, TokenPages | None]:
        """Return the page tables of tokens up to `stop`, of the groups that are moved."""
        return {
            group.component: None if given is None else self._pages_of(group, given, stop)
            for group, given in zip(self._groups, blocks, strict=True)
            if group.is_moved
        }

    def _pages_of(self, group: Group, given: GroupBlocks, stop: int) -> TokenPages:
        if group.state is not None:
            return TokenPages((given.start, group.state.rows), given.blocks)
        shard = self.layout.by_name[group.component].shard
        return shard_pages((given.start, stop), given.blocks, shard, group.block_size)


def describe_caches(  # noqa: PLR0913 - what vLLM provides, all by keyword
    caches: Mapping[str, Any],
    groups: Sequence[Group],
    *,
    backend: str,
    layers: Mapping[str, int],
    total_kv_heads: Mapping[str, int],
    tp_size: int,
    tp_rank: int,
    fingerprint: str,
    shard: TokenShard = ALL_TOKENS,
) -> Caches:
    """Describe the caches of a worker: tensors, by name of the layer.

    Args:
        caches: Tensors of blocks, heads, tokens and content, by layer.
        groups: All groups, also those that are not moved.
        backend: Attention backend.
        layers: Global number of each layer. Those of a draft model follow those of the model.
        total_kv_heads: KV heads of each layer in all workers together.
        tp_size: Number of workers that share the heads.
        tp_rank: Number of this worker among them.
        fingerprint: What makes caches interchangeable.
        shard: Tokens that this worker holds of groups that vLLM shards.

    Raises:
        ConfigError: The caches are of a kind that kvflow does not move; the error names it.
        LayoutError: A tensor differs from vLLM's description.
    """
    if backend in REFUSED:
        raise ConfigError("this attention backend is not served", backend=backend, reason=REFUSED[backend])
    left_out = {name for group in groups if not group.is_moved for name in group.layers}
    moved = {name: tensor for name, tensor in caches.items() if name not in left_out}
    if any(tensor.ndim != 4 for tensor in moved.values()):
        shapes = [list(tensor.shape) for tensor in moved.values()]
        raise ConfigError("caches must have blocks, heads, tokens and content", found=shapes)
    ordered = {name: layer for name, layer in sorted(layers.items(), key=lambda item: item[1]) if name in moved}
    components = []
    for group in filter(lambda group: group.is_moved, groups):
        names = [name for name in ordered if name in group.layers]
        if group.state is not None:
            tensors, numbers = [moved[name] for name in names], [layers[name] for name in names]
            regions = group.state.regions(tensors, numbers, tp_rank=tp_rank)
            components.append(Component(group.component, regions, kind="slot"))
            continue
        alike: dict[tuple[int, Any], list[str]] = {}
        for name in names:
            alike.setdefault((total_kv_heads[name], moved[name].shape), []).append(name)
        regions, size, is_opaque = (), group.block_size, backend in OPAQUE
        for (total, _), some in alike.items():
            heads = (0, 1) if group.is_latent else head_range(total, tp_size, tp_rank)
            if unequal := {group.heads[name] for name in some} - {heads[1] - heads[0]}:
                raise ConfigError("layers must have as many heads as the model", found=unequal.pop(), expected=heads)
            axes = Axes(CELLS_TOGETHER if is_opaque else CELLS_APART, heads, size, size if is_opaque else 1)
            tensors, numbers = [moved[name] for name in some], [layers[name] for name in some]
            regions += regions_from_tensors("kv", tensors, axes, layers=numbers)
        held = shard if group.num_shards > 1 else ALL_TOKENS
        components.append(Component(group.component, regions, shard=held))
    layout = layout_from_components(components, fingerprint, tensors=moved.values())
    return Caches(layout, groups, ordered)
