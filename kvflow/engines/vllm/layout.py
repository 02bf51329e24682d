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
from kvflow.geometry import Axes, Component
from kvflow.geometry.tensors import layout_from_components, regions_from_tensors

__all__ = ["Caches", "describe_caches"]

OPAQUE: Final = frozenset({"CPU_ATTN"})
"""Attention backends that do not store tokens separately within a block and head."""

REFUSED: Final = {
    "CPU_MLA": "vLLM 0.32 answers wrongly with it once the cache of a prompt was loaded, by any connector"
}
"""Attention backends that are not supported, and why."""

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
            group.component: None
            if given is None
            else TokenPages((given.start, stop if group.state is None else group.state.rows), given.blocks)
            for group, given in zip(self._groups, blocks, strict=True)
            if group.is_moved
        }


def describe_caches(  # noqa: PLR0913 - what vLLM provides, all by keyword
    caches: Mapping[str, Any],
    groups: Sequence[Group],
    *,
    backend: str,
    layers: Mapping[str, int],
    total_kv_heads: int,
    tp_size: int,
    tp_rank: int,
    fingerprint: str,
) -> Caches:
    """Describe the caches of a worker: tensors, by name of the layer. `backend` is that of attention.

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
    heads = head_range(total_kv_heads, tp_size, tp_rank)
    components = []
    for group in filter(lambda group: group.is_moved, groups):
        names = [name for name in ordered if name in group.layers]
        tensors, numbers = [moved[name] for name in names], [layers[name] for name in names]
        if group.state is not None:
            regions = group.state.regions(tensors, numbers, tp_rank=tp_rank)
            components.append(Component(group.component, regions, kind="slot"))
            continue
        if not group.is_latent and group.heads != heads[1] - heads[0]:
            raise ConfigError("layers must have as many heads as the model", found=group.heads, expected=heads)
        is_opaque = backend in OPAQUE
        axes = Axes(
            CELLS_TOGETHER if is_opaque else CELLS_APART,
            (0, 1) if group.is_latent else heads,
            group.block_size,
            group.block_size if is_opaque else 1,
        )
        components.append(Component(group.component, regions_from_tensors("kv", tensors, axes, layers=numbers)))
    layout = layout_from_components(components, fingerprint, tensors=moved.values())
    return Caches(layout, groups, ordered)
