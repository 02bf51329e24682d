"""Staging memory of a rank, the gathering of pieces into it on a prefill rank, and the scattering on a decode rank."""

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from kvflow.config import PrefillConfig, RankConfig
from kvflow.errors import PlanError
from kvflow.geometry.binding import BoundRoute
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryRange, merge_ranges
from kvflow.geometry.pack import PackedSlices, Payload, find_slices
from kvflow.geometry.pages import PageTable, read_page_tables
from kvflow.geometry.plan import Descriptors
from kvflow.geometry.routes import RegionSlice
from kvflow.packing.copier import Copier, HostCopier, PackWork
from kvflow.state.effects import Piece, ScatterStaged
from kvflow.state.events import ConnectedRank, ReceiveOpened
from kvflow.state.settings import LocalStagingSettings, WindowSettings
from kvflow.wire.messages import PeerId, Staged

__all__ = ["Gathering", "LocalStaging", "Scattering", "StagingMemory", "staging_memory"]

PAGE_BYTES: Final = 4096


class StagingMemory:
    """Memory for packed pieces, of the kind that the pages are in. It must live as long as the transport knows it.

    Raises:
        Shortage: There is not enough memory.
    """

    def __init__(self, num_bytes: int, copier: Copier) -> None:
        self.copier = copier
        self._memory = copier.allocate(num_bytes + PAGE_BYTES)
        start = self._memory.address
        self.range = MemoryRange(start + -start % PAGE_BYTES, num_bytes)

    def added_to(self, layout: KVLayout) -> KVLayout:
        """Return the layout with this memory added to its allocations."""
        (location,) = layout.registered_locations
        added = self.range if location == layout.location else msgspec.structs.replace(self.range, location=location)
        return msgspec.structs.replace(layout, allocations=merge_ranges([*layout.allocations, added]))

    def windows(self, *, slot_bytes: int, num_slots: int) -> WindowSettings:
        """Return the division of this memory into windows on a decode rank; arguments as in `WindowSettings`."""
        return WindowSettings(self.range.address, self.range.length, slot_bytes, num_slots)


def staging_memory(config: RankConfig, layout: KVLayout, descriptor_overhead_s: float) -> StagingMemory | None:
    """Allocate the staging memory of a rank; None if it needs none, or if its kind of memory cannot be copied.

    A rank whose memory is in several locations has none: a payload would have to be packed from all of them. If
    descriptors have no known cost, none is allocated unless configured explicitly: no route would use it.

    Raises:
        Shortage: There is not enough memory.
    """
    if isinstance(config, PrefillConfig):
        may_pack = config.packing == "always" or (config.packing == "auto" and descriptor_overhead_s > 0)
    else:  # prefill decides what to pack
        may_pack = descriptor_overhead_s > 0 or config.staging_bytes is not None
    if len(layout.registered_locations) > 1 or not may_pack:
        return None
    num_bytes = config.staging_bytes_for(is_on_host=layout.is_on_host)
    copier = _copier_for(layout) if num_bytes else None
    return None if copier is None else StagingMemory(num_bytes, copier)


def _copier_for(layout: KVLayout) -> Copier | None:
    if layout.is_on_host:
        return HostCopier()
    try:
        from kvflow.packing.device import DeviceCopier, find_device  # noqa: PLC0415 - torch is slow to import
    except ImportError:
        return None
    (location,) = layout.registered_locations
    device = find_device(location.device_id)
    return None if device is None else DeviceCopier(device)


class Gathering(msgspec.Struct, frozen=True):
    """The gathering of a piece into a slot of this rank, which may run in any thread.

    Attributes:
        target: Address of its slot at the decode rank.
        staged: The same slot, as stated in the notice.
    """

    work: PackWork
    num_bytes: int
    target: int
    staged: Staged

    def gather(self, route: BoundRoute, max_bytes: int | None) -> Descriptors:
        """Copy the piece into the slot, and return descriptors, of at most `max_bytes`, that move it from there.

        Raises:
            PlanError, MemoryError: As in `PackWork.gather`.
        """
        self.work.gather(self.num_bytes)
        step = max_bytes or self.num_bytes
        offsets = np.arange(0, self.num_bytes, step, dtype=np.uint64)
        lengths = np.minimum(np.uint64(step), np.uint64(self.num_bytes) - offsets)
        ends = ((self.work.slot.address, route.src_device), (self.target, route.dst_device))
        columns = [(offsets + np.uint64(start), lengths, np.full_like(lengths, device)) for start, device in ends]
        return Descriptors(*(np.stack(column, axis=1) for column in columns))


class LocalStaging:
    """Staging memory of a prefill rank, into which pieces are gathered."""

    def __init__(
        self,
        memory: StagingMemory,
        layout: KVLayout,
        view: View,
        config: PrefillConfig,
        descriptor_overhead_s: float,
    ) -> None:
        self.settings = LocalStagingSettings(
            num_slots=memory.range.length // config.staging_slot_bytes,
            slot_bytes=config.staging_slot_bytes,
            descriptor_overhead_s=descriptor_overhead_s,
            packing=config.packing,
            gathers_inline=not memory.copier.waits_for_device,
        )
        self._start = memory.range.address
        self._copier = memory.copier
        self._layout = layout
        self._bases = functools.cache(lambda: memory.copier.bases(layout, view))

    def find(self, slices: Sequence[RegionSlice]) -> Mapping[str, PackedSlices]:
        """Find the slices of a route in this rank's pages, at addresses in this process.

        Raises:
            PlanError: The route has a slice that this rank does not have.
        """
        return find_slices(slices, self._layout, self._bases())

    def gathering(self, piece: Piece, slices: Mapping[str, PackedSlices], *, head_major: bool) -> Gathering | None:
        """Return the gathering of a piece; None if the piece has no slots.

        `slices` are those of its route, from `find`, and `head_major` is the order of the cells in the payload.
        """
        slots, window = piece.slots, piece.link.staging
        if slots is None or window is None:
            return None
        payload = Payload(piece.link.route.expected, piece.ranges, piece.grant.ranges, head_major, piece.layers)
        slot_bytes = self.settings.slot_bytes
        slot = MemoryRange(self._start + slots.local * slot_bytes, slot_bytes)
        work = PackWork(payload, slices, piece.pages, slot, self._copier)
        return Gathering(
            work, piece.cost.num_bytes, window.slot_address(slots.remote), Staged(slots.remote, head_major)
        )


MAX_KEPT: Final = 256
"""Maximum number of ranks whose slices are cached."""


class Scattering:
    """Prepares the scattering of packed pieces on a decode rank.

    Attributes:
        tables: Page tables by generation, from the first packed piece of a transfer on.
    """

    def __init__(self, memory: StagingMemory, layout: KVLayout, view: View) -> None:
        self._layout = layout
        self._copier = memory.copier
        self._bases = functools.cache(lambda: memory.copier.bases(layout, view))
        self.tables: dict[int, Mapping[str, PageTable]] = {}
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
        self.tables.pop(generation, None)

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
        tables = self.tables.get(opened.generation)
        if tables is None:
            tables = self.tables[opened.generation] = read_page_tables(opened.ranges, opened.pages, self._layout)
        return tables
