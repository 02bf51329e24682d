"""Small models: SGLang's own pools, and the content of a request, which is the same in every process.

A model creates the pools of each rank, writes that rank's shard into the pages of a request, and compares. Each side
chooses pages at random. Bytes that are not part of a request must not change.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import sglang.srt.configs.mamba_utils as states
import sglang.srt.mem_cache.memory_pool as pools
import torch
from sglang.srt.layers.dcp.layout import localize_dcp_indices
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

__all__ = ["MODELS", "Held", "Model", "Rank", "share"]

PAGES: Final = 20
UNTOUCHED: Final = 0xEE


class Rank(NamedTuple):
    """A rank; with data parallelism, of attention or of replicas, also which of them.

    With decode context parallelism, `dcp_size` neighbouring ranks share the tokens of latents.
    """

    tp_size: int
    tp_rank: int
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    replicas: int = 1
    replica: int = 0
    dcp_size: int = 1


class Held(NamedTuple):
    """The places of a request in the pools of a side.

    Attributes:
        whole: Pages of all tokens, those of the prefix included.
        window: Pages of a sliding window.
        slot: Slot of a recurrent state, or row of the request.
        behind: Number of pages of the prefix.
    """

    whole: Any
    window: Any
    slot: int
    behind: int = 0

    @property
    def pages(self) -> Any:
        """Pages of the tokens behind the prefix."""
        return self.whole[self.behind :]


def content(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random bytes, determined by seed and shape."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng([seed, *shape]).integers(0, 256, count, np.uint8)
    return torch.from_numpy(data).view(dtype).view(*shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def share(total: int, rank: Rank) -> slice:
    """Return the slice of heads that a rank holds."""
    each, copies = max(1, total // rank.tp_size), max(1, rank.tp_size // total)
    start = rank.tp_rank // copies * each
    return slice(start, start + each)


class Model:
    """K and V of ordinary attention; subclasses override what differs.

    Args:
        heads: KV heads.
        dim: Dimension of a head.
        layers: Layers of the model.
        page: Tokens per page.
        draft: Sides that have a draft layer.
    """

    is_mla = False
    dtype = "bfloat16"

    def __init__(self, heads: int = 8, dim: int = 64, layers: int = 4, page: int = 16, draft: str = "") -> None:
        self.heads, self.dim, self.layers, self.page, self.draft_sides = heads, dim, layers, page, draft.split()

    def span(self, rank: Rank) -> range:
        """Return the layers that a rank holds."""
        stage, stages = rank.pp_rank, rank.pp_size
        return range(stage * self.layers // stages, (stage + 1) * self.layers // stages)

    def pool(self, rank: Rank) -> Any:
        """Create the pool of a rank."""
        layers = self.span(rank)
        return self._attention(rank, len(layers), layers.start)

    def draft(self, side: str, rank: Rank) -> Any:
        """Create the pool of the draft model, if this side has one."""
        return self._attention(rank, 1, 0) if side in self.draft_sides else None

    def _attention(self, rank: Rank, layers: int, start: int) -> Any:
        return pools.MHATokenToKVPool(
            size=self.page * PAGES,
            page_size=self.page,
            dtype=torch.bfloat16,
            head_num=max(1, self.heads // rank.tp_size),
            head_dim=self.dim,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
            start_layer=start,
        )

    def rows(self, held: Any, tokens: int, start: int) -> torch.Tensor:
        """Return the indices of tokens in a pool."""
        places = (np.asarray(held, np.int64)[:, None] * self.page + np.arange(self.page)).reshape(-1)
        return torch.as_tensor(places[: tokens - start])

    def window_start(self, tokens: int, prefix: int) -> int:
        """Return the first token of a sliding window."""
        return prefix

    def state_indices(self, held: Held, tokens: int, dcp_size: int = 1) -> Any:
        """Return SGLang's `state_indices`, as its `_full_kv_pages_payload` and similar functions do."""
        return None

    def cells(
        self, pool: Any, draft: Any, rank: Rank, held: Held, tokens: int, prefix: int
    ) -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
        """Return tensor, index and content of everything that a rank holds of a request."""
        rows = self.rows(held.pages, tokens, prefix)
        for layer, number in enumerate(self.span(rank)):
            for buffers, seed in ((pool.k_buffer, 2 * number), (pool.v_buffer, 2 * number + 1)):
                yield buffers[layer], rows, self._heads(seed, tokens, prefix, rank)
        if draft is not None and len(self.draft_sides) == 2:
            for buffers, seed in ((draft.k_buffer, 900), (draft.v_buffer, 901)):
                yield buffers[0], rows, self._heads(seed, tokens, prefix, rank)

    def _heads(self, seed: int, tokens: int, start: int, rank: Rank) -> torch.Tensor:
        return content(seed, tokens, self.heads, self.dim)[start:, share(self.heads, rank)]

    def write(self, *request: Any) -> None:
        """Write the content into the pools of a rank."""
        for tensor, index, data in self.cells(*request):
            tensor[index] = data

    def blank(self, *request: Any) -> None:
        """Fill the tensors with a marker."""
        for tensor, _, _ in self.cells(*request):
            tensor.view(torch.uint8).fill_(UNTOUCHED)

    def differences(self, *request: Any) -> list[str]:
        """Return the tensors whose content is wrong, or that changed elsewhere (except in the rest of a last page)."""
        found = []
        for number, (tensor, index, data) in enumerate(self.cells(*request)):
            if not same(tensor[index], data):
                found.append(f"tensor {number} differs")
            if isinstance(index, torch.Tensor):
                rest = torch.ones(len(tensor), dtype=torch.bool)
                size = self.page if len(tensor) > (PAGES + 1) * request[2].dcp_size else 1
                pages = torch.unique(index // size)
                if size > 1 and request[2].dcp_size > 1:  # the rest of a last page may be all that a rank has of it
                    pages = torch.as_tensor(request[3].pages)
                rest[(pages[:, None] * size + torch.arange(size)).reshape(-1)] = False
                if not bool((tensor[rest].contiguous().view(torch.uint8) == UNTOUCHED).all()):
                    found.append(f"tensor {number} was changed elsewhere")
        return found


class Latent(Model):
    """MLA, optionally with DSA's index."""

    is_mla = True

    def __init__(self, *, index: bool = False) -> None:
        super().__init__(heads=1, dim=576, page=64)
        self.index = index

    def pool(self, rank: Rank) -> Any:
        if self.index:
            return pools.DSATokenToKVPool(**self.sizes(rank), index_head_dim=128, kv_cache_dim=576)
        return pools.MLATokenToKVPool(**self.sizes(rank))

    def sizes(self, rank: Rank) -> dict[str, Any]:
        """Return the arguments of every pool of latents."""
        layers = self.span(rank)
        return {
            "size": self.page * PAGES,
            "page_size": self.page,
            "dtype": torch.bfloat16,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "layer_num": len(layers),
            "device": "cpu",
            "enable_memory_saver": False,
            "start_layer": layers.start,
        }

    def state_indices(self, held: Held, tokens: int, dcp_size: int = 1) -> Any:
        return [self.index_pages(held, tokens, dcp_size)] if self.index else None

    def index_pages(self, held: Held, tokens: int, dcp_size: int) -> Any:
        """Return the pages of the index, which each rank has for all tokens: several in an entry for several ranks."""
        pages = (np.asarray(held.pages, np.int64)[:, None] * dcp_size + np.arange(dcp_size)).reshape(-1)
        return pages[: -(-tokens // self.page) - held.behind * dcp_size].astype(np.int32)

    def cells(
        self, pool: Any, draft: Any, rank: Rank, held: Held, tokens: int, prefix: int
    ) -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
        span = self.page * rank.dcp_size
        places = (torch.as_tensor(held.pages.astype(np.int64))[:, None] * span + torch.arange(span)).reshape(-1)
        local = localize_dcp_indices(places[: tokens - prefix], rank.dcp_size, rank.tp_rank % rank.dcp_size)
        rows, is_local = local[local >= 0], local >= 0
        for layer, number in enumerate(self.span(rank)):
            yield pool.kv_buffer[layer], rows, content(number, tokens, 1, 576)[prefix:][is_local]
            if self.index:
                keys = pool.index_k_with_scale_buffer[layer].view(torch.uint8)
                pages = torch.as_tensor(self.index_pages(held, tokens, rank.dcp_size).astype(np.int64))
                whole = -(-tokens // self.page)
                data = content(100 + number, whole, keys.shape[1], dtype=torch.uint8)
                yield keys, pages, data[whole - len(pages) :]


class Window(Model):
    """A mix of layers with a sliding window and layers with full attention."""

    size = 64

    def pool(self, rank: Rank) -> Any:
        return SWAKVPool(
            size=self.page * PAGES,
            size_swa=self.page * PAGES,
            page_size=self.page,
            dtype=torch.bfloat16,
            head_num=max(1, self.heads // rank.tp_size),
            head_dim=self.dim,
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1, 3],
            device="cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )

    def window_start(self, tokens: int, prefix: int) -> int:
        return max(prefix, tokens - self.size) // self.page * self.page

    def state_indices(self, held: Held, tokens: int, dcp_size: int = 1) -> Any:
        return [held.window]

    def cells(
        self, pool: Any, draft: Any, rank: Rank, held: Held, tokens: int, prefix: int
    ) -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
        first = self.window_start(tokens, prefix)
        parts = (
            (pool.full_kv_pool, held.pages, prefix, 10),
            (pool.swa_kv_pool, held.window, first, 20),
        )
        for part, pages, start, seed in parts:
            rows = self.rows(pages, tokens, start)
            for layer in range(2):
                for buffers, number in ((part.k_buffer, 0), (part.v_buffer, 1)):
                    yield buffers[layer], rows, self._heads(seed + 2 * layer + number, tokens, start, rank)


class Recurrent(Model):
    """Three layers with recurrent states and one with attention: gated delta net, or Kimi's with rows outside."""

    def __init__(self, *, kimi: bool = False) -> None:
        super().__init__(heads=2, dim=256)
        self.kimi = kimi
        self.groups = [4096] * 3 if kimi else [2048, 2048, 4096]

    def pool(self, rank: Rank) -> Any:
        return pools.HybridLinearKVPool(**self.sizes(rank))

    def sizes(self, rank: Rank) -> dict[str, Any]:
        """Return the arguments of every pool with recurrent states."""
        common = {"tp_world_size": rank.tp_size, "num_heads": 32, "head_dim": 128}
        if self.kimi:
            shape = states.KimiLinearStateShape.create(**common, num_k_heads=32, head_k_dim=128, conv_kernel_size=4)
            params: Any = states.KimiLinearCacheParams(shape=shape, layers=[0, 1, 2])
        else:
            shape = states.Mamba2StateShape.create(
                **common,
                intermediate_size=4096,
                n_groups=16,
                state_size=128,
                conv_kernel=4,
                conv_shard_groups=self.groups,
            )
            params = states.Mamba2CacheParams(shape=shape, layers=[0, 1, 2])
        return {
            "size": self.page * PAGES,
            "dtype": torch.bfloat16,
            "page_size": self.page,
            "head_num": max(1, self.heads // rank.tp_size),
            "head_dim": self.dim,
            "full_attention_layer_ids": [3],
            "device": "cpu",
            "mamba_pool": pools.MambaPool(
                size=8, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 1, 2], device="cpu"
            ),
        }

    def state_indices(self, held: Held, tokens: int, dcp_size: int = 1) -> Any:
        return [np.array([held.slot])]

    def cells(
        self, pool: Any, draft: Any, rank: Rank, held: Held, tokens: int, prefix: int
    ) -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
        rows, part = self.rows(held.pages, tokens, prefix), pool.full_kv_pool
        for buffers, seed in ((part.k_buffer, 0), (part.v_buffer, 1)):
            yield buffers[0], rows, self._heads(seed, tokens, prefix, rank)
        cache = pool.mamba_pool.mamba_cache
        conv, temporal = cache.conv[0], cache.temporal
        width = 32 // rank.tp_size
        for layer in range(3):
            yield conv[layer], held.slot, self._convolution(layer, conv.dtype, rank)
            whole = content(50 + layer, 32, *temporal.shape[3:], dtype=temporal.dtype)
            yield temporal[layer], held.slot, whole[rank.tp_rank * width : (rank.tp_rank + 1) * width]

    def _convolution(self, layer: int, dtype: torch.dtype, rank: Rank) -> torch.Tensor:
        shape = (3, sum(self.groups)) if self.kimi else (sum(self.groups), 3)
        axis = 1 if self.kimi else 0
        whole, start, parts = content(70 + layer, *shape, dtype=dtype), 0, []
        for size in self.groups:
            width = size // rank.tp_size
            parts.append(whole.narrow(axis, start + rank.tp_rank * width, width))
            start += size
        return torch.cat(parts, axis)


MODELS: Final[dict[str, Callable[[], Model]]] = {
    "mha": Model,
    "gqa": lambda: Model(heads=2),
    "page 1": lambda: Model(page=1),
    "five layers": lambda: Model(layers=5),
    "five layers, draft on decode": lambda: Model(layers=5, draft="decode"),
    "draft on both": lambda: Model(draft="prefill decode"),
    "draft on decode": lambda: Model(draft="decode"),
    "draft on prefill": lambda: Model(draft="prefill"),
    "mla": Latent,
    "dsa": lambda: Latent(index=True),
    "swa": Window,
    "gdn": Recurrent,
    "kimi": lambda: Recurrent(kimi=True),
}
