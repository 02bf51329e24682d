"""Copying the runs of a packed payload from the pages of a rank into a staging slot, or back.

A `Copier` copies one kind of memory, and allocates staging memory of that kind.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvflow.errors import PlanError
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, RegionKey
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.pack import PackedRuns, PackedSlices, Payload, find_runs
from kvflow.geometry.pages import PageTable

__all__ = ["Allocation", "Copier", "PackWork"]


class Allocation(NamedTuple):
    """Allocated memory of a copier's kind.

    Attributes:
        address: Address of the first byte.
        owner: Object that keeps the memory alive.
    """

    address: int
    owner: object


class Copier(abc.ABC):
    """An allocator and copier of one kind of memory. May be called in any thread.

    Attributes:
        waits_for_device: Whether copying waits for a device, so that it must not run on the event loop.
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
        """Return the start addresses of a layout's regions in this process.

        Args:
            layout: Layout of memory of this kind.
            view: Returns host memory as this process maps it.
        """

    @abc.abstractmethod
    def copy(self, runs: Sequence[PackedRuns], slot: MemoryRange, *, gather: bool) -> None:
        """Copy runs between the memory that they name and a staging slot. The copy is complete on return.

        Args:
            runs: Runs at addresses in this process, from `pack`.
            slot: Slot in this process; the payload starts at its first byte and fits.
            gather: Copy from memory into the slot; otherwise from the slot into memory.

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
        slot: Staging slot in this process.
        copier: Copier for the memory of pages and slot.
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
