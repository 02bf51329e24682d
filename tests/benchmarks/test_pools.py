"""Pools with a distinct value in every cell."""

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from benchmarks.pool_memory import CudaMemory
from benchmarks.pools import PagePool, PoolShape, page_tables

SHAPE = PoolShape(layers=2, heads=(0, 4), head_bytes=16, page_size=4)


def test_pages_hold_what_was_written_wherever_it_lies() -> None:
    pool = PagePool(SHAPE, 9)
    pool.write([7, 2], 100)
    assert pool.holds([7, 2], 100)
    assert pool.holds([2], 104)
    assert not pool.holds([2, 7], 100)
    assert not pool.holds([7], 101)


def test_pages_can_have_tokens_that_do_not_follow_each_other() -> None:
    pool = PagePool(SHAPE, 9)
    pool.fill()
    assert pool.holds([5, 1], np.array([20, 4]))
    pool.write([0, 1], np.array([4, 400]))
    assert pool.holds([5, 0, 1], np.array([20, 4, 400]))


@pytest.mark.parametrize("tensor", [0, 3])
@pytest.mark.parametrize("byte", [0, 15])
def test_one_wrong_byte_is_found(tensor: int, byte: int) -> None:
    pool = PagePool(SHAPE, 9)
    pool.fill()
    pool.cells(np.uint8)[tensor, 8, 3, 2, byte] ^= 1
    assert pool.holds(range(8), 0)
    assert not pool.holds(range(9), 0)


@pytest.mark.parametrize(
    "other", [replace(SHAPE, is_head_major=True), replace(SHAPE, page_size=8), replace(SHAPE, heads=(1, 3))]
)
def test_cells_are_the_same_whatever_the_shape(other: PoolShape) -> None:
    pools = PagePool(SHAPE, 4), PagePool(other, 16 // other.page_size)
    for pool in pools:
        pool.fill()
    ours, theirs = (pool.cells().reshape(4, 16, -1, 2) for pool in pools)
    np.testing.assert_array_equal(ours[:, :, slice(*other.heads)], theirs)


def test_no_two_words_are_equal() -> None:
    pool = PagePool(replace(SHAPE, layers=3), 50)
    pool.fill()
    words = pool.cells().ravel()
    assert len(np.unique(words)) == len(words)
    assert words.all()


def test_only_wiped_pages_are_wiped() -> None:
    pool = PagePool(SHAPE, 4)
    pool.fill()
    pool.wipe([1, 3])
    assert pool.is_wiped([3, 1])
    assert not pool.is_wiped([1, 2])
    assert pool.holds([0], 0)
    pool.wipe()
    assert pool.is_wiped(range(4))


@pytest.mark.parametrize("is_head_major", [False, True])
def test_layout_says_where_cells_are(*, is_head_major: bool) -> None:
    pool = PagePool(replace(SHAPE, heads=(2, 5), is_head_major=is_head_major), 4)
    pool.fill()
    (component,) = pool.layout.components
    assert [(region.tensor, region.layer) for region in component.regions] == [("k", 0), ("v", 0), ("k", 1), ("v", 1)]
    region = component.regions[2]
    start = region.address - pool.range.address + 3 * region.slot_stride + region.token_stride + 2 * region.head_stride
    cell = pool.memory[start : start + region.head_bytes].view(np.uint64)
    np.testing.assert_array_equal(cell, pool.cells()[2, 3, 1, 2])


def test_tensors_do_not_touch() -> None:
    regions = PagePool(SHAPE, 4).layout.components[0].regions
    for region, following in itertools.pairwise(regions):
        assert region.end < following.address


def test_bytes_of_a_device_are_those_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a tensor beside the copy of the host."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, *, dtype, device: zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = PagePool(SHAPE, 4, allocate=CudaMemory)
    assert isinstance(pool.place, CudaMemory)
    tensor = pool.place.tensor
    assert pool.layout.location == ("VRAM", 0)
    assert pool.range.address == tensor.data_ptr() != pool.memory.ctypes.data
    pool.fill()
    assert tensor.numpy().tobytes() == pool.memory.tobytes()
    tensor[0] += 1
    assert not pool.holds(range(4), 0)
    for change in (pool.wipe, lambda pages: pool.write(pages, 0)):
        tensor[0] += 1
        before = int(tensor[0])
        change([1])
        assert int(tensor[0]) == before
    pool.wipe([1])
    tensor[SHAPE.page_bytes] = 1
    assert not pool.is_wiped([1])


@pytest.mark.parametrize("seed", [None, 3, (1, 2)])
def test_page_tables_share_no_page(seed: object) -> None:
    tables = page_tables(20, 3, 6, seed)
    assert tables.shape == (3, 6)
    assert len(np.unique(tables)) == 18
    assert tables.max() < 20
    np.testing.assert_array_equal(tables, page_tables(20, 3, 6, seed))
