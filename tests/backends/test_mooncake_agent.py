"""Connections of a Mooncake endpoint, over fake engines whose results the test sets."""

import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
from typing_extensions import override

from kvflow.backends.base import BackendEvent, PostEnded
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.mooncake.address import IncarnationCell
from kvflow.backends.mooncake.agent import REPLACEMENTS, Agent
from kvflow.backends.mooncake.engine import WritingEngine
from kvflow.errors import BackendError
from kvflow.geometry.plan import Descriptors
from tests.support.mooncake_engines import OpenEngine

pytestmark = pytest.mark.anyio

RUNNING, DONE, FAILED = 0, 1, -1

ONE_WRITE = np.array([(0, 8, 0)], np.uint64)


class Engine(OpenEngine):
    """An engine whose writes all have the state that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RUNNING
        self.num_writes = 0

    @override
    def submit(self, session: str, src: int, dst: int, num_bytes: int) -> int:
        self.num_writes += 1
        return self.num_writes

    @override
    def check(self, transfer_id: int) -> int:
        return self.state


class Bench:
    """An endpoint over such engines."""

    def __init__(self, max_senders: int = 1) -> None:
        self.engines: list[Engine] = []
        self._events: list[BackendEvent] = []
        self._delivery = EventDelivery(self._events.extend, lambda _: None)
        self.agent = Agent(
            "me", self._start, self._delivery, protocol="tcp", window=4, timeout_s=60.0, max_senders=max_senders
        )

    def _start(self, cell: IncarnationCell) -> WritingEngine:
        self.engines.append(Engine())
        return self.engines[-1]

    def connect(self, peer: str = "peer", principal: str = "") -> None:
        """Connect a peer as the backend does."""
        engine = self.agent.borrow_sender(principal, self.agent.engine_in_use(peer))
        self.agent.connect(peer, engine, "peer:1")
        self.agent.give_back(engine)

    def post(self, post_id: int, peer: str = "peer") -> None:
        self.agent.post(post_id, peer, Descriptors(ONE_WRITE, ONE_WRITE))

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


@pytest.fixture
async def wide() -> AsyncIterator[Bench]:
    """An endpoint that may have two senders."""
    bench = Bench(max_senders=2)
    yield bench
    bench.agent.close(0.0)
    assert all(engine.is_closed for engine in bench.engines)


async def test_posts_wait_while_a_session_is_opened_on_their_engine(wide: Bench) -> None:
    """The owner thread must not call the engine then. Posts of other principals and running transfers go on."""
    wide.connect("a", "one")
    wide.connect("b", "two")
    wide.post(1, "a")
    first, second = wide.engines
    with first.contact(is_opening=True):
        wide.post(2, "a")
        wide.post(3, "b")
        first.state = second.state = DONE
        wide.agent.poll()
        assert (first.num_writes, second.num_writes) == (1, 1)
        assert wide.ends == [(1, True), (3, True)]
        assert wide.agent.is_busy()
    wide.agent.poll()
    assert first.num_writes == 2
    wide.agent.poll()
    assert wide.ends == [(1, True), (3, True), (2, True)]


async def test_other_calls_to_peers_do_not_hold_up_posts(wide: Bench) -> None:
    wide.connect()
    with wide.engines[0].contact():
        wide.post(1)
        assert wide.engines[0].num_writes == 1


async def test_a_principal_has_one_engine_and_another_has_another_one(wide: Bench) -> None:
    for peer, principal in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "two")):
        wide.connect(peer, principal)
        wide.post(ord(peer), peer)
    assert [engine.num_writes for engine in wide.engines] == [2, 2]


async def test_further_principals_share_the_engine_with_the_fewest_users_unless_a_session_is_opened_on_it(
    wide: Bench,
) -> None:
    for peer, principal in (("a", "one"), ("b", "one"), ("c", "two")):
        wide.connect(peer, principal)
    first, second = wide.engines
    assert wide.agent.borrow_sender("three") is second
    with second.contact(is_opening=True):
        assert wide.agent.borrow_sender("four") is first
    assert wide.agent.borrow_sender("three") is second


async def test_a_principal_without_peers_loses_its_engine_to_the_next_one(wide: Bench) -> None:
    wide.connect("a", "one")
    wide.connect("b", "two")
    wide.agent.disconnect("a")
    wide.connect("c", "three")
    first, second = wide.engines
    assert wide.agent.borrow_sender("three") is first
    assert wide.agent.borrow_sender("one") is second


async def test_without_more_engines_all_principals_share_one(bench: Bench) -> None:
    for principal in ("one", "two"):
        bench.connect(principal, principal)
    assert len(bench.engines) == 1


async def test_an_engine_is_not_closed_while_a_peer_is_called_through_it(bench: Bench) -> None:
    """The native engine would outlive its end here."""
    worn_out = bench.agent.borrow_sender("")
    bench.agent.give_back(worn_out)
    worn_out = bench.agent.borrow_sender("", worn_out)  # peers do not write to this one
    with worn_out.contact():
        bench.agent.give_back(worn_out)
        bench.agent.borrow_sender("", worn_out)
        assert [engine.is_closed for engine in bench.engines] == [False] * 3
    bench.agent.close_unused()
    assert [engine.is_closed for engine in bench.engines] == [False, True, False]


async def test_one_principal_cannot_have_engines_replaced_again_and_again() -> None:
    """Each that is closed stops the process for a second."""
    bench = Bench(max_senders=2)
    worn_out: WritingEngine | None = None
    for _ in range(1 + REPLACEMENTS.at_once):
        worn_out = bench.agent.borrow_sender("one", worn_out)
        bench.agent.give_back(worn_out)
    with pytest.raises(BackendError, match="replaced recently"):
        bench.agent.borrow_sender("one", worn_out)
    other = bench.agent.borrow_sender("two")
    assert bench.agent.borrow_sender("two", other) is not other


async def test_closing_waits_for_calls_to_peers_if_posts_run_on_their_engine() -> None:
    """Only the end of the native engine stops a post, and the engine lives as long as the calls."""
    bench = Bench()
    bench.connect()
    bench.post(1)
    with bench.engines[0].contact():
        closing = threading.Thread(target=bench.agent.close, args=(0.0,))
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        assert [engine.is_closed for engine in bench.engines] == [False]
    closing.join()
    assert [engine.is_closed for engine in bench.engines] == [True]
    assert bench.ends == [(1, False)]


async def test_closing_waits_for_no_call_to_a_peer_if_nothing_runs() -> None:
    bench = Bench()
    bench.connect()
    with bench.engines[0].contact(is_opening=True):
        bench.post(1)
        bench.agent.close(0.0)
        assert bench.engines[0].is_closed
    assert bench.ends == [(1, False)]
