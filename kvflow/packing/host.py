"""Copying the runs of a packed payload in host memory, with numpy.

Both directions use the same technique: an array whose elements are as long as the runs, and start at every byte, lets
numpy load and store any run at memory speed. Blocks stay in the processor's cache in between.
"""

import errno
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.errors import Shortage
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, RegionKey
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.pack import PackedRuns
from kvflow.packing.copier import Allocation, Copier
from kvflow.resources import describe_shortage

__all__ = ["HostCopier"]

BLOCK_BYTES: Final = 2**18
"""Bytes copied at once; a block stays in the L2 cache."""


class _Addressed:
    """Memory at an address, for numpy: elements of one length that start at every byte."""

    def __init__(self, address: int, num_bytes: int, length: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (num_bytes - length + 1,),
            "strides": (1,),
            "typestr": f"|V{length}",
        }


def _elements(address: int, num_bytes: int, length: int) -> NDArray[np.void]:
    return np.asarray(_Addressed(address, num_bytes, length))


class HostCopier(Copier):
    """A copier for host memory, with numpy."""

    @override
    def allocate(self, num_bytes: int) -> Allocation:
        try:
            memory = np.zeros(num_bytes, np.uint8)
        except MemoryError as error:
            detail = describe_shortage(errno.ENOMEM)
            raise Shortage(
                "host has not enough memory for staging_bytes", num_bytes=num_bytes, detail=detail
            ) from error
        return Allocation(int(memory.ctypes.data), memory)

    @override
    def bases(self, layout: KVLayout, view: View) -> Mapping[RegionKey, int]:
        return {
            key: int(view(MemoryRange(region.address, region.span)).ctypes.data)
            for key, region in layout.regions().items()
        }

    @override
    def copy(self, runs: Sequence[PackedRuns], slot: MemoryRange, *, gather: bool) -> None:
        for group in runs:
            first = int(group.memory.min())
            span = int(group.memory.max()) - first + group.length
            memory = _elements(first, span, group.length)
            payload = _elements(slot.address, slot.length, group.length)
            at = (group.memory - np.uint64(first)).astype(np.intp)
            places = group.payload.astype(np.intp)
            step = max(1, BLOCK_BYTES // group.length)
            for start in range(0, len(at), step):
                block = slice(start, start + step)
                if gather:
                    payload[places[block]] = memory[at[block]]
                else:
                    memory[at[block]] = payload[places[block]]
