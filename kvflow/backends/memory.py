"""A transport inside one process: it copies memory, and needs no hardware.

An engine integration can be tested with it, without any other transport. Both ends must be in one process, on one event
loop or on several in different threads. Copying is done in turns on the writer's event loop.
"""

import asyncio
import ctypes
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends.base import Backend, Capabilities, NoticeArrived, OnBroken, OnEvents, PostEnded
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory, check_memory_kinds, check_unregistered
from kvflow.errors import BackendError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.plan import Descriptors

__all__ = ["MemoryBackend"]

BYTES_PER_TURN: Final = 4 * 2**20
"""Bytes copied in one turn of the event loop."""

MAX_WAITING: Final = 1_000_000
"""Maximum number of undelivered events; beyond it, notices are dropped, as with a full receive queue."""

ENDPOINTS: "Final[dict[str, MemoryBackend]]" = {}
"""The open endpoints of this process, which can all reach each other."""


@dataclass
class MemoryWrite:
    """What is left of a post."""

    post_id: int
    peer: str
    descriptors: deque[list[int]]
    notice: bytes


class MemoryBackend(Backend):
    """A transport that copies memory within the process."""

    name = "memory"
    capabilities = Capabilities(
        in_band_notices=True, memory_kinds=frozenset({"DRAM"}), ends_with_process=True, descriptor_overhead_s=1e-6
    )

    def __init__(self) -> None:
        self._agent_name = ""
        self._memory: RegisteredMemory | None = None
        self._peers: dict[str, PeerMetadata] = {}
        self._writes: deque[MemoryWrite] = deque()
        self._delivery: EventDelivery | None = None  # None unless open
        self._has_turn = False

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        self._loop = asyncio.get_running_loop()
        self._agent_name = agent_name
        self._delivery = EventDelivery(on_events, on_broken)
        ENDPOINTS[agent_name] = self

    @override
    async def register(self, layout: KVLayout) -> None:
        check_memory_kinds(layout, self.capabilities.memory_kinds, self.name)
        check_unregistered(self._memory, self.name)
        self._memory = RegisteredMemory.from_layout(layout)

    @override
    async def extend(self, layout: KVLayout) -> None:
        check_memory_kinds(layout, self.capabilities.memory_kinds, self.name)
        if self._memory is not None:
            self._memory = self._memory.also(RegisteredMemory.from_layout(layout).without(self._memory))

    @override
    def metadata(self) -> bytes:
        return PeerMetadata(self.name, self._agent_name.encode(), self._registered()).pack()

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        return self._registered().view(memory, self.real_address(memory.address))

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        if peer in self._peers:
            return
        theirs = PeerMetadata.unpack(metadata, backend=self.name)
        if theirs.agent != peer.encode():
            raise BackendError("peer's metadata belongs to another agent", peer=peer, agent=theirs.agent)
        target = ENDPOINTS.get(peer)
        if target is None:
            raise BackendError("peer is not in this process", peer=peer)
        if target._memory is None or not target._memory.has(theirs.memory):  # nothing later looks at the destination
            raise BackendError("peer refers to memory that it has not registered", peer=peer)
        self._peers[peer] = theirs

    @override
    async def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        if self._delivery is None or self._memory is None or peer not in self._peers:
            raise BackendError("peer is not connected", peer=peer)
        theirs = self._peers[peer].memory
        self._memory.check(descriptors.src, side="source")
        theirs.check(descriptors.dst, side="destination")
        self._memory.kind_of(descriptors.src)  # each end must have one memory kind, as in other transports
        theirs.kind_of(descriptors.dst)
        columns = np.column_stack((descriptors.src[:, 0], descriptors.dst[:, 0], descriptors.src[:, 1]))
        self._writes.append(MemoryWrite(post_id, peer, deque(columns.tolist()), notice))
        self._schedule_turn()

    @override
    def watch(self, *, active: bool) -> None:
        """Do nothing: notices arrive without polling."""

    @override
    async def aclose(self) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return
        ENDPOINTS.pop(self._agent_name, None)
        stopped, self._writes = self._writes, deque()
        delivery.deliver_soon([PostEnded(write.post_id, "stopped by closing the endpoint") for write in stopped])
        delivery.close()

    def deliver(self, notice: bytes) -> None:
        """Accept a notice from another endpoint. Can be called from any thread."""
        delivery = self._delivery
        if delivery is not None and len(delivery) < MAX_WAITING:
            delivery.deliver_soon([NoticeArrived(notice, time.monotonic())])

    def _registered(self) -> RegisteredMemory:
        if self._memory is None:
            raise BackendError("no memory has been registered yet", backend=self.name)
        return self._memory

    def _schedule_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Copy a part of one write, and deliver the resulting events."""
        self._has_turn = False
        delivery = self._delivery
        if delivery is None or not self._writes:
            return
        self._copy(delivery)
        if self._writes:
            self._schedule_turn()
        delivery.deliver()

    def _copy(self, delivery: EventDelivery) -> None:
        """Copy a part of the oldest write, and requeue the rest behind the other writes."""
        write = self._writes.popleft()
        target = ENDPOINTS.get(write.peer)
        if target is None:
            delivery.deliver_soon([PostEnded(write.post_id, "peer has left")])
            return
        left = BYTES_PER_TURN
        while write.descriptors and left > 0:
            src, dst, length = write.descriptors.popleft()
            ctypes.memmove(target.real_address(dst), self.real_address(src), length)
            left -= length
        if write.descriptors:
            self._writes.append(write)
        else:
            self._end_write(write, target, delivery)

    def _end_write(self, write: "MemoryWrite", target: "MemoryBackend", delivery: EventDelivery) -> None:
        if write.notice:
            target.deliver(write.notice)
        delivery.deliver_soon([PostEnded(write.post_id, None)])

    def real_address(self, address: int) -> int:
        """Return where a registered address really is. Another class may pretend that its memory is elsewhere."""
        return address
