"""The example of a transport for SGLang keeps kvflow's contract, in SGLang's terms."""

import asyncio
import contextlib
import functools
from collections.abc import Collection
from typing import Final

import anyio
import anyio.to_thread
import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import override

from examples import sglang_transport
from examples.sglang_transport import Handle, KvflowTransport, Peer, State, TransferBlock, TransferStatus
from kvflow.backends import (
    Backend,
    BackendEvent,
    Capabilities,
    NoticeArrived,
    OnBroken,
    OnEvents,
    PostEnded,
    PostInDoubt,
)
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.memory import MemoryBackend
from kvflow.errors import BackendError
from kvflow.geometry import Descriptors, KVLayout, MemoryRange
from kvflow.testing.contract import BackendContract
from kvflow.testing.contract.base import ContractBase
from kvflow.testing.contract.suite.closing import ClosingContract
from kvflow.testing.contract.suite.writes import WriteContract

IMPATIENT: Final = {"close_timeout_s": 0.2}


class OverTransport(Backend):
    """A `KvflowTransport` as a backend: it has nothing but the transport's methods, so the suite tests those."""

    def __init__(self, name: str, options: dict[str, object]) -> None:
        self.transport = KvflowTransport(name, options, on_progress=self._wake)
        self.name = name
        own = self.transport.capabilities
        self.capabilities = Capabilities(
            in_band_notices=own.in_band_notices,
            memory_kinds=own.memory_kinds,
            ends_with_process=own.ends_with_process,
        )
        self._peers: dict[str, Peer] = {}
        self._handles: dict[int, Handle] = {}
        self._in_doubt: set[int] = set()
        self._delivery: EventDelivery | None = None

    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        self._loop = asyncio.get_running_loop()
        self._delivery = EventDelivery(on_events, on_broken)
        await anyio.to_thread.run_sync(self.transport.init, agent_name)

    async def register(self, layout: KVLayout) -> None:
        regions = [MemoryRange(one.address, one.length, one.location or layout.location) for one in layout.allocations]
        await anyio.to_thread.run_sync(self.transport.register_memory, regions)

    def metadata(self) -> bytes:
        return self.transport.local_desc()

    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        return self.transport.backend.view(memory)

    async def connect(self, peer: str, metadata: bytes) -> None:
        self._peers[peer] = await anyio.to_thread.run_sync(self.transport.open_peer, peer, metadata)

    async def disconnect(self, peer: str) -> None:
        if (known := self._peers.pop(peer, None)) is not None:
            await anyio.to_thread.run_sync(self.transport.close_peer, known)

    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        if peer not in self._peers:
            raise BackendError("peer is not connected", peer=peer)
        sides = zip(descriptors.src.tolist(), descriptors.dst.tolist(), strict=True)
        blocks = [TransferBlock(here, there, length, own, other) for (here, length, own), (there, _, other) in sides]
        if not np.array_equal(descriptors.src[:, 1], descriptors.dst[:, 1]):  # a block has only one length
            raise BackendError("lengths differ")
        self._handles[post_id] = self.transport.submit(self._peers[peer], blocks, notice)

    def watch(self, *, active: bool) -> None:
        self.transport.watch(active=active)

    def domain(self) -> bytes:
        return self.transport.domain()

    async def outlast(self, domain: bytes, ends: Collection[bytes] = (), *, is_alive: bool = False) -> bool:
        return await anyio.to_thread.run_sync(lambda: self.transport.outlast(domain, ends, is_alive=is_alive))

    async def aclose(self) -> None:
        if self._delivery is not None:
            await anyio.to_thread.run_sync(self.transport.close)
            self._collect()
            self._delivery.close()
            self._delivery = None

    def _wake(self) -> None:
        """Collect what is new on the event loop of the suite."""
        with contextlib.suppress(RuntimeError):  # that has ended
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        """Report each change of a status as the event that has the same meaning."""
        delivery = self._delivery
        if delivery is None:
            return
        if self.transport.error is not None:
            delivery.fail(self.transport.error)
        delivery.deliver_soon([NoticeArrived(notice) for notice in self.transport.take_notices()])
        for post_id, handle in list(self._handles.items()):
            status = self.transport.poll(handle)
            if status.is_source_drained:
                del self._handles[post_id]
                error = None if status.state is State.DONE else status.error
                delivery.deliver_soon([PostEnded(post_id, error, lingers=not status.is_target_drained)])
            elif status.state is State.FAILED and post_id not in self._in_doubt:
                self._in_doubt.add(post_id)
                delivery.deliver_soon([PostInDoubt(post_id, status.error)])


class Scripted(MemoryBackend):
    """A transport that reports what the test tells it to."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[int] = []

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        self.posted.append(post_id)

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        await super().open(agent_name, on_events, on_broken)
        self.report = on_events


DOUBT = "post is in doubt"
DEAD = "peer is dead"
STATUSES: Final[dict[str, list[tuple[BackendEvent, TransferStatus]]]] = {
    "done": [(PostEnded(0, None), TransferStatus(State.DONE, True, True))],
    "failed": [(PostEnded(0, DEAD), TransferStatus(State.FAILED, True, True, DEAD))],
    "lingers": [(PostEnded(0, DEAD, lingers=True), TransferStatus(State.FAILED, True, False, DEAD))],
    "in doubt, then lingers": [
        (PostInDoubt(0, DOUBT), TransferStatus(State.FAILED, False, False, DOUBT)),
        (PostEnded(0, DEAD, lingers=True), TransferStatus(State.FAILED, True, False, DEAD)),
    ],
    "in doubt, and yet done": [
        (PostInDoubt(0, DOUBT), TransferStatus(State.FAILED, False, False, DOUBT)),
        (PostEnded(0, None), TransferStatus(State.DONE, True, True)),
    ],
}


@pytest.mark.parametrize("story", STATUSES)
def test_a_failed_write_is_drained_only_when_the_transport_says_so(story: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, woken = Scripted(), list[bool]()
    monkeypatch.setattr(sglang_transport, "create_backend", lambda *_: backend)
    transport = KvflowTransport("scripted", on_progress=lambda: woken.append(True))
    transport.init("source")
    handle = transport.submit(Peer("target"), [TransferBlock(0, 0, 1)])
    assert transport.poll(handle) == TransferStatus()
    for event, expected in STATUSES[story]:
        transport._call(functools.partial(backend.report, [event]))
        assert transport.poll(handle) == expected
    assert len(woken) == len(STATUSES[story])
    transport.close()
    with pytest.raises(BackendError, match="not open"):
        transport.submit(Peer("target"), [TransferBlock(0, 0, 1)])


class OverTransportContract(ContractBase):
    @override
    def new_backend(self) -> Backend:
        return OverTransport(self.backend, dict(self.options))

    @override
    def new_impatient_backend(self) -> Backend:
        return OverTransport(self.backend, {**self.options, **self.impatient})


class TestMemory(OverTransportContract, WriteContract, ClosingContract):
    backend = "memory"
    reaches_other_processes = False


@pytest.mark.slow
class TestMemoryAtLength(OverTransportContract, BackendContract):
    backend = "memory"
    reaches_other_processes = False


@pytest.mark.slow
class TestNixl(OverTransportContract, BackendContract):
    backend = "nixl"
    impatient = IMPATIENT


@pytest.mark.slow
class TestMooncake(OverTransportContract, BackendContract):
    backend = "mooncake"
    timeout_s = 150.0
    held_after_end = 4
    impatient = IMPATIENT
