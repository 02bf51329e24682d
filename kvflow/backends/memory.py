"""A transport inside one process: it copies memory, needs no hardware, and can inject faults.

It covers everything that a transport can do, including in-band notices and posts in doubt, so an engine integration can
be tested without any other transport. Both ends must be in one process, on one event loop or on several in different
threads. Copying is done in turns on the writer's event loop.
"""

import asyncio
import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends.base import Backend, Capabilities, NoticeArrived, OnBroken, OnEvents, PostEnded, PostInDoubt
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.host import host_view
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory, check_memory_kinds, check_unregistered
from kvflow.errors import BackendError
from kvflow.geometry.layout import KVLayout, MemoryRange
from kvflow.geometry.plan import Descriptors

__all__ = ["Fabric", "FaultScript", "MappedRange", "MemoryBackend"]

BYTES_PER_TURN: Final = 4 * 2**20
"""Bytes copied in one turn of the event loop."""

MAX_WAITING: Final = 1_000_000
"""Maximum number of undelivered events; beyond it, notices are dropped, as with a full receive queue."""

Fault = Literal["fail", "doubt", "lose_notice", "corrupt"]
"""The post fails, stays in doubt, loses its notice, or corrupts the first byte that it writes."""


@dataclass(frozen=True)
class MappedRange:
    """Mapping of `length` bytes of real memory at `real` to another address, for example one with bit 63 set."""

    address: int
    length: int
    real: int


class FaultScript:
    """Faults to inject, post by post; shared by a test and the backend under test.

    Attributes:
        plan: Faults for the next posts, in order; None for a post that works.
        posted: Posts that were started, in order, as (peer, number of bytes).
    """

    def __init__(self, plan: Iterable[Fault | None] = ()) -> None:
        self.plan: deque[Fault | None] = deque(plan)
        self.posted: list[tuple[str, int]] = []
        self.is_holding = False
        self._wake: list[Callable[[], None]] = []

    def hold(self) -> None:
        """Let posts start, but copy nothing until `release`."""
        self.is_holding = True

    def release(self) -> None:
        """Copy the held posts. Can be called from any thread."""
        self.is_holding = False
        for wake in self._wake:
            wake()

    def attach(self, wake: Callable[[], None]) -> None:
        """Register a function that `release` calls."""
        self._wake.append(wake)

    def next(self, peer: str, num_bytes: int) -> Fault | None:
        """Record a post, and return the fault to inject into it."""
        self.posted.append((peer, num_bytes))
        return self.plan.popleft() if self.plan else None


class Fabric:
    """A set of endpoints that can reach each other."""

    def __init__(self) -> None:
        self._endpoints: dict[str, MemoryBackend] = {}
        self._lock = threading.Lock()

    def join(self, name: str, endpoint: "MemoryBackend") -> None:
        """Make an endpoint reachable."""
        with self._lock:
            self._endpoints[name] = endpoint

    def leave(self, name: str) -> None:
        """Make an endpoint unreachable."""
        with self._lock:
            self._endpoints.pop(name, None)

    def find(self, name: str) -> "MemoryBackend | None":
        """Return the endpoint with this name, or None if it is not reachable."""
        with self._lock:
            return self._endpoints.get(name)


DEFAULT_FABRIC: Final = Fabric()


@dataclass
class _Write:
    post_id: int
    peer: str
    descriptors: deque[list[int]]
    first_byte: int
    notice: bytes
    fault: Fault | None


