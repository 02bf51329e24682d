"""Scattering packed pieces from the staging slots of a decode rank into its pages."""

import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from kvflow.errors import PlanError
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.pack import PackedSlices, Payload, find_slices
from kvflow.geometry.pages import PageTable, read_page_tables
from kvflow.geometry.routes import RegionSlice
from kvflow.packing.copier import PackWork
from kvflow.packing.staging import StagingMemory
from kvflow.state.effects import ScatterStaged
from kvflow.state.events import ConnectedRank, ReceiveOpened
from kvflow.wire.messages import PeerId

__all__ = ["Scattering"]

MAX_KEPT: Final = 256
"""Maximum number of ranks whose slices are cached."""


class Scattering:
    """Prepares the scattering of packed pieces on a decode rank.

    Args:
        memory: Staging memory that peers write into.
        layout: Layout of this rank.
        view: Gives access to the memory of the layout, if it is host memory.
    """

    def __init__(self, memory: StagingMemory, layout: KVLayout, view: View) -> None:
        self._layout = layout
        self._copier = memory.copier
        self._bases = functools.cache(lambda: memory.copier.bases(layout, view))
        self._tables: dict[int, Mapping[str, PageTable]] = {}
        self._slices: OrderedDict[PeerId, tuple[tuple[RegionSlice, ...], Mapping[str, PackedSlices]]] = OrderedDict()

    def work(self, effect: ScatterStaged) -> PackWork:
        """Collect what scattering the piece of a notice needs.

        Raises:
            PlanError: The notice has no staging slot, or names cells or pages that this rank does not have.
        """
        window, notice, opened = effect.rank.staging, effect.notice, effect.opened
        if window is None or notice.staged is None:
            raise PlanError("notice has no staging slot", seq=notice.seq)
        head_major = notice.staged.head_major
        payload = Payload(effect.rank.expected, notice.ranges, opened.ranges, head_major, notice.layer_range)
        slot = MemoryRange(window.slot_address(notice.staged.slot), window.slot_bytes)
        return PackWork(payload, self._slices_of(effect.rank), self._tables_of(opened), slot, self._copier)

    def drop(self, generation: int) -> None:
        """Drop the page tables of an ended transfer."""
        self._tables.pop(generation, None)

    def _slices_of(self, rank: ConnectedRank) -> Mapping[str, PackedSlices]:
        known = self._slices.get(rank.peer)
        if known is not None and known[0] == rank.slices:  # its route may have changed with other ranks of its instance
            return known[1]
        found = find_slices(rank.slices, self._layout, self._bases())
        self._slices[rank.peer] = rank.slices, found
        while len(self._slices) > MAX_KEPT:
            self._slices.popitem(last=False)
        return found

    def _tables_of(self, opened: ReceiveOpened) -> Mapping[str, PageTable]:
        tables = self._tables.get(opened.generation)
        if tables is None:
            tables = self._tables[opened.generation] = read_page_tables(opened.ranges, opened.pages, self._layout)
        return tables
