"""Layouts from numpy arrays equal those of torch tensors over the same memory."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvflow import KVLayout, layout_from_tensors
from kvflow.errors import LayoutError
from kvflow.geometry import Axes
from kvflow.geometry.tensors import regions_from_tensors, split_tensors

Array = NDArray[Any]

VIEWS = {
    "NHD": (np.zeros((5, 4, 3, 8), np.float16), "page token head dim"),
    "transposed": (np.zeros((5, 3, 4, 8), np.float32).swapaxes(1, 2), "page token head dim"),
    "a part of each page": (np.zeros((5, 4, 3, 16), np.uint8)[..., 8:], "page token head dim"),
    "some of the pages": (np.zeros((9, 4, 3, 8), np.float32)[2:7], "page token head dim"),
    "several layers": (np.zeros((2, 5, 4, 3, 8), np.int8), "layer page token head dim"),
    "fused axes": (np.zeros((20, 1, 24), np.float64), "page*token 1 head*dim"),
    "no token axis": (np.zeros((5, 3, 8, 2), np.bool_), "slot head dim dim"),
}


@pytest.mark.parametrize(("array", "order"), VIEWS.values(), ids=VIEWS.keys())
def test_array_is_described_as_the_tensor_over_its_memory(array: Array, order: str) -> None:
    axes = Axes(order, (0, 3), page_size=4 if "token" in order else None)
    assert regions_from_tensors("k", [array], axes) == regions_from_tensors("k", [torch.from_numpy(array)], axes)


def describe(pools: Sequence[Array]) -> KVLayout:
    return layout_from_tensors({"k": pools}, axes="page token head dim", heads=(0, 2), fingerprint="m")


def test_bytes_lie_where_the_layout_says() -> None:
    pool = np.arange(3 * 4 * 2 * 8, dtype=np.int64).reshape(3, 4, 2, 8)
    (region,) = describe([pool]).regions().values()
    for page, token, head in itertools.product(range(3), range(4), range(2)):
        offset = page * region.slot_stride + token * region.token_stride + head * region.head_stride
        assert region.address + offset == pool[page, token, head].ctypes.data
    assert (region.head_bytes, region.dtype) == (8 * 8, "int64")


def test_views_of_one_array_are_registered_once() -> None:
    whole = np.zeros((4, 3, 4, 2, 8), np.float32)
    layout = describe([whole[layer] for layer in (3, 1)])
    (allocation,) = layout.allocations
    assert (allocation.address, allocation.end) == (whole[1].ctypes.data, whole.ctypes.data + whole.nbytes)
    assert (layout.memory_kind, layout.device_id) == ("DRAM", 0)


def test_arrays_of_their_own_are_registered_one_by_one() -> None:
    pools = [np.zeros((3, 4, 2, 8), np.float32) for _ in range(2)]
    assert {item.address for item in describe(pools).allocations} == {pool.ctypes.data for pool in pools}


def test_views_over_a_buffer_are_registered_once() -> None:
    buffer = bytearray(2 * 768)
    strides = (512, 64, 32, 4)
    pools = [np.ndarray((3, 4, 2, 8), np.float32, buffer=buffer, offset=start, strides=strides) for start in (0, 256)]
    (allocation,) = describe(pools).allocations
    assert (allocation.address, allocation.length) == (pools[0].ctypes.data, 2 * 768)


def test_layers_in_reverse_are_found_where_they_are() -> None:
    whole = np.zeros((2, 3, 4, 2, 8), np.float32)
    regions = regions_from_tensors("k", [whole[::-1]], Axes("layer page token head dim", (0, 2)))
    assert [region.address for region in regions] == [whole[1].ctypes.data, whole[0].ctypes.data]
    assert describe(list(whole[::-1])).allocations[0].length == whole.nbytes


def test_parts_of_arrays_are_views() -> None:
    state = np.zeros((3, 8, 2), np.float32)
    (q,), (k,) = split_tensors([state], (2, 6), dimension=1)
    assert (q.shape, k.shape) == ((3, 2, 2), (3, 6, 2))
    k[:] = 1.0
    assert state[:, 2:].all()
    assert not state[:, :2].any()


def read_only() -> Array:
    pool = np.zeros((3, 4, 2, 8), np.float32)
    pool.flags.writeable = False
    return pool


REFUSALS = {
    "read-only": (read_only(), "read-only"),
    "objects": (np.zeros((3, 4, 2, 8), object), "array dtype must be numeric and in native byte order"),
    "another byte order": (np.zeros((3, 4, 2, 8), ">f4"), "array dtype must be numeric and in native byte order"),
    "pages in reverse": (np.zeros((3, 4, 2, 8), np.float32)[::-1], "must not be negative"),
    "elements in reverse": (np.zeros((3, 4, 2, 8), np.float32)[..., ::-1], "contiguous"),
    "one page for all": (np.broadcast_to(np.zeros((1, 4, 2, 8)), (3, 4, 2, 8)), "read-only"),
    "no pages": (np.zeros((0, 4, 2, 8), np.float32), "no memory"),
    "a list": ([0.0], "torch tensor or a numpy array"),
}


@pytest.mark.parametrize(("pool", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_arrays_that_cannot_be_a_pool_are_refused(pool: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        describe([pool])
