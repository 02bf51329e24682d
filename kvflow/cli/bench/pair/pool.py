"""The memory of one side, in the shape of a model's cache, and which pages of it a request has."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.cli.bench.pair.options import SHAPES, Load, PairOptions, Shape
from kvflow.cli.bench.patterns import WORD_BYTES, named
from kvflow.geometry import Component, KVLayout, MemoryRange, Region

__all__ = ["Pages", "PairPool", "Tables", "slots_for", "tables_of"]

BLOCK_WORDS: Final = 2**16
"""Patterns are worked out in pieces that fit into a cache."""

SPARE_PAGES: Final = 1
"""Pages at the end of each tensor that no request has, so that no piece reaches over two tensors."""

Pages = NDArray[np.int64]


class Tables(NamedTuple):
    """Pages of one request on both sides, int64[num_pages] each."""

    src: Pages
    dst: Pages


def tables_of(load: Load, shape: Shape, slots: int) -> list[Tables]:
    """The page tables of a load; both sides work out the same ones."""
    count = load.tokens // shape.page_size
    pages = np.arange(slots - SPARE_PAGES)
    orders = [pages, pages]
    if load.table == "random":
        orders = [np.random.default_rng((load.seed, side)).permutation(pages) for side in range(2)]
    src, dst = (order[: load.tables * count].reshape(load.tables, count) for order in orders)
    return [Tables(*pair) for pair in zip(src, dst, strict=True)]


def slots_for(shape: Shape, num_bytes: int, tokens: int) -> int:
    """Pages of a pool that has room for both: so many bytes, and so many tokens."""
    num_pages = max(num_bytes // shape.token_bytes, tokens) // shape.page_size
    return num_pages + SPARE_PAGES


class PairPool:
    """All tensors of one side in one allocation, one after the other."""

    def __init__(self, options: PairOptions) -> None:
        self.shape = SHAPES[options.shape]
        self.slots = options.slots
        self._tensor_words = self.slots * self.shape.page_bytes // WORD_BYTES
        self._words = np.zeros(self.shape.num_tensors * self._tensor_words, np.uint64)
        self.layout = self._layout()

    @property
    def ranges(self) -> tuple[MemoryRange, ...]:
        """Each tensor, in order."""
        size = self._tensor_words * WORD_BYTES
        return tuple(MemoryRange(self.address + number * size, size) for number in range(self.shape.num_tensors))

    @property
    def address(self) -> int:
        """Of the first tensor."""
        return int(self._words.ctypes.data)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All of it; a view."""
        return self._words.view(np.uint8)

    def fill(self) -> None:
        """Write the pattern of a source everywhere. Takes long."""
        for start in range(0, self._words.size, BLOCK_WORDS):
            stop = min(start + BLOCK_WORDS, self._words.size)
            self._words[start:stop] = _names(start, stop)

    def wipe(self) -> None:
        """Write something that is no pattern everywhere. Takes long."""
        self._words.fill(0)

    def has_arrived(self, tables: Tables) -> bool:
        """Every byte of the destination pages is the one of the source pages. Takes long."""
        return all(
            bool((self._tensor(number)[tables.dst] == self._pattern(number, tables.src)).all())
            for number in range(self.shape.num_tensors)
        )

    def has_arrived_whole(self, num_bytes: int) -> bool:
        """The same of so many bytes from the beginning."""
        count = num_bytes // WORD_BYTES
        blocks = [(start, min(start + BLOCK_WORDS, count)) for start in range(0, count, BLOCK_WORDS)]
        return all(bool((self._words[start:stop] == _names(start, stop)).all()) for start, stop in blocks)

    def _tensor(self, number: int) -> NDArray[np.uint64]:
        """One tensor, uint64[slots, words of a page]; a view."""
        first = number * self._tensor_words
        return self._words[first : first + self._tensor_words].reshape(self.slots, -1)

    def _pattern(self, number: int, pages: Pages) -> NDArray[np.uint64]:
        """What a source has in some pages of a tensor: each word names its place."""
        words = self.shape.page_bytes // WORD_BYTES
        firsts = number * self._tensor_words + pages * words
        return named(np.add.outer(firsts, np.arange(words)).astype(np.uint64))

    def _layout(self) -> KVLayout:
        shape, ranges = self.shape, self.ranges
        regions = tuple(
            Region(
                tensor=tensor,
                layer=layer,
                address=ranges[layer * len(shape.tensors) + index].address,
                slots=self.slots,
                slot_stride=shape.page_bytes,
                tokens_per_slot=shape.page_size,
                token_stride=shape.heads * shape.head_bytes,
                heads=(0, shape.heads),
                head_stride=shape.head_bytes,
                head_bytes=shape.head_bytes,
                dtype="bfloat16",
            )
            for layer in range(shape.layers)
            for index, tensor in enumerate(shape.tensors)
        )
        return KVLayout((Component("kv", regions),), "bench", ranges)


def _names(start: int, stop: int) -> NDArray[np.uint64]:
    return named(np.arange(start, stop, dtype=np.uint64))
