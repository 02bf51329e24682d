"""Paged KV pools, one for each rank, as an engine would keep them."""

import random
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from kvflow import KVLayout, head_range, layout_from_tensors
from kvflow.cli.demo.models import LanguageModel, keys_and_values

__all__ = ["RankPool", "rebuild_cache"]

Shards = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, float32[heads, num_tokens, head_dim]."""


class RankPool:
    """The pool of one tensor-parallel rank, with one request in it.

    The pool is filled with NaN, so that a page which was not written shows, and is twice as large as the request, so
    that the request's pages lie scattered.

    Attributes:
        heads: Global KV heads `(start, stop)` held here.
        layout: What kvflow needs to know about it.
    """

    def __init__(
        self, model: LanguageModel, *, tp_size: int, tp_rank: int, page_size: int, num_tokens: int, seed: int
    ) -> None:
        self.heads = head_range(model.num_kv_heads, tp_size, tp_rank)
        self._page_size = page_size
        num_pages = -(-num_tokens // page_size)
        shape = (2 * num_pages, page_size, self.heads[1] - self.heads[0], model.head_dim)
        self._k = [torch.full(shape, torch.nan) for _ in range(model.num_layers)]
        self._v = [torch.full(shape, torch.nan) for _ in range(model.num_layers)]
        self._page_table = random.Random(f"{seed}/{tp_rank}").sample(range(2 * num_pages), num_pages)  # noqa: S311
        self.layout: KVLayout = layout_from_tensors(
            {"k": self._k, "v": self._v}, axes="page token head dim", heads=self.heads, fingerprint=model.name
        )

    def pages(self, start: int, stop: int) -> list[int]:
        """Pool pages that hold the tokens `[start, stop)`."""
        return self._page_table[start // self._page_size : -(-stop // self._page_size)]

    def write(self, cache: DynamicCache, start: int, stop: int) -> None:
        """Copy this rank's heads of the tokens `[start, stop)` from a cache into the pages."""
        positions = torch.arange(start, stop)
        pages = torch.tensor(self._page_table)[positions // self._page_size]
        for (keys, values), k, v in zip(keys_and_values(cache), self._k, self._v, strict=True):
            k[pages, positions % self._page_size] = keys[slice(*self.heads), start:stop].transpose(0, 1)
            v[pages, positions % self._page_size] = values[slice(*self.heads), start:stop].transpose(0, 1)

    def read(self, num_tokens: int) -> Shards:
        """Give the first tokens out of the pages."""
        pages = torch.tensor(self.pages(0, num_tokens))
        layers = zip(self._k, self._v, strict=True)
        return [(_gather(k, pages, num_tokens), _gather(v, pages, num_tokens)) for k, v in layers]


def _gather(pool: torch.Tensor, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return pool[pages].flatten(0, 1)[:num_tokens].transpose(0, 1)


def rebuild_cache(model: LanguageModel, pools: Sequence[RankPool], num_tokens: int) -> DynamicCache:
    """Put the heads of all ranks together again.

    Raises:
        RuntimeError: Ranks that hold the same head disagree about it, or a cell was never written.
    """
    by_heads: dict[tuple[int, int], Shards] = {}
    for pool in pools:
        shards = pool.read(num_tokens)
        if not _equal(by_heads.setdefault(pool.heads, shards), shards):
            raise RuntimeError(f"ranks disagree about heads {pool.heads}, or some of their cells were never written")
    cache = model.new_cache()
    in_order = [by_heads[heads] for heads in sorted(by_heads)]
    for layer in range(model.num_layers):
        keys = torch.cat([shards[layer][0] for shards in in_order]).unsqueeze(0)
        values = torch.cat([shards[layer][1] for shards in in_order]).unsqueeze(0)
        cache.update(keys, values, layer)
    return cache


def _equal(ours: Shards, theirs: Shards) -> bool:
    """Compare cell by cell; a cell that was never written is NaN and equals nothing, not even itself."""
    pairs = ((a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    return all(torch.equal(a, b) for a, b in pairs)
