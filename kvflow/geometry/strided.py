"""The memory of a torch tensor or numpy array: where its elements are, which is all that a layout needs.

This module only calls methods of tensors, so it imports torch for type checking only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import LayoutError
from kvflow.geometry.memory import Location, MemoryRange

if TYPE_CHECKING:
    import torch

    Pool = torch.Tensor | NDArray[Any]

__all__ = ["Strided", "strided"]


class Strided(NamedTuple):
    """A view of memory with a shape.

    Attributes:
        address: Address of the first element; 0 if there is no memory (no elements, or torch's device "meta").
        shape: Entries along each dimension.
        strides: Bytes from one entry to the next along each dimension; numpy's may be negative.
        item_bytes: Bytes of an element.
        dtype: Name of the element type as in torch ("bfloat16").
        device: Type and number, ("cuda", 1); ("cpu", 0) is host memory.
        storage: All memory of the storage that this views.
        owner: The torch storage or the array that keeps the memory alive, even if its tensor gets another one.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    dtype: str
    device: tuple[str, int]
    storage: MemoryRange
    owner: object

    @property
    def location(self) -> Location:
        """Memory location, in the terms of transports."""
        kind, number = self.device
        return Location("DRAM", 0) if kind == "cpu" else Location("VRAM", number)

    def unbind(self, dimension: int) -> list[Strided]:
        """Return one view for each entry of a dimension, without that dimension."""
        shape = self.shape[:dimension] + self.shape[dimension + 1 :]
        strides = self.strides[:dimension] + self.strides[dimension + 1 :]
        starts = [self.address + entry * self.strides[dimension] for entry in range(self.shape[dimension])]
        return [self._replace(address=start, shape=shape, strides=strides) for start in starts]

    def split(self, dimension: int, sizes: Sequence[int]) -> Strided:
        """Return a view with one dimension split into several, outermost first; `sizes` multiply to its size."""
        inner = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
        strides = [self.strides[dimension] * count for count in inner]
        return self._replace(
            shape=(*self.shape[:dimension], *sizes, *self.shape[dimension + 1 :]),
            strides=(*self.strides[:dimension], *strides, *self.strides[dimension + 1 :]),
        )


def strided(pool: Pool) -> Strided:
    """Describe the memory of a tensor or an array.

    Raises:
        LayoutError: The pool is neither, is a tensor without memory of its own, or is an array that is read-only, or
            whose elements are objects or not in native byte order.
    """
    if isinstance(pool, np.ndarray):
        return _of_array(pool)
    if not hasattr(pool, "data_ptr"):
        raise LayoutError("pool must be a torch tensor or a numpy array", field="tensors", found=type(pool).__name__)
    try:
        address, storage, strides = pool.data_ptr(), pool.untyped_storage(), pool.stride()
        start = storage.data_ptr()
    except RuntimeError as error:  # raised by torch for sparse and for fake tensors
        facts = {"found": str(pool.device), "detail": str(error)}
        raise LayoutError("tensor has no strided memory of its own", field="tensors", **facts) from error
    item_bytes = pool.element_size()
    return Strided(
        address=address if start else 0,  # a view of a tensor of "meta" has its offset for an address
        shape=tuple(pool.shape),
        strides=tuple(step * item_bytes for step in strides),
        item_bytes=item_bytes,
        dtype=str(pool.dtype).removeprefix("torch."),
        device=(pool.device.type, pool.device.index or 0),
        storage=MemoryRange(start, storage.nbytes()),
        owner=storage,
    )


def _of_array(array: NDArray[Any]) -> Strided:
    if not array.flags.writeable:  # peers may write to it, which crashes for a read-only file mapping
        raise LayoutError("array is read-only", field="tensors", found=tuple(array.shape))
    if array.dtype.hasobject or not array.dtype.isnative:
        raise LayoutError("array dtype must be numeric and in native byte order", field="dtype", found=str(array.dtype))
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return Strided(
        address=array.ctypes.data if array.size else 0,
        shape=array.shape,
        strides=array.strides,
        item_bytes=array.itemsize,
        dtype=array.dtype.name,
        device=("cpu", 0),
        storage=_extent(owner),
        owner=owner,
    )


def _extent(array: NDArray[Any]) -> MemoryRange:
    """Return the range from the first to the last byte of an array."""
    reaches = [(count - 1) * step for count, step in zip(array.shape, array.strides, strict=True)]
    below, above = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    return MemoryRange(array.ctypes.data + below, above - below + array.itemsize)
