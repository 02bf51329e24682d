"""Copies the runs of a packed payload: from the pages of this rank into a staging slot, or the other way.

Both directions are the same copy, by addresses: an array whose elements are as long as the runs and begin at every byte
lets numpy fetch and store any of them at memory speed. Blocks stay in the processor's cache between the two.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, MemoryRange
from kvflow.geometry.pack import PackedPieces, PackedRuns, Payload, find_pieces, pack
from kvflow.geometry.pages import PageTable
from kvflow.geometry.routes import RoutePiece

__all__ = ["HostMemory", "PackWork", "copy_runs"]

BLOCK_BYTES: Final = 2**18
"""Copied at once: stays in the processor's second cache."""


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


class HostMemory:
    """The pages of this rank, for packing.

    Args:
        layout: What lies where.
        view: Lets it be read and written.
    """

    def __init__(self, layout: KVLayout, view: View) -> None:
        self._layout = layout
        self._bases = {
            key: int(view(MemoryRange(region.address, region.span)).ctypes.data)
            for key, region in layout.regions().items()
        }

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
    """

    payload: Payload
    pieces: Mapping[str, PackedPieces]
    tables: Mapping[str, PageTable]
    slot: MemoryRange

    def gather(self, num_bytes: int) -> None:
        """Pack `num_bytes` from the pages into the slot.

        Raises:
            PlanError: Tables do not reach over the tokens, or the payload has another size or does not fit.
        """
        self._copy(num_bytes, gather=True)

    def scatter(self, num_bytes: int) -> None:
        """Unpack `num_bytes` from the slot into the pages; errors as in `gather`, and then nothing was written."""
        self._copy(num_bytes, gather=False)

    def _copy(self, num_bytes: int, *, gather: bool) -> None:
        runs, total = pack(self.payload, self.pieces, self.tables)
        if total != num_bytes or total > self.slot.length:
            raise PlanError("payload has another size", found=total, expected=num_bytes, slot_bytes=self.slot.length)
        copy_runs(runs, self.slot, gather=gather)
