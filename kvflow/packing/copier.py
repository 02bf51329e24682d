"""Copies the runs of a packed payload: from the pages of a rank into a staging slot, or the other way.

How that is done depends on the kind of memory, and so does how staging memory is got; a `Copier` knows it.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvflow.errors import PlanError
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, MemoryRange, RegionKey
from kvflow.geometry.pack import PackedRuns, PackedSlices, Payload, find_runs, find_slices
from kvflow.geometry.pages import PageTable
from kvflow.geometry.routes import RegionSlice

__all__ = ["Allocation", "Copier", "PackWork", "PageMemory"]


class Allocation(NamedTuple):
    """Memory of a copier's kind.

    Attributes:
        address: Of the first byte.
        owner: Keeps it.
    """

    address: int
    owner: object


class Copier(abc.ABC):
    """Gets and copies memory of one kind. May be called in any thread.

    Attributes:
        waits_for_device: Copying waits for a device, so that it has no place on the event loop.
    """

    waits_for_device: bool = False

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> Allocation:
        """Get memory that nothing is written to any more by who had it before.

        Raises:
            ConfigError: There is not so much of it.
        """

    @abc.abstractmethod
    def bases(self, layout: KVLayout, view: View) -> Mapping[RegionKey, int]:
        """Where the regions of a layout really begin.

        Args:
            layout: Of memory of this kind.
            view: Gives host memory, as this process sees it.
        """

    @abc.abstractmethod
    def copy(self, runs: Sequence[PackedRuns], slot: MemoryRange, *, gather: bool) -> None:
        """Copy runs between the memory that they name and a staging slot. It is done when this returns.

        Args:
            runs: At real addresses, from `pack`.
            slot: Real memory; the payload begins at its first byte and fits.
            gather: From memory into the slot, else from the slot into memory.

        Raises:
            PlanError: The memory is not what the layout says.
            MemoryError: There is no memory left to do it with. A part may have been copied.
        """


class PageMemory:
    """The pages of this rank, for packing.

    Args:
        layout: What lies where.
        view: Lets it be read and written, if it is host memory.
        copier: Of its kind of memory.
    """

    def __init__(self, layout: KVLayout, view: View, copier: Copier) -> None:
        self.copier = copier
        self._layout = layout
        self._bases = copier.bases(layout, view)

    def find(self, slices: Sequence[RegionSlice]) -> dict[str, PackedSlices]:
        """Find the slices of a route here, at real addresses; to be kept for as long as the peer is known.

        Raises:
            PlanError: The route has a region slice that this rank does not have.
        """
        return find_slices(slices, self._layout, self._bases)


class PackWork(msgspec.Struct, frozen=True):
    """A payload to be gathered or scattered; that may be done in any thread.

    Attributes:
        payload: The same on both sides.
        slices: Of the route between the two, on this side, at real addresses.
        tables: This rank's pages, by component.
        slot: Real memory.
        copier: Of the kind of memory that pages and slot are.
    """

    payload: Payload
    slices: Mapping[str, PackedSlices]
    tables: Mapping[str, PageTable]
    slot: MemoryRange
    copier: Copier

    def gather(self, num_bytes: int) -> None:
        """Pack `num_bytes` from the pages into the slot.

        Raises:
            PlanError: Tables do not reach over the tokens, the payload has another size or does not fit, or the memory
                is not what the layout says.
            MemoryError: There is no memory left to do it with. A part may have been copied.
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
