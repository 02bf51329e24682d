"""Paged KV pools, one for each rank as in an engine, and a model's cache in their pages."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvflow import head_range, layout_from_tensors
from kvflow.cli.demo.models import LanguageModel
from kvflow.cli.demo.options import DemoOptions, SideName

__all__ = ["RankPool", "make_pools", "rebuild_cache"]


class RankPool:
    """The pool of one tensor-parallel rank, with one request in it.

    The pool is filled with NaN, so that pages that were not written are detected. It is twice as large as the request,
    so that the request's pages are scattered.

    Attributes:
        heads: Global KV heads `(start, stop)` held here.
        layout: Layout for kvflow.
    """

    def __init__(
        self, model: LanguageModel, heads: tuple[int, int], *, page_size: int, num_tokens: int, seed: int
    ) -> None:
        num_pages = -(-num_tokens // page_size)
        shape = (2 * num_pages, page_size, heads[1] - heads[0], model.config.head_dim)
        shuffled = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(seed))
        self.heads = heads
        self._page_size = page_size
        self._page_table = shuffled[:num_pages]
        self._cells = torch.full((2 * model.config.num_hidden_layers, *shape), torch.nan)
        tensors = {"k": list(self._cells[::2]), "v": list(self._cells[1::2])}
        self.layout = layout_from_tensors(tensors, axes="page token head dim", heads=heads, fingerprint=model.name)

    def pages(self, start: int, stop: int) -> list[int]:
        """Return the pool pages that hold the tokens `[start, stop)`."""
        pages: list[int] = self._page_table[start // self._page_size : -(-stop // self._page_size)].tolist()
        return pages

    def write(self, cache: DynamicCache, start: int, stop: int) -> None:
        """Copy this rank's heads of the tokens `[start, stop)` from a cache into the pages."""
        positions = torch.arange(start, stop)
        pages = self._page_table[positions // self._page_size]
        layers: list[Any] = list(cache.layers)
        tensors = [tensor[0] for layer in layers for tensor in (layer.keys, layer.values)]
        for cells, tensor in zip(self._cells, tensors, strict=True):
            cells[pages, positions % self._page_size] = tensor[slice(*self.heads), start:stop].transpose(0, 1)

    def read(self, num_tokens: int) -> torch.Tensor:
        """Return the first tokens from the pages, float32[2 * layers, heads, num_tokens, head_dim]."""
        return self._cells[:, self.pages(0, num_tokens)].flatten(1, 2)[:, :num_tokens].transpose(1, 2)


def make_pools(model: LanguageModel, options: DemoOptions, side: SideName, num_tokens: int) -> list[RankPool]:
    """Create the pools of all ranks of a side; raise LayoutError if heads cannot be split among that many ranks."""
    num_ranks, seed, page_size = options.prefill_tp, options.seed, options.page_size
    if side == "decode":
        num_ranks, seed = options.decode_tp, seed + num_ranks
    elif side == "second":
        seed, page_size = seed + num_ranks + options.decode_tp, 2 * page_size
    pools = []
    for rank in range(num_ranks):
        heads = head_range(model.config.num_key_value_heads, num_ranks, rank)
        pools.append(RankPool(model, heads, page_size=page_size, num_tokens=num_tokens, seed=seed + rank))
    return pools


def rebuild_cache(model: LanguageModel, pools: Sequence[RankPool], num_tokens: int) -> DynamicCache:
    """Reassemble a cache from the heads of all ranks.

    Raises:
        RuntimeError: Ranks that hold the same head disagree about it, or a cell was never written.
    """
    by_heads: dict[tuple[int, int], torch.Tensor] = {}
    for pool in pools:
        shard = pool.read(num_tokens)
        if not torch.equal(by_heads.setdefault(pool.heads, shard), shard):  # NaN equals nothing, not even itself
            raise RuntimeError(f"ranks disagree about heads {pool.heads}, or some of their cells were never written")
    whole = torch.cat([by_heads[heads] for heads in sorted(by_heads)], dim=1).unsqueeze(1)
    cache = model.new_cache()
    for layer in range(model.config.num_hidden_layers):
        cache.update(whole[2 * layer], whole[2 * layer + 1], layer)
    return cache
