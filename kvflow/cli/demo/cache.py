"""Paged KV pools, one for each rank as in an engine, and a model's cache in their pages."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache

from kvflow import head_range
from kvflow.cli.demo.models import LanguageModel, keys_and_values
from kvflow.cli.demo.options import DemoOptions
from kvflow.cli.pools import PagePool, PoolShape, page_tables

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
        self, model: LanguageModel, *, heads: tuple[int, int], page_size: int, num_tokens: int, seed: int
    ) -> None:
        num_pages = -(-num_tokens // page_size)
        shape = PoolShape(
            layers=model.num_layers,
            heads=heads,
            head_bytes=model.head_dim * np.dtype(np.float32).itemsize,
            page_size=page_size,
            dtype="float32",
        )
        self.heads = heads
        self._page_size = page_size
        self._pool = PagePool(shape, 2 * num_pages, fingerprint=model.name)
        self._cells = torch.from_numpy(self._pool.cells(np.float32))
        self._cells.fill_(torch.nan)
        self._page_table = torch.from_numpy(page_tables(2 * num_pages, 1, num_pages, (seed, *heads))[0])
        self.layout = self._pool.layout

    def pages(self, start: int, stop: int) -> list[int]:
        """Return the pool pages that hold the tokens `[start, stop)`."""
        pages: list[int] = self._page_table[start // self._page_size : -(-stop // self._page_size)].tolist()
        return pages

    def write(self, cache: DynamicCache, start: int, stop: int) -> None:
        """Copy this rank's heads of the tokens `[start, stop)` from a cache into the pages."""
        positions = torch.arange(start, stop)
        pages = self._page_table[positions // self._page_size]
        tensors = [tensor for layer in keys_and_values(cache) for tensor in layer]
        for cells, tensor in zip(self._cells, tensors, strict=True):
            cells[pages, positions % self._page_size] = tensor[slice(*self.heads), start:stop].transpose(0, 1)

    def read(self, num_tokens: int) -> torch.Tensor:
        """Return the first tokens from the pages, float32[2 * layers, heads, num_tokens, head_dim]."""
        return self._cells[:, self.pages(0, num_tokens)].flatten(1, 2)[:, :num_tokens].transpose(1, 2)


def make_pools(
    model: LanguageModel, options: DemoOptions, num_tokens: int, *, tp_size: int, seed: int
) -> list[RankPool]:
    """Create the pools of all ranks of an instance.

    Raises:
        LayoutError: The heads cannot be split among that many ranks.
    """
    all_heads = [head_range(model.num_kv_heads, tp_size, rank) for rank in range(tp_size)]
    return [
        RankPool(model, heads=heads, page_size=options.page_size, num_tokens=num_tokens, seed=seed + rank)
        for rank, heads in enumerate(all_heads)
    ]


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
    for layer in range(model.num_layers):
        cache.update(whole[2 * layer], whole[2 * layer + 1], layer)
    return cache
