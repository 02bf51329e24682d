"""The base class of transports with an owner thread, over a fake agent."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from typing_extensions import override

from kvflow.backends import Capabilities, PostEnded
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.backends.owner import ConnectedPeer, OwnerBackend, PollIntervals
from kvflow.errors import BackendError, BackendUnavailable, RegistrationError
from kvflow.geometry.plan import Descriptors
from kvflow.testing.buffers import HostBuffer
from kvflow.testing.endpoints import Endpoint, copies, fresh_name
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Agent:
    """Ends all posts when it is closed, records its calls, and fails where the test wants."""

    def __init__(self, delivery: EventDelivery, log: list[str], failing: str) -> None:
        self.delivery = delivery
        self.log = log
        self.failing = failing
        self.posted: list[int] = []
        self.note("create")

    def note(self, call: str) -> None:
        self.log.append(call)
        if call == self.failing:
            raise ValueError(f"{call} failed")

    def register(self, memory: RegisteredMemory) -> bytes:
        self.note("register")
        return b"address"

    def connect(self) -> None:
        self.note("connect")

    def disconnect(self, peer: str) -> None:
        self.note(f"disconnect {peer}")

    def post(self, post_id: int) -> None:
        self.posted.append(post_id)
        self.note("post")

    def is_busy(self) -> bool:
        return True

    def may_sleep(self) -> bool:
        return False

    def poll(self) -> bool:
        if self.failing == "poll":
            self.note("poll")
        return False

    def close(self, timeout_s: float) -> None:
        self.delivery.deliver_soon([PostEnded(post_id, None) for post_id in self.posted])
        self.note(f"close {timeout_s}")


class FakeBackend(OwnerBackend[Agent, ConnectedPeer]):
    name = "fake"
    capabilities = Capabilities(in_band_notices=False, memory_kinds=frozenset({"DRAM"}))

    def __init__(self, failing: str = "") -> None:
        super().__init__(PollIntervals(1e-4, 1e-3, 1e-3), close_timeout_s=2.5)
        self.log: list[str] = []
        self.failing = failing
        self.goes_on = threading.Event()
        self.goes_on.set()

    @override
    def _create_agent(self, agent_name: str, delivery: EventDelivery) -> Agent:
        self.log.append(threading.current_thread().name)
        self.goes_on.wait()
        return Agent(delivery, self.log, self.failing)

    @override
    async def _connect(self, peer: str, theirs: PeerMetadata, principal: str) -> ConnectedPeer:
        await self._call(lambda agent: agent.connect())
        return ConnectedPeer(peer, theirs.memory)

    @override
    def _post(self, post_id: int, peer: ConnectedPeer, descriptors: Descriptors, notice: bytes) -> None:
        owner, agent = self._running()
        owner.submit(lambda: agent.post(post_id))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@asynccontextmanager
async def opened(backend: FakeBackend) -> AsyncIterator[Endpoint]:
    """Open an endpoint; on exit, check that it kept the contract and left no thread."""
    endpoint = Endpoint(fresh_name(), backend, HostBuffer(4096))
    await endpoint.open()
    yield endpoint
    assert not endpoint.violations
    assert not {name for name in threads() if endpoint.name in name}


async def test_an_endpoint_from_its_start_to_its_end() -> None:
    backend = FakeBackend()
    async with opened(backend) as endpoint:
        await backend.register(endpoint.buffer.layout())
        await endpoint.connect(endpoint)
        endpoint.post(1, endpoint, copies(endpoint, endpoint))
        await backend.disconnect(endpoint.name)
        await endpoint.close()
        endpoint.check_ends()
        owner = f"kvflow-fake-{endpoint.name}"
        assert backend.log == [
            owner, "create", "register", "connect", "post", f"disconnect {endpoint.name}", "close 2.5"
        ]  # fmt: skip


async def test_a_start_that_fails_is_typed_and_leaves_no_thread() -> None:
    endpoint = Endpoint(fresh_name(), FakeBackend("create"), HostBuffer(64))
    with pytest.raises(BackendUnavailable) as caught:
        await endpoint.open()
    assert caught.value.values == {"backend": "fake", "detail": "ValueError: create failed"}
    assert isinstance(caught.value.__cause__, ValueError)
    assert not {name for name in threads() if endpoint.name in name}
    await endpoint.close()
    assert not endpoint.events
    assert not endpoint.breakdowns


async def test_an_agent_that_starts_while_its_opening_is_cancelled_is_closed() -> None:
    backend = FakeBackend()
    backend.goes_on.clear()
    endpoint = Endpoint(fresh_name(), backend, HostBuffer(64))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(endpoint.open)
        await until(lambda: backend.log)
        tasks.cancel_scope.cancel()
        backend.goes_on.set()
    assert backend.log[1:] == ["create", "close 0.0"]
    assert not {name for name in threads() if endpoint.name in name}
    with pytest.raises(BackendError, match="not open"):
        await backend.register(endpoint.buffer.layout())


async def test_a_registration_that_fails_is_typed_and_changes_nothing() -> None:
    backend = FakeBackend("register")
    async with opened(backend) as endpoint:
        with pytest.raises(RegistrationError, match="register failed"):
            await backend.register(endpoint.buffer.layout())
        with pytest.raises(BackendError, match="no memory"):
            backend.metadata()
        backend.log.clear()
        await endpoint.close()
        assert backend.log == ["close 2.5"]


async def test_a_connection_that_fails_is_typed_and_connects_nobody() -> None:
    backend = FakeBackend("connect")
    async with opened(backend) as endpoint:
        await backend.register(endpoint.buffer.layout())
        with pytest.raises(BackendError, match="connect failed"):
            await endpoint.connect(endpoint)
        with pytest.raises(BackendError, match="not connected"):
            endpoint.post(1, endpoint, copies(endpoint, endpoint))
        await endpoint.close()


@pytest.mark.parametrize("failing", ["poll", "post"])
async def test_what_fails_on_the_thread_is_reported_once(failing: str) -> None:
    backend = FakeBackend(failing)
    async with opened(backend) as endpoint:
        await backend.register(endpoint.buffer.layout())
        await endpoint.connect(endpoint)
        for post_id in range(3):
            endpoint.post(post_id, endpoint, copies(endpoint, endpoint))
        with pytest.raises(BackendError, match="transport library has failed") as caught:
            await endpoint.take_until(lambda: False)
        assert caught.value.values["detail"] == f"ValueError: {failing} failed"
        await endpoint.close()
        endpoint.check_ends()
        assert len(endpoint.breakdowns) == 1


async def test_a_close_that_fails_is_typed_and_delivers_what_is_left() -> None:
    backend = FakeBackend("close 2.5")
    async with opened(backend) as endpoint:
        await backend.register(endpoint.buffer.layout())
        await endpoint.connect(endpoint)
        endpoint.post(1, endpoint, copies(endpoint, endpoint))
        with pytest.raises(BackendError, match="not closed properly"):
            await backend.aclose()
        endpoint.check_ends()
        await endpoint.close()
