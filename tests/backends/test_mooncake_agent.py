"""Connections of a Mooncake endpoint, over fake engines whose results the test sets."""

from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from typing_extensions import override

from kvflow.backends.base import BackendEvent, PostEnded
from kvflow.backends.delivery import Delivery
from kvflow.backends.mooncake.address import EndpointAddress, IncarnationCell
from kvflow.backends.mooncake.agent import Agent
from kvflow.backends.mooncake.engine import WritingEngine
from kvflow.geometry.layout import MemoryRange
from kvflow.geometry.plan import Descriptors

pytestmark = pytest.mark.anyio

RUNNING, DONE, FAILED = 0, 1, -1

ONE_WRITE = np.array([(0, 8, 0)], np.uint64)


class Engine(WritingEngine):
    """An engine whose writes all have the state that the test sets."""

    session = "me:1"

    def __init__(self) -> None:
        super().__init__()
        self.state = RUNNING
        self.num_writes = 0
        self.is_closed = False

    @override
    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Accept any ranges."""

    @override
    def probe(self, address: EndpointAddress) -> None:
        """Accept any address, as if a peer answered."""

    @override
    def open_session(self, session: str) -> bool:
        return True

    @override
    def read_incarnation(self, address: EndpointAddress) -> bytes | None:
        return address.incarnation

    @override
    def submit(self, session: str, src: int, dst: int, num_bytes: int) -> int:
        self.num_writes += 1
        return self.num_writes

    @override
    def check(self, transfer_id: int) -> int:
        return self.state

    @override
    def close(self) -> None:
        self.is_closed = True


class Bench:
    """An endpoint over such engines."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self._events: list[BackendEvent] = []
        self._delivery = Delivery(self._events.extend, lambda _: None)
        self.agent = Agent("me", self._start, self._delivery, protocol="tcp", window=4, timeout_s=60.0)

    def _start(self, cell: IncarnationCell) -> WritingEngine:
        self.engines.append(Engine())
        return self.engines[-1]

    def connect(self) -> None:
        """Connect the peer as the backend does."""
        engine = self.agent.borrow_sender("", self.agent.engine_in_use("peer"))
        self.agent.connect("peer", engine, "peer:1")
        self.agent.give_back(engine)

    def post(self, post_id: int) -> None:
        self.agent.post(post_id, "peer", Descriptors(ONE_WRITE, ONE_WRITE))

    @property
    def ends(self) -> list[tuple[int, bool]]:
        """Return the posts that have ended, and whether each succeeded."""
        self._delivery.deliver()
        return [(it.post_id, it.error is None) for it in self._events if isinstance(it, PostEnded)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.agent.close(0.0)
    assert all(engine.is_closed for engine in bench.engines)


async def test_a_peer_that_comes_back_while_writes_to_it_run_is_written_to_through_another_engine(bench: Bench) -> None:
    """After a partition the first engine's connection may stay stuck for as long again."""
    bench.connect()
    bench.post(1)
    bench.agent.disconnect("peer")
    bench.connect()
    bench.post(2)
    first, second = bench.engines
    assert (first.num_writes, second.num_writes) == (1, 1)
    second.state = DONE
    bench.agent.poll()
    assert bench.ends == [(2, True)]
    assert bench.agent.is_busy()
    first.state = DONE
    bench.agent.poll()
    assert bench.ends == [(2, True), (1, True)]
    assert not bench.agent.is_busy()


async def test_a_peer_that_comes_back_again_is_written_to_through_a_third_engine(bench: Bench) -> None:
    for post_id in range(3):
        bench.connect()
        bench.post(post_id)
        bench.agent.disconnect("peer")
    assert [engine.num_writes for engine in bench.engines] == [1, 1, 1]
    for engine in bench.engines:
        engine.state = FAILED
    bench.agent.poll()
    assert sorted(bench.ends) == [(0, False), (1, False), (2, False)]


async def test_a_peer_that_comes_back_when_nothing_runs_keeps_its_engine(bench: Bench) -> None:
    bench.connect()
    bench.engines[0].state = DONE
    bench.post(1)
    bench.agent.poll()
    bench.agent.disconnect("peer")
    bench.connect()
    bench.post(2)
    bench.agent.poll()
    assert bench.ends == [(1, True), (2, True)]
    assert len(bench.engines) == 1


async def test_closing_ends_what_runs_over_former_engines(bench: Bench) -> None:
    bench.connect()
    bench.post(1)
    bench.agent.disconnect("peer")
    bench.connect()
    bench.post(2)
    bench.agent.close(0.0)
    assert sorted(bench.ends) == [(1, False), (2, False)]
