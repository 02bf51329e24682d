"""A worker's pages: who has them, what is written in them, and what must not be."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvflow
from kvflow.cli.bench.workers.options import WorkerOptions
from kvflow.geometry import Component, KVLayout, MemoryRange, Region

__all__ = ["Account", "PagePool"]

UNTOUCHED = np.uint32(0xEEEEEEEE)
"""What free pages are filled with; no pattern has it."""

PATTERN_STEP = 2_654_435_761
"""Odd, so that all pages of some thousand rooms get names of their own."""

AnyTransfer = kvflow.RoomSender | kvflow.RoomReceiver


class Account(NamedTuple):
    """Where all pages of a pool are. Their sum is the pool."""

    free: int
    held: int
    quarantined: int
    all: int


class PagePool:
    """Pages of one rank, and an allocator that gives a page back only when `memory` is SAFE."""

    def __init__(self, options: WorkerOptions, seed: int) -> None:
        words = options.cell_bytes // 4
        self._layers = [np.full((options.pool_pages, words), UNTOUCHED) for _ in range(options.layers)]
        self._free: list[int] = np.random.default_rng(seed).permutation(options.pool_pages).tolist()
        self._num_pages = options.pool_pages
        self._held: list[list[int]] = []
        self._ended: list[tuple[AnyTransfer, list[int]]] = []
        self.layout = _layout(self._layers, options)

    def take(self, count: int) -> list[int]:
        """Take pages, scattered over the pool."""
        pages, self._free = self._free[:count], self._free[count:]
        if len(pages) < count:
            raise kvflow.CapacityExceeded("pool is empty", free=len(pages), wanted=count)
        self._held.append(pages)
        return pages

    def give_back(self, transfer: AnyTransfer, pages: list[int]) -> None:
        """Give the pages of an ended transfer back; `take_back` says when they are safe."""
        self._held.remove(pages)
        self._ended.append((transfer, pages))

    def take_back(self) -> list[list[int]]:
        """Give the pages that have become safe; they are held until they have been wiped and freed."""
        safe = [entry for entry in self._ended if entry[0].memory is kvflow.Memory.SAFE]
        self._ended = [entry for entry in self._ended if entry not in safe]
        self._held += [pages for _, pages in safe]
        return [pages for _, pages in safe]

    def wipe(self, pages: list[int]) -> None:
        """Make pages look like nobody had written to them. Takes long."""
        for layer in self._layers:
            layer[pages] = UNTOUCHED

    def free(self, pages: list[int]) -> None:
        """Let others have pages that were wiped."""
        self._held.remove(pages)
        self._free += pages

    def account(self) -> Account:
        """Where all pages are."""
        held = sum(len(pages) for pages in self._held)
        return Account(len(self._free), held, sum(len(pages) for _, pages in self._ended), self._num_pages)

    def write(self, room: int, first: int, pages: Sequence[int]) -> None:
        """Compute pages: each gets the name of its room, layer and token, all over. Takes long."""
        for number, layer in enumerate(self._layers):
            layer[pages] = _names(room, number, first, len(pages))[:, None]

    def is_written(self, room: int, pages: Sequence[int]) -> bool:
        """Every byte of some pages is what `write` puts there from token 0 on. Takes long."""
        return all(
            bool((layer[pages] == _names(room, number, 0, len(pages))[:, None]).all())
            for number, layer in enumerate(self._layers)
        )

    def is_free_untouched(self) -> bool:
        """Nobody has written to a free page. Takes long."""
        return all(bool((layer[self._free] == UNTOUCHED).all()) for layer in self._layers)


def _names(room: int, layer: int, first: int, count: int) -> NDArray[np.uint32]:
    first_name = (room * 64 + layer) * 65_536 + first
    names = np.arange(first_name, first_name + count, dtype=np.uint64) * np.uint64(PATTERN_STEP)
    return np.asarray(names, np.uint32)


def _layout(layers: Sequence[NDArray[np.uint32]], options: WorkerOptions) -> KVLayout:
    regions = tuple(
        Region(
            tensor="kv",
            layer=number,
            address=int(layer.ctypes.data),
            slots=options.pool_pages,
            slot_stride=options.cell_bytes,
            tokens_per_slot=1,
            token_stride=options.cell_bytes,
            heads=(0, 1),
            head_stride=options.cell_bytes,
            head_bytes=options.cell_bytes,
            dtype="uint32",
        )
        for number, layer in enumerate(layers)
    )
    ranges = tuple(sorted(MemoryRange(int(layer.ctypes.data), layer.nbytes) for layer in layers))
    return KVLayout((Component("kv", regions),), "bench", ranges)
