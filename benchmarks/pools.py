"""Paged memory of one rank in numpy, in which every cell of every token is identifiable."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from benchmarks.pool_memory import PoolMemory
from kvflow.geometry import Component, KVLayout, MemoryRange, Region

__all__ = ["PagePool", "Pages", "PoolShape", "page_tables"]

Pages = NDArray[np.int64] | Sequence[int]
"""Pool pages, [num_pages]."""

WORD_BYTES: Final = 8

SPARE_PAGES: Final = 1
"""Unused pages at the end of each tensor, so that no contiguous piece spans two tensors."""

TOKEN_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
TENSOR_STEP: Final = np.uint64(0xC2B2AE3D27D4EB4F)
HEAD_STEP: Final = np.uint64(0x165667B19E3779F9)
WORD_STEP: Final = np.uint64(0x27D4EB2F165667C5)
"""Odd and unrelated, so that words at different places differ."""


class PoolShape(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model's cache that one rank holds.

    Attributes:
        layers: Layers of the model.
        tensors: Names of the tensors of each layer.
        heads: Global heads `(start, stop)` held here.
        head_bytes: Bytes of one head of one token in one tensor, a multiple of 8.
        page_size: Tokens of a page.
        is_head_major: Pages are (head, token) instead of (token, head).
        dtype: Name of the element type, as in torch.
    """

    layers: int
    tensors: tuple[str, ...] = ("k", "v")
    heads: tuple[int, int] = (0, 1)
    head_bytes: int
    page_size: int = 16
    is_head_major: bool = False
    dtype: str = "bfloat16"

    @property
    def num_heads(self) -> int:
        """Number of heads held here."""
        return self.heads[1] - self.heads[0]

    @property
    def num_tensors(self) -> int:
        """Number of tensors over all layers."""
        return self.layers * len(self.tensors)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one tensor."""
        return self.page_size * self.num_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all tensors."""
        return self.num_tensors * self.num_heads * self.head_bytes


class PagePool:
    """Pages of one rank in one allocation, one tensor after another; initially zero.

    Attributes:
        shape: Shape of the cache.
        num_pages: Usable pages.
        place: Where the memory is.
        memory: All bytes, uint8[bytes]; a copy if they are on a device.
        tensor_bytes: Distance between the starts of two tensors.
        layout: Layout for kvflow.

    Args:
        allocate: Allocates the memory, given a number of bytes.
    """

    def __init__(
        self,
        shape: PoolShape,
        num_pages: int,
        fingerprint: str = "bench",
        allocate: Callable[[int], PoolMemory] = PoolMemory,
    ) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.tensor_bytes = (num_pages + SPARE_PAGES) * shape.page_bytes
        self.place = allocate(shape.num_tensors * self.tensor_bytes)
        self.memory = self.place.array
        self.layout = KVLayout((Component("kv", self._regions()),), fingerprint, (self.range,), *self.place.location)
        self.layout.keep([self.place])

    @property
    def range(self) -> MemoryRange:
        """The whole memory."""
        return self.place.range

    def cells(self, dtype: DTypeLike = np.uint64) -> NDArray[Any]:
        """Return all cells, [tensors, pages, tokens of a page, heads, elements of a head]; a view."""
        shape = self.shape
        inner = (shape.num_heads, shape.page_size) if shape.is_head_major else (shape.page_size, shape.num_heads)
        whole = self.memory.view(dtype).reshape(shape.num_tensors, self.num_pages + SPARE_PAGES, *inner, -1)
        return (whole.swapaxes(2, 3) if shape.is_head_major else whole)[:, : self.num_pages]

    def fill(self) -> None:
        """Write tokens 0, 1, ... into pages 0, 1, ..., all of them. Slow."""
        self.write(range(self.num_pages), 0)

    def write(self, pages: Pages, tokens: "int | NDArray[np.int64]") -> None:
        """Write tokens into pages, each cell with its own pattern. Slow.

        Args:
            pages: Pages to write to.
            tokens: The first token of each page, or that of the first page if they are consecutive.
        """
        self.place.load()
        for tensor, cells in enumerate(self.cells()):
            cells[pages] = self._pattern(tensor, pages, tokens)
        self.place.store()

    def holds(self, pages: Pages, tokens: "int | NDArray[np.int64]") -> bool:
        """Return whether every byte of some pages is as `write` would leave it, on a pool of any shape. Slow."""
        self.place.load()
        return all(
            np.array_equal(cells[pages], self._pattern(tensor, pages, tokens))
            for tensor, cells in enumerate(self.cells())
        )

    def wipe(self, pages: "Pages | slice" = slice(None)) -> None:
        """Write zeros, which occur in no pattern, into pages; by default into all. Slow."""
        self.place.load()
        for cells in self.cells():
            cells[pages] = 0
        self.place.store()

    def is_wiped(self, pages: Pages) -> bool:
        """Return whether some pages have not been written to since they were wiped. Slow."""
        self.place.load()
        return not any(cells[pages].any() for cells in self.cells())

    def _pattern(self, tensor: int, pages: Pages, tokens: "int | NDArray[np.int64]") -> NDArray[np.uint64]:
        """Return the pattern of tokens in a tensor, uint64[pages, tokens of a page, heads, words]."""
        shape = self.shape
        if isinstance(tokens, int):
            tokens = tokens + shape.page_size * np.arange(len(pages))
        token = _scaled(np.add.outer(tokens, np.arange(shape.page_size)), TOKEN_STEP)
        cell = np.add.outer(token + _scaled([tensor + 1], TENSOR_STEP), _scaled(np.arange(*shape.heads), HEAD_STEP))
        words = _scaled(np.arange(shape.head_bytes // WORD_BYTES), WORD_STEP)
        pattern: NDArray[np.uint64] = np.add.outer(cell, words)
        return pattern

    def _regions(self) -> tuple[Region, ...]:
        shape = self.shape
        strides = (shape.num_heads * shape.head_bytes, shape.head_bytes)
        if shape.is_head_major:
            strides = (shape.head_bytes, shape.page_size * shape.head_bytes)
        return tuple(
            Region(
                tensor=shape.tensors[number % len(shape.tensors)],
                layer=number // len(shape.tensors),
                address=self.range.address + number * self.tensor_bytes,
                slots=self.num_pages,
                slot_stride=shape.page_bytes,
                tokens_per_slot=shape.page_size,
                token_stride=strides[0],
                heads=shape.heads,
                head_stride=strides[1],
                head_bytes=shape.head_bytes,
                dtype=shape.dtype,
            )
            for number in range(shape.num_tensors)
        )


def _scaled(numbers: ArrayLike, step: np.uint64) -> NDArray[np.uint64]:
    return np.asarray(numbers, np.uint64) * step


def page_tables(num_pages: int, count: int, size: int, seed: object = None) -> NDArray[np.int64]:
    """Return page tables that share no page, int64[count, size].

    Args:
        num_pages: Pages of the pool, at least `count * size`.
        count: Number of tables.
        size: Pages of each table.
        seed: Seed of a random order, of any type that numpy accepts; by default the pages are in order.
    """
    order = np.arange(num_pages) if seed is None else np.random.default_rng(seed).permutation(num_pages)  # type: ignore[arg-type]
    return order[: count * size].reshape(count, size)
