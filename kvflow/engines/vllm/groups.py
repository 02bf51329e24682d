"""vLLM's KV cache groups: layers that share a block table. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvflow import ConfigError
from kvflow.engines.vllm.metadata import GroupBlocks
from kvflow.engines.vllm.states import RecurrentState, describe_state

__all__ = ["Group", "describe_groups"]

SERVED: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"})


@dataclass(frozen=True)
class Group:
    """Layers that share a block table.

    Attributes:
        component: Name of the component in the layout.
        layers: Names of the layers.
        block_size: Tokens of a block on one worker.
        heads: KV heads of a worker by layer; one for latents. Empty if the group is not moved.
        is_latent: A token has one vector that all heads share.
        window: Number of tokens that a token attends to, including itself; None for all before it. vLLM frees blocks
            outside the window, and puts block 0 in their place.
        state: State of recurrent layers; None for attention. A request has one block of it, for all of its tokens.
        is_moved: False if vLLM excludes the group from transfers, so that each server computes its own.
        num_shards: Workers that share the tokens (decode context parallelism). All of them have the same block table,
            and an entry of it covers the tokens of a block on each.
    """

    component: str
    layers: tuple[str, ...]
    block_size: int
    heads: Mapping[str, int]
    is_latent: bool = False
    window: int | None = None
    state: RecurrentState | None = None
    is_moved: bool = True
    num_shards: int = 1

    @property
    def keeps_all(self) -> bool:
        """Nothing of a token is overwritten or freed before its request ends."""
        return self.window is None and self.state is None

    def first_seen(self, token: int) -> int:
        """Return the first token that `token` attends to."""
        return 0 if self.window is None else max(token + 1 - self.window, 0)

    def blocks_of(self, table: Sequence[int], start: int, stop: int) -> GroupBlocks | None:
        """Return the blocks that contain some tokens; None if the group is not moved."""
        if not self.is_moved:
            return None
        if self.state is not None:
            return GroupBlocks(0, list(table[:1]))
        size = self.block_size * self.num_shards
        return GroupBlocks(start, list(table[start // size : -(-stop // size)]))


def describe_groups(groups: Sequence[Any], *, channels_first: bool = False, dcp_size: int = 1) -> tuple[Group, ...]:
    """Describe vLLM's `KVCacheGroupSpec`s.

    Args:
        groups: The groups.
        channels_first: vLLM's layout of convolution states is "DS".
        dcp_size: Workers that share the tokens of a group, if vLLM shards it.

    Raises:
        ConfigError: A group is of a kind that kvflow does not move; the error names it.
    """
    names = ["kv"] if len(groups) == 1 else [f"kv{number}" for number in range(len(groups))]
    return tuple(
        replace(
            _describe(name, group, channels_first),
            num_shards=dcp_size if getattr(group.kv_cache_spec, "dcp_sharded", False) else 1,
        )
        for name, group in zip(names, groups, strict=True)
    )


def _describe(component: str, group: Any, channels_first: bool) -> Group:
    spec = group.kv_cache_spec
    layers = tuple(group.layer_names)
    if not getattr(group, "enable_kv_transfer", True):
        return Group(component, layers, spec.block_size, heads={}, is_moved=False)
    if type(spec).__name__ == "MambaSpec":
        state = describe_state(spec, channels_first=channels_first)
        return Group(component, layers, spec.block_size, dict.fromkeys(layers, 1), state=state)
    # Layers with unequal heads, as those of a draft model, have specs of their own.
    specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(layers, spec)
    heads = {name: _num_heads(specs[name]) for name in layers}
    first = specs[layers[0]]
    window = first.sliding_window if _kind(first) == "SlidingWindowSpec" else None
    return Group(component, layers, spec.block_size, heads, _kind(first).startswith("MLA"), window)


def _kind(spec: Any) -> str:
    return type(spec).__name__


def _num_heads(spec: Any) -> int:
    """Return the number of heads of a layer; raise ConfigError, which names it, if its cache is not served."""
    if _kind(spec) not in SERVED:
        raise ConfigError("caches of this kind are not served", found=_kind(spec))
    num_slots = getattr(spec, "num_head_slots", None)
    if num_slots is not None and num_slots != spec.num_kv_heads:
        raise ConfigError("heads packed together are not served", slots=num_slots, heads=spec.num_kv_heads)
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise ConfigError("compressed tokens are not served", tokens_per_state=str(spec.tokens_per_state))
    return 1 if _kind(spec).startswith("MLA") else int(spec.num_kv_heads)