class MemoryBackend(Backend):
    """A transport that copies memory within the process.

    Args:
        fabric: The endpoints it can reach; by default all in the process.
        mapped: Ranges whose addresses are not those of real memory.
        faults: Faults to inject into this endpoint's posts.
    """

    name = "memory"
    capabilities = Capabilities(
        in_band_notices=True, memory_kinds=frozenset({"DRAM"}), ends_with_process=True, descriptor_overhead_s=1e-6
    )

    def __init__(
        self,
        *,
        fabric: Fabric = DEFAULT_FABRIC,
        mapped: Sequence[MappedRange] = (),
        faults: FaultScript | None = None,
    ) -> None:
        self._fabric = fabric
        self._mapped = tuple(mapped)
        self._faults = faults
        self._agent_name = ""
        self._memory: RegisteredMemory | None = None
        self._peers: dict[str, PeerMetadata] = {}
        self._writes: deque[_Write] = deque()
        self._in_doubt: list[int] = []
        self._delivery: EventDelivery | None = None  # None unless open
        self._has_turn = False

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._agent_name = agent_name
        self._delivery = EventDelivery(on_events, on_broken)
        if self._faults is not None:
            self._faults.attach(lambda: _call_soon(loop, self._take_turn))
        self._fabric.join(agent_name, self)

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
        if self._memory is None:
            raise BackendError("no memory has been registered yet", backend=self.name)
        return PeerMetadata(self.name, self._agent_name.encode(), self._memory).pack()

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        if self._memory is None:
            raise BackendError("no memory has been registered yet", backend=self.name)
        return host_view(self._memory, memory, self.real_address(memory.address))

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        if peer in self._peers:
            return
        theirs = PeerMetadata.unpack(metadata, backend=self.name)
        if theirs.agent != peer.encode():
            raise BackendError("peer's metadata belongs to another agent", peer=peer, agent=theirs.agent)
        target = self._fabric.find(peer)
        if target is None:
            raise BackendError("peer is not in this process", peer=peer)
        if not target.has_registered(theirs.memory):  # no later check looks at the destination
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
        fault = self._faults.next(peer, descriptors.num_bytes) if self._faults else None
        columns = np.column_stack((descriptors.src[:, 0], descriptors.dst[:, 0], descriptors.src[:, 1]))
        first_byte = int(descriptors.dst[0, 0])
        self._writes.append(_Write(post_id, peer, deque(columns.tolist()), first_byte, notice, fault))
        self._schedule_turn()

    @override
    def watch(self, *, active: bool) -> None:
        """Do nothing: notices arrive without polling."""

    @override
    async def aclose(self) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return
        self._fabric.leave(self._agent_name)
        stopped = [*self._in_doubt, *(write.post_id for write in self._writes)]
        self._writes.clear()
        delivery.deliver_soon([PostEnded(post_id, "stopped by closing the endpoint") for post_id in stopped])
        delivery.close()

    def has_registered(self, memory: RegisteredMemory) -> bool:
        """Return whether all of some memory is registered here."""
        return self._memory is not None and self._memory.has(memory)

    def deliver(self, notice: bytes) -> None:
        """Accept a notice from another endpoint. Can be called from any thread."""
        delivery = self._delivery
        if delivery is not None and len(delivery) < MAX_WAITING:
            delivery.deliver_soon([NoticeArrived(notice)])

    def _schedule_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Copy a part of one write, and deliver the resulting events."""
        self._has_turn = False
        delivery = self._delivery
        if delivery is None or not self._writes or (self._faults is not None and self._faults.is_holding):
            return
        self._copy(delivery)
        if self._writes:
            self._schedule_turn()
        delivery.deliver()

    def _copy(self, delivery: EventDelivery) -> None:
        """Copy a part of the oldest write, and requeue the rest behind the other writes."""
        write = self._writes.popleft()
        target = self._fabric.find(write.peer)
        if write.fault == "fail" or target is None:
            delivery.deliver_soon([PostEnded(write.post_id, "scripted failure" if target else "peer has left")])
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

    def _end_write(self, write: "_Write", target: "MemoryBackend", delivery: EventDelivery) -> None:
        if write.fault == "doubt":
            self._in_doubt.append(write.post_id)
            delivery.deliver_soon([PostInDoubt(write.post_id, "scripted doubt")])
            return
        if write.fault == "corrupt":
            ctypes.c_ubyte.from_address(target.real_address(write.first_byte)).value ^= 0xFF
        if write.notice and write.fault != "lose_notice":
            target.deliver(write.notice)
        delivery.deliver_soon([PostEnded(write.post_id, None)])

    def real_address(self, address: int) -> int:
        """Return the actual address of a registered address."""
        for mapped in self._mapped:
            if mapped.address <= address < mapped.address + mapped.length:
                return mapped.real + (address - mapped.address)
        return address


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Schedule a call on an event loop from any thread; do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)
