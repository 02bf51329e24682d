"""Pools on real memory, and a slow, obvious copy as the reference for plans."""

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvflow.geometry import (
    Component,
    Descriptors,
    KVLayout,
    MemoryRange,
    Region,
    RegionKey,
    Route,
)
from tests.support import device

DTYPE = "uint8"
FINGERPRINT = "test-model"

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class PagedShape:
    """A paged pool as an engine might lay it out.

    Attributes:
        order: "NHD" (token, head) or "HND" (head, token) within a page.
        interleaved: K and V of a page lie next to each other; otherwise each has its own part of the buffer.
    """

    num_pages: int
    page_size: int
    heads: tuple[int, int]
    head_bytes: int
    num_layers: int
    first_layer: int = 0
    order: str = "NHD"
    interleaved: bool = False

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.num_heads * self.head_bytes


class Pool:
    """Memory of one rank: one buffer for each layer, with K and V in it."""

    def __init__(
        self, shape: PagedShape, fill: int, *, base: int | None = None, fingerprint: str = FINGERPRINT
    ) -> None:
        self.shape = shape
        size = 2 * shape.num_pages * shape.page_bytes
        allocated = [device.allocate(size, fill) for _ in range(shape.num_layers)]
        self.buffers = [buffer for buffer, _ in allocated]
        self._addresses = [
            address if base is None else base + index * 2 * size for index, (_, address) in enumerate(allocated)
        ]
        regions = tuple(self._region(tensor, layer) for layer in range(shape.num_layers) for tensor in ("k", "v"))
        allocations = tuple(sorted(MemoryRange(address, size) for address in self._addresses))
        self.layout = KVLayout((Component("kv", regions),), fingerprint, allocations, *device.LOCATION)
        self.layout.keep(self.buffers)

    def randomize(self, rng: np.random.Generator) -> None:
        for buffer in self.buffers:
            buffer[:] = np.frombuffer(rng.bytes(buffer.size), np.uint8) % 254 + 1

    def real_address(self, address: int) -> int:
        """Return the real address of an address in the layout."""
        for start, buffer in zip(self._addresses, self.buffers, strict=True):
            if start <= address < start + buffer.size:
                return int(buffer.ctypes.data) + address - start
        raise AssertionError(f"address {address:#x} is outside the pool")

    def cell(self, tensor: str, layer: int, page: int, token: int, head: int) -> NDArray[np.uint8]:
        """Return a view of one cell, found without the layout's strides."""
        shape = self.shape
        index = layer - shape.first_layer
        per_page = (shape.page_size, shape.num_heads) if shape.order == "NHD" else (shape.num_heads, shape.page_size)
        outer = (shape.num_pages, 2) if shape.interleaved else (2, shape.num_pages)
        grid = self.buffers[index].reshape(*outer, *per_page, shape.head_bytes)
        which = "kv".index(tensor)
        pages = grid[page, which] if shape.interleaved else grid[which, page]
        local = head - shape.heads[0]
        found: NDArray[np.uint8] = pages[token, local] if shape.order == "NHD" else pages[local, token]
        return found

    def _region(self, tensor: str, index: int) -> Region:
        shape = self.shape
        which = "kv".index(tensor)
        nhd = shape.order == "NHD"
        offset = which * (shape.page_bytes if shape.interleaved else shape.num_pages * shape.page_bytes)
        return Region(
            tensor=tensor,
            layer=shape.first_layer + index,
            address=self._addresses[index] + offset,
            slots=shape.num_pages,
            slot_stride=shape.page_bytes * (2 if shape.interleaved else 1),
            tokens_per_slot=shape.page_size,
            token_stride=shape.head_bytes * (shape.num_heads if nhd else 1),
            heads=shape.heads,
            head_stride=shape.head_bytes * (1 if nhd else shape.page_size),
            head_bytes=shape.head_bytes,
            dtype=DTYPE,
        )


def copy_by_cells(route: Route, src: Pool, dst: Pool, tables: tuple[Words, Words], tokens: tuple[int, int]) -> None:
    """Execute a route cell by cell, as an oracle. Page tables hold the pages from token 0."""

    def cell(pool: Pool, pages: Words, key: RegionKey, token: int, head: int) -> NDArray[np.uint8]:
        block, offset = divmod(token, pool.shape.page_size)
        return pool.cell(key.tensor, key.layer, int(pages[block]), offset, head)

    for region_slice in route.slices:
        for token, head in itertools.product(range(*tokens), range(*region_slice.heads)):
            source = cell(src, tables[0], region_slice.key, token, head)
            cell(dst, tables[1], region_slice.key, token, head)[:] = source


def execute(descriptors: Descriptors, src: Pool, dst: Pool) -> None:
    """Execute descriptors on real memory."""
    for (source, length, _), (target, target_length, _) in zip(
        descriptors.src.tolist(), descriptors.dst.tolist(), strict=True
    ):
        assert length == target_length > 0
        ctypes.memmove(dst.real_address(target), src.real_address(source), length)
