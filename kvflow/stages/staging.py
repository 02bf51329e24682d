"""Staging memory of a rank, and how one job goes through it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from kvflow.backends.base import Backend
from kvflow.config import Packing, PrefillConfig, RankConfig
from kvflow.geometry.cutting import Cutting
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, MemoryRange, merge_ranges
from kvflow.geometry.pack import PackedPieces
from kvflow.geometry.plan import Descriptors
from kvflow.geometry.routes import BoundRoute, RoutePiece
from kvflow.stages.packing import Copier, HostCopier, PackWork, PageMemory
from kvflow.state.packing import pays_off, rows_to_pay_off
from kvflow.state.slots import RemoteSlots, SlotPool
from kvflow.state.staging import StagingArea
from kvflow.state.window import Cost
from kvflow.wire.messages import PeerId, Staged, StagingWindow

__all__ = [
    "NO_SLOTS",
    "LocalStaging",
    "PackPlan",
    "Slots",
    "StagingMemory",
    "local_staging",
    "slots_of",
    "staging_memory",
]

PAGE_BYTES: Final = 4096

SAMPLE_TOKENS: Final = 2**14
"""By so many tokens a route is judged."""


class StagingMemory:
    """Memory for packed pieces; it has to live as long as the transport knows it.

    Args:
        num_bytes: Size.
        copier: Of the kind of memory that it is to be, which is that of the pages.

    Attributes:
        range: Where it is.

    Raises:
        ConfigError: There is not so much of it.
    """

    def __init__(self, num_bytes: int, copier: Copier) -> None:
        self._copier = copier
        self._memory = copier.allocate(num_bytes + PAGE_BYTES)
        start = self._memory.address
        self.range = MemoryRange(start + -start % PAGE_BYTES, num_bytes)

    def pages(self, layout: KVLayout, view: View) -> PageMemory:
        """The pages of a layout, as packed pieces are gathered from them or scattered into them.

        Args:
            layout: Of the same kind of memory.
            view: Lets it be read and written, if it is host memory.
        """
        return PageMemory(layout, view, self._copier)

    def holds(self, address: int) -> bool:
        """Say whether an address is in this memory."""
        return self.range.address <= address < self.range.end

    def area(self, *, slot_bytes: int, num_slots: int) -> StagingArea:
        """Cut it into windows, on a decode rank; arguments as in `StagingArea`."""
        return StagingArea(self.range.address, self.range.length, slot_bytes=slot_bytes, num_slots=num_slots)

    def added_to(self, layout: KVLayout) -> KVLayout:
        """The layout with this memory among what is to be registered."""
        return msgspec.structs.replace(layout, allocations=merge_ranges([*layout.allocations, self.range]))


def staging_memory(config: RankConfig, layout: KVLayout) -> StagingMemory | None:
    """The staging memory of a rank; None if it wants none, or nothing here can copy its kind of memory.

    Raises:
        ConfigError: There is not so much of it.
    """
    never_packs = isinstance(config, PrefillConfig) and config.packing == "never"
    copier = _copier_of(layout) if config.staging_bytes and not never_packs else None
    return None if copier is None else StagingMemory(config.staging_bytes, copier)


def _copier_of(layout: KVLayout) -> Copier | None:
    if layout.memory_kind == "DRAM":
        return HostCopier()
    try:
        from kvflow.stages.device import DeviceCopier, find_device  # noqa: PLC0415 - torch is slow to import
    except ImportError:
        return None
    device = find_device(layout.device_id)
    return None if device is None else DeviceCopier(device)


@dataclass(frozen=True)
class Slots:
    """How packed jobs get their slots.

    Attributes:
        local: This rank's.
        remote: Gives those of a peer; None if it has none.
        wants: Says whether a job is to be packed.
    """

    local: SlotPool
    remote: Callable[[PeerId], SlotPool | None]
    wants: Callable[[PeerId, Cost], bool]


NO_SLOTS: Final = Slots(SlotPool(0), lambda _: None, lambda _, __: False)


def slots_of(staging: "LocalStaging | None", remote: RemoteSlots) -> Slots:
    """How packed jobs get their slots on a prefill rank; it has none without staging memory."""
    if staging is None:
        return NO_SLOTS
    return Slots(staging.slots, remote.pool, lambda peer, cost: staging.wants(cost, remote.window(peer)))


class LocalStaging:
    """Staging memory of a prefill rank: what is packed is gathered here.

    Args:
        memory: All of it.
        slot_bytes: Size of a slot.
        pages: Makes what knows where this rank's pages are, once there is something to pack.
        row_overhead_s: What each descriptor costs the transport.
        packing: As the settings say.

    Attributes:
        slots: Which are free.
    """

    def __init__(
        self,
        memory: MemoryRange,
        slot_bytes: int,
        pages: Callable[[], PageMemory],
        *,
        row_overhead_s: float,
        packing: Packing,
    ) -> None:
        self.slots = SlotPool(memory.length // slot_bytes)
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._pages = functools.cache(pages)
        self._row_overhead_s = row_overhead_s
        self._packing = packing

    def slot(self, number: int) -> MemoryRange:
        """One of the slots."""
        return MemoryRange(self._memory.address + number * self._slot_bytes, self._slot_bytes)

    @property
    def copier(self) -> Copier:
        """Of the kind of memory that this rank has."""
        return self._pages().copier

    def find(self, pieces: Sequence[RoutePiece]) -> Mapping[str, PackedPieces]:
        """Find the pieces of a route in this rank's pages."""
        return self._pages().find(pieces)

    def cut(self, cutting: Cutting, route: BoundRoute, window: StagingWindow) -> Cutting:
        """Say how chunks are cut: into pieces that fit a slot, if most of what goes along the route is to be packed.

        Chunks whose pages lie together need not be packed, and are cut as if there were no slots: small pieces would
        make their descriptors shorter.
        """
        most = self._most(window)
        num_bytes = sum(debt.num_bytes((0, SAMPLE_TOKENS), closing=True) for debt in route.debts.values())
        num_rows = sum(route.max_rows(name, SAMPLE_TOKENS) for name in route.debts)
        if not num_bytes or not self.pays_off(most, num_rows * most // num_bytes):
            return cutting
        at_once = cutting.layer_piece_bytes
        can_be_direct = route.pages_touch and not self.packs_always
        return cutting.within_pages(most)._replace(
            piece_bytes=min(most, cutting.piece_bytes),
            layer_piece_bytes=None if at_once is None else min(at_once, max(1, most // 2)),
            is_packed=True,
            direct=cutting if can_be_direct else None,
            direct_run_bytes=most * route.num_bases / rows_to_pay_off(most, self._row_overhead_s),
        )

    def wants(self, cost: Cost, window: StagingWindow | None) -> bool:
        """Say whether a piece is to be packed, by what is known before it is planned."""
        if window is None or not 0 < cost.num_bytes <= self._most(window):
            return False
        return self.pays_off(cost.num_bytes, cost.num_rows)

    def _most(self, window: StagingWindow) -> int:
        """Bytes that fit a slot on both sides."""
        return min(self._slot_bytes, window.slot_bytes)

    @property
    def packs_always(self) -> bool:
        """Whatever has slots is packed, whether that is quicker or not."""
        return self._packing == "always"

    def pays_off(self, num_bytes: int, num_rows: int) -> bool:
        """Say whether a piece is quicker when it is packed than in that many descriptors."""
        return pays_off(num_bytes, num_rows, self._row_overhead_s, self._packing)


def local_staging(
    memory: StagingMemory | None, config: PrefillConfig, layout: KVLayout, backend: Backend
) -> LocalStaging | None:
    """How a prefill rank packs; None if it does not."""
    if memory is None:
        return None
    return LocalStaging(
        memory.range,
        config.staging_slot_bytes,
        functools.partial(memory.pages, layout, backend.view),
        row_overhead_s=backend.capabilities.row_overhead_s,
        packing=config.packing,
    )


class PackPlan(msgspec.Struct, frozen=True):
    """How a job is packed.

    Attributes:
        work: Gathers it.
        num_bytes: What it comes to.
        target: Address of its slot at the decode rank.
        staged: The same, as its notice says it.
        staging: Of this rank.
    """

    work: PackWork
    num_bytes: int
    target: int
    staged: Staged
    staging: LocalStaging

    @property
    def is_settled(self) -> bool:
        """It is packed however few descriptors the direct way takes."""
        return self.staging.packs_always

    def pays_off(self, num_rows: int) -> bool:
        """Say whether it is quicker than so many descriptors of the direct way."""
        return self.staging.pays_off(self.num_bytes, num_rows)

    def gather(self, route: BoundRoute, max_bytes: int | None) -> Descriptors:
        """Gather it, and say how it is moved; arguments as in `plan`."""
        self.work.gather(self.num_bytes)
        step = max_bytes or self.num_bytes
        offsets = np.arange(0, self.num_bytes, step, dtype=np.uint64)
        lengths = np.minimum(np.uint64(step), np.uint64(self.num_bytes) - offsets)
        ends = ((self.work.slot.address, route.src_device), (self.target, route.dst_device))
        columns = [(offsets + np.uint64(start), lengths, np.full_like(lengths, device)) for start, device in ends]
        return Descriptors(*(np.stack(column, axis=1) for column in columns))
