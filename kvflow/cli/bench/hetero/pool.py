"""The memory of one rank, in which each cell of each request can be recognised on whatever side it is."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvflow.cli.bench.hetero.options import HeteroOptions
from kvflow.cli.bench.patterns import WORD_BYTES, named
from kvflow.geometry import Component, KVLayout, MemoryRange, Region, head_range

__all__ = ["RankPool"]

TENSORS: Final = ("k", "v")


class RankPool:
    """One rank's share of the cache: as many pages as all requests take, in random order."""

    def __init__(self, options: HeteroOptions, engine_rank: int) -> None:
        self._options = options
        self._side = options.own
        self._heads = head_range(options.shape.heads, self._side.ranks, engine_rank)
        num_pages = options.tokens // self._side.page_size
        self._slots = num_pages * options.tables
        order = np.random.default_rng((7, engine_rank)).permutation(self._slots)
        self.tables = list(order.reshape(options.tables, num_pages))
        self._tensors = np.zeros((options.shape.layers * len(TENSORS), self._slots, *self._page_shape()), np.uint64)
        self.layout = self._layout()

    def fill(self) -> None:
        """Write every request into its pages, as a model would. Takes long."""
        for request, pages in enumerate(self.tables):
            for tensor, cells in enumerate(self._in_order()):
                cells[pages] = self._names(request, tensor)[..., None]

    def wipe(self) -> None:
        """Write something that no request has everywhere. Takes long."""
        self._tensors.fill(0)

    def has_arrived(self, request: int) -> bool:
        """Every byte of a request is what it should be. Takes long."""
        return all(
            bool((cells[self.tables[request]] == self._names(request, tensor)[..., None]).all())
            for tensor, cells in enumerate(self._in_order())
        )

    def _page_shape(self) -> tuple[int, int, int]:
        num_heads = self._heads[1] - self._heads[0]
        words = self._options.shape.head_bytes // WORD_BYTES
        page_size = self._side.page_size
        return (page_size, num_heads, words) if self._side.axes == "NHD" else (num_heads, page_size, words)

    def _in_order(self) -> NDArray[np.uint64]:
        """All cells, uint64[tensors, pages, tokens, heads, words]; a view."""
        return self._tensors if self._side.axes == "NHD" else self._tensors.swapaxes(2, 3)

    def _names(self, request: int, tensor: int) -> NDArray[np.uint64]:
        """What the cells of a request have in each word, uint64[pages, tokens of a page, heads]."""
        options = self._options
        first = (request * len(self._tensors) + tensor) * options.tokens
        tokens = np.arange(first, first + options.tokens, dtype=np.uint64).reshape(-1, self._side.page_size)
        return named(np.add.outer(tokens * np.uint64(options.shape.heads), np.arange(*self._heads, dtype=np.uint64)))

    def _layout(self) -> KVLayout:
        shape, size = self._options.shape, self._side.page_size
        num_heads, is_nhd = self._heads[1] - self._heads[0], self._side.axes == "NHD"
        page_bytes = size * num_heads * shape.head_bytes
        regions = tuple(
            Region(
                tensor=TENSORS[number % len(TENSORS)],
                layer=number // len(TENSORS),
                address=int(tensor.ctypes.data),
                slots=self._slots,
                slot_stride=page_bytes,
                tokens_per_slot=size,
                token_stride=(num_heads if is_nhd else 1) * shape.head_bytes,
                heads=self._heads,
                head_stride=(1 if is_nhd else size) * shape.head_bytes,
                head_bytes=shape.head_bytes,
                dtype="bfloat16",
            )
            for number, tensor in enumerate(self._tensors)
        )
        ranges = tuple(MemoryRange(int(tensor.ctypes.data), tensor.nbytes) for tensor in self._tensors)
        return KVLayout((Component("kv", regions),), "bench", ranges)
