"""Copying the runs of a packed payload from the pages of a rank into a staging slot, or back.

A `Copier` copies one kind of memory, and allocates staging memory of that kind.
"""

import abc
import errno
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.errors import PlanError, Shortage
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, RegionKey
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.pack import PackedRuns, PackedSlices, Payload, find_runs
from kvflow.geometry.pages import PageTable
from kvflow.resources import describe_shortage

__all__ = ["Allocation", "Copier", "HostCopier", "PackWork"]


class Allocation(NamedTuple):
    """Allocated memory of a copier's kind; `owner` keeps it alive."""

    address: int
    owner: object


class Copier(abc.ABC):
    """An allocator and copier of one kind of memory. May be called in any thread.

    If it `waits_for_device`, copying must not run on the event loop.
    """

    waits_for_device: bool = False

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> Allocation:
        """Allocate memory to which no earlier owner still writes.

        Raises:
            Shortage: There is not enough memory.
        """

    @abc.abstractmethod
    def bases(self, layout: KVLayout, view: View) -> Mapping[RegionKey, int]:
        """Return where a layout's regions start in this process; `view` returns host memory as mapped here."""

    @abc.abstractmethod
    def copy(self, runs: Sequence[PackedRuns], slot: MemoryRange, *, gather: bool) -> None:
        """Copy runs, at addresses in this process, between memory and a staging slot. The copy is complete on return.

        The payload starts at the first byte of the slot, and fits. If `gather`, copy from memory into the slot;
        otherwise from the slot into memory.

        Raises:
            PlanError: The memory does not match the layout.
            MemoryError: There is not enough temporary memory. A part may have been copied.
        """


class PackWork(msgspec.Struct, frozen=True):
    """A payload to gather or scatter. Both may run in any thread.

    Attributes:
        payload: The same on both sides.
        slices: This side's slices of the route, at addresses in this process.
        tables: Pages of this rank, by component.
    """

    payload: Payload
    slices: Mapping[str, PackedSlices]
    tables: Mapping[str, PageTable]
    slot: MemoryRange
    copier: Copier

    def gather(self, num_bytes: int) -> None:
        """Pack `num_bytes` from the pages into the slot.

        Raises:
            PlanError: Tables do not cover the tokens, the payload has another size or does not fit, or the memory does
                not match the layout.
            MemoryError: There is not enough temporary memory. A part may have been copied.
        """
        self._copy(num_bytes, gather=True)

    def scatter(self, num_bytes: int) -> None:
        """Unpack `num_bytes` from the slot into the pages; errors as in `gather`."""
        self._copy(num_bytes, gather=False)

    def _copy(self, num_bytes: int, *, gather: bool) -> None:
        runs, total = find_runs(self.payload, self.slices, self.tables)
        if total != num_bytes or total > self.slot.length:
            raise PlanError("payload has the wrong size", found=total, expected=num_bytes, slot_bytes=self.slot.length)
        self.copier.copy(runs, self.slot, gather=gather)


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
    """A copier for host memory, with numpy.

    Both directions use the same technique: an array whose elements are as long as the runs, and start at every byte,
    lets numpy load and store any run at memory speed. Blocks stay in the processor's cache in between.
    """

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
