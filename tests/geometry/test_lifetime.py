"""A layout made from tensors keeps their memory alive, without that being part of its value."""

import gc
import weakref

import msgspec
import numpy as np
import pytest

from kvflow.geometry.tensors import layout_from_tensors


def test_a_layout_keeps_the_array_alive_whose_views_it_was_made_from() -> None:
    pool = np.zeros((2, 8, 4, 2, 8), np.float32)
    alive = weakref.ref(pool)
    layout = layout_from_tensors(
        {"k": [pool[0]], "v": [pool[1]]}, axes="page token head dim", heads=(0, 2), fingerprint="x"
    )
    assert layout == msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=type(layout))
    del pool
    gc.collect()
    assert alive() is not None
    del layout
    gc.collect()
    assert alive() is None


def test_a_layout_keeps_the_storage_of_a_tensor_that_gets_another_one() -> None:
    torch = pytest.importorskip("torch")
    pool = torch.zeros((8, 4, 2, 8))
    storage = weakref.ref(pool.untyped_storage())
    layout = layout_from_tensors({"k": [pool]}, axes="page token head dim", heads=(0, 2), fingerprint="x")
    address = layout.allocations[0].address
    pool.set_(torch.zeros(1).untyped_storage())
    others = [torch.ones((8, 4, 2, 8)) for _ in range(8)]
    assert all(other.data_ptr() != address for other in others)
    assert storage() is not None
