"""Copies the runs of a packed payload: from the pages of this rank into a staging slot, or the other way.

How that is done depends on the kind of memory, and so does how staging memory is got; a `Copier` knows it. For host
memory, both directions are the same copy, by addresses: an array whose elements are as long as the runs and begin at
every byte lets numpy fetch and store any of them at memory speed. Blocks stay in the processor's cache between the two.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.errors import PlanError
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, MemoryRange, RegionKey
from kvflow.geometry.pack import PackedPieces, PackedRuns, Payload, find_pieces, pack
from kvflow.geometry.pages import PageTable
from kvflow.geometry.routes import RoutePiece

__all__ = ["Allocation", "Copier", "HostCopier", "PackWork", "PageMemory", "copy_runs"]

BLOCK_BYTES: Final = 2**18
"""Copied at once: stays in the processor's second cache."""

BYTES_GATHERED_INLINE: Final = 2**18
"""More than this of host memory is gathered beside the event loop."""


class _Addressed:
    """Memory from an address on, for numpy: elements of some length that begin at every byte."""

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


def copy_runs(runs: Sequence[PackedRuns], slot: MemoryRange, *, gather: bool) -> None:
    """Copy runs between the memory that they name and a staging slot. May be called in any thread.

    Args:
        runs: At real addresses, from `pack`.
        slot: Real memory; the payload begins at its first byte and fits.
        gather: From memory into the slot, else from the slot into memory.
    """
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


class Allocation(NamedTuple):
    """Memory of a copier's kind.

    Attributes:
        address: Of the first byte.
        owner: Keeps it.
    """

    address: int
    owner: object


class Copier(abc.ABC):
    """Gets and copies memory of one kind. May be called in any thread."""

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

    @abc.abstractmethod
    def effort(self, num_bytes: int, most: int) -> int:
        """What gathering takes of a turn of the event loop.

        Args:
            num_bytes: To be gathered.
            most: What a turn has; if the answer is more, it is gathered beside the event loop.
        """


class HostCopier(Copier):
    """Host memory, by numpy."""

    @override
    def allocate(self, num_bytes: int) -> Allocation:
        memory = np.zeros(num_bytes, np.uint8)
        return Allocation(int(memory.ctypes.data), memory)

    @override
    def bases(self, layout: KVLayout, view: View) -> Mapping[RegionKey, int]:
        return {
            key: int(view(MemoryRange(region.address, region.span)).ctypes.data)
            for key, region in layout.regions().items()
        }

    @override
    def copy(self, runs: Sequence[PackedRuns], slot: MemoryRange, *, gather: bool) -> None:
        copy_runs(runs, slot, gather=gather)

    @override
    def effort(self, num_bytes: int, most: int) -> int:
        return num_bytes * most // BYTES_GATHERED_INLINE


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

    def find(self, pieces: Sequence[RoutePiece]) -> dict[str, PackedPieces]:
        """Find the pieces of a route here, at real addresses; to be kept for as long as the peer is known.

        Raises:
            PlanError: The route has a piece that this rank does not have.
        """
        return find_pieces(pieces, self._layout, self._bases)


class PackWork(msgspec.Struct, frozen=True):
    """A payload to be gathered or scattered; that may be done in any thread.

    Attributes:
        payload: The same on both sides.
        pieces: Of the route between the two, on this side, at real addresses.
        tables: This rank's pages, by component.
        slot: Real memory.
        copier: Of the kind of memory that pages and slot are.
    """

    payload: Payload
    pieces: Mapping[str, PackedPieces]
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
        runs, total = pack(self.payload, self.pieces, self.tables)
        if total != num_bytes or total > self.slot.length:
            raise PlanError("payload has another size", found=total, expected=num_bytes, slot_bytes=self.slot.length)
        self.copier.copy(runs, self.slot, gather=gather)
