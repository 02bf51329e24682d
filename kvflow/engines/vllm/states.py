"""States of recurrent layers: one block for each request, with the last inputs of a convolution, and a state."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from kvflow import ConfigError
from kvflow.geometry import Axes, Region
from kvflow.geometry.tensors import regions_from_tensors, split_tensors

__all__ = ["RecurrentState", "describe_state"]

SERVED: Final = ("MAMBA1", "MAMBA2", "GDN_ATTN")


@dataclass(frozen=True)
class RecurrentState:
    """Content of a block, in this order.

    Attributes:
        convolution: Shape of the last inputs: inputs and channels, or the reverse.
        state: Shape of the state. Tensor parallelism shards its first axis.
        dtypes: Element types of the two.
        channels: Number of channels of each kind. Tensor parallelism shards each kind separately.
        channels_first: The inputs of a channel are adjacent.
    """

    convolution: tuple[int, ...]
    state: tuple[int, ...]
    dtypes: tuple[Any, Any]
    channels: tuple[int, ...]
    channels_first: bool

    @property
    def rows(self) -> int:
        """Number of stored inputs, which kvflow treats as the tokens of the block."""
        return self.convolution[1 if self.channels_first else 0]

    def regions(self, caches: Sequence[Any], layers: Sequence[int], *, tp_rank: int) -> tuple[Region, ...]:
        """Describe the caches of some layers, as vLLM allocates them: blocks, one head, one token, bytes."""
        inputs = [_part(cache, 0, self.convolution, self.dtypes[0]) for cache in caches]
        offset = prod(self.convolution) * self.dtypes[0].itemsize
        states = [_part(cache, offset, self.state, self.dtypes[1]) for cache in caches]
        parts = split_tensors(inputs, self.channels, dimension=1 if self.channels_first else 2)
        order = "page head token" if self.channels_first else "page token head"
        regions: tuple[Region, ...] = ()
        for number, (part, count) in enumerate(zip(parts, self.channels, strict=True)):
            axes = Axes(order, (tp_rank * count, (tp_rank + 1) * count), self.rows)
            regions += regions_from_tensors(f"conv.{number}", part, axes, layers=layers)
        dims = " dim" * (len(self.state) - 1)
        axes = Axes(f"page head{dims}", (tp_rank * self.state[0], (tp_rank + 1) * self.state[0]), self.rows, self.rows)
        return regions + regions_from_tensors("state", states, axes, layers=layers)


def describe_state(spec: Any, *, channels_first: bool) -> RecurrentState:
    """Describe vLLM's `MambaSpec`; raise ConfigError, which names it, for a kind of state that kvflow does not move."""
    kind = spec.mamba_type.name
    if kind not in SERVED:
        raise ConfigError("recurrent states of this kind are not served", found=kind, known=SERVED)
    if spec.mamba_cache_mode != "none":
        raise ConfigError(
            "recurrent states are not served with prefix caching; use --no-enable-prefix-caching",
            found=spec.mamba_cache_mode,
        )
    if spec.num_speculative_blocks or spec.tp_replicated or len(spec.shapes) != 2:
        raise ConfigError(
            "recurrent states like these are not served",
            shapes=spec.shapes,
            speculative=spec.num_speculative_blocks,
            replicated=spec.tp_replicated,
        )
    convolution, state = spec.shapes
    channels = _channels(kind, convolution[0 if channels_first else 1], state)
    if min(channels) < 1:
        raise ConfigError("the convolution has too few channels for its state", kind=kind, shapes=spec.shapes)
    return RecurrentState(tuple(convolution), tuple(state), tuple(spec.dtypes), channels, channels_first)


def _channels(kind: str, total: int, state: Sequence[int]) -> tuple[int, ...]:
    """Return the number of channels of each kind, in their order in vLLM's layers."""
    if kind == "MAMBA1":
        return (total,)
    values = state[0] * state[1]  # heads times channels per head
    others = (total - values) // 2
    return (values, others, others) if kind == "MAMBA2" else (others, others, values)


def _part(cache: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """View a part of each block with its shape and type."""
    size = prod(shape) * dtype.itemsize
    return cache[:, 0, 0, offset : offset + size].view(dtype).unflatten(1, shape)
