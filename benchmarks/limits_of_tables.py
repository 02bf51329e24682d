"""Limits of tables that a benchmark cannot fill from outside in reasonable time: the table alone, without sockets."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, cast

import anyio.lowlevel
import numpy as np

import kvflow
from kvflow.config import MAX_SLOTS_PER_PEER
from kvflow.directory.service import seal
from kvflow.directory.table import RegistryTable
from kvflow.gate.shares import MAX_RANKS
from kvflow.geometry import KVLayout
from kvflow.state.events import DeliveryId
from kvflow.state.prefill.delivery import Delivery
from kvflow.state.prefill.peers import DecodePeers
from kvflow.state.prefill.slots import SlotPool
from kvflow.state.prefill.unfenced import UNFENCED_SHARE, UnfencedDeliveries
from kvflow.state.quarantine import Footprint, Quarantine
from kvflow.state.timers import Timers
from kvflow.wire.messages import PeerId, RankId, RankRecord

__all__ = ["MAX_RANKS", "MAX_SLOTS_PER_PEER", "use_quarantine", "use_registry", "use_slots", "use_unfenced"]

CELL_BYTES: Final = 8
RANKS_AT_ONCE: Final = 16
"""Ranks that are registered in one turn of the event loop."""

Act = Callable[[], Awaitable[None]]


def _record(number: int, layout: KVLayout) -> RankRecord:
    peer = PeerId(RankId(f"prefill{number}", 0), 1)
    return RankRecord(peer=peer, num_ranks=1, endpoint="tcp://10.0.0.1:1", backend="memory", layout=layout)


@asynccontextmanager
async def use_registry(n: int) -> AsyncGenerator[Act]:
    """Register ranks, each an instance of its own, renew them, and look each up."""
    pool = np.zeros((1, 1, 1, CELL_BYTES), np.uint8)
    layout = kvflow.layout_from_tensors({"k": [pool]}, axes="page token head dim", heads=(0, 1), fingerprint="limits")
    records = [seal(_record(number, layout)) for number in range(n)]

    async def act() -> None:
        table = RegistryTable()
        for number, record in enumerate(records * 2):
            connection, now = number.to_bytes(4, "little"), number * 1e-4
            if not table.has_place(record):
                raise RuntimeError(f"the registry is full at {number} ranks")
            table.register(record, 60.0, connection, now)
            table.lookup(record.peer.rank.instance, 60.0, connection, now)
            if not number % RANKS_AT_ONCE:
                await anyio.lowlevel.checkpoint()
        for number, record in enumerate(records):
            table.unregister(record.peer)
            if not number % RANKS_AT_ONCE:
                await anyio.lowlevel.checkpoint()

    yield act


@asynccontextmanager
async def use_quarantine(n: int) -> AsyncGenerator[Act]:
    """Put rooms of one page into quarantine, ask for admission after each, and release them."""

    async def act() -> None:
        quarantine = Quarantine((n + 1) * CELL_BYTES)
        for room in range(n):
            quarantine.add_pages(room, Footprint(1, CELL_BYTES))
            quarantine.check_admission()
            await anyio.lowlevel.checkpoint()
        for room in range(n):
            quarantine.remove(room)
            await anyio.lowlevel.checkpoint()

    yield act


@asynccontextmanager
async def use_slots(n: int) -> AsyncGenerator[Act]:
    """Take all slots of a window, lose them, and get them back."""

    async def act() -> None:
        pool = SlotPool(n)
        taken = [pool.take_slot() for _ in range(n)]
        for slot in taken:
            pool.lose(slot)
            await anyio.lowlevel.checkpoint()
        for slot in taken:
            pool.give_back(slot)
            await anyio.lowlevel.checkpoint()

    yield act


class _Ended(NamedTuple):
    """An ended delivery of which nothing can land any more once it is settled."""

    id: DeliveryId
    is_fenced: bool = True

    def forget_pages(self) -> None:
        """Do nothing: it has no pages."""


@asynccontextmanager
async def use_unfenced(n: int) -> AsyncGenerator[Act]:
    """Keep what may still land at ranks that are gone, ask for places, settle half, and forget the ranks."""

    async def act() -> None:
        ranks = [PeerId(RankId(f"decode{number}", 0), 1) for number in range(UNFENCED_SHARE)]
        peers = DecodePeers(Timers(), len(ranks))
        unfenced = UnfencedDeliveries(peers, n)
        ended = [cast("Delivery", _Ended(DeliveryId(room, ranks[room % len(ranks)], 1))) for room in range(n)]
        for delivery in ended:
            unfenced.add(delivery)
            unfenced.excess(delivery.id.peer)
            await anyio.lowlevel.checkpoint()
        for delivery in list(unfenced)[: n // 2]:
            unfenced.settle(delivery, [])
            await anyio.lowlevel.checkpoint()
        for rank in ranks:
            unfenced.forget_peer(rank)
            await anyio.lowlevel.checkpoint()

    yield act
