"""The window of writes to one peer, over a fake engine whose results the test sets."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from kvflow.backends.base import BackendEvent, PostEnded, PostInDoubt
from kvflow.backends.mooncake.window import PeerConnection, PostInFlight
from kvflow.geometry.plan import Descriptors
from tests.support.mooncake_engines import OpenEngine

RUNNING, DONE, FAILED, EXPIRED = 0, 1, -1, -2


class Engine(OpenEngine):
    """Transfers run until the test ends them. Polling one that has ended fails; it would crash the real library."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int, int]] = []
        self.states: dict[int, int] = {}
        self.refuse_from: int | None = None

    aborted_at = float("-inf")

    @override
    def abort(self, session: str) -> None:
        assert session == "peer:1"
        self.closed_at = self.aborted_at = time.monotonic()

    @override
    def was_aborted(self, session: str, since: float) -> bool:
        assert session == "peer:1"
        return since <= self.aborted_at

    @override
    def submit(self, session: str, src: int, dst: int, num_bytes: int) -> int:
        assert session == "peer:1"
        if self.refuse_from is not None and len(self.rows) >= self.refuse_from:
            return 0
        self.rows.append((src, dst, num_bytes))
        self.states[len(self.rows)] = RUNNING
        return len(self.rows)

    @override
    def check(self, transfer_id: int) -> int:
        state = self.states[transfer_id]
        if state != RUNNING:
            del self.states[transfer_id]
        return state

    def end(self, *transfer_ids: int, state: int = DONE) -> None:
        for transfer_id in transfer_ids or [one for one, running in self.states.items() if running == RUNNING]:
            assert self.states[transfer_id] == RUNNING
            self.states[transfer_id] = state

    @property
    def num_running(self) -> int:
        return len(self.states)


class Bench:
    """A connection over such an engine. The addresses of a post encode its id and the row."""

    def __init__(self, max_running: int = 4, timeout_s: float = 60.0) -> None:
        self.engine = Engine()
        self.events: list[BackendEvent] = []
        self.connection = PeerConnection(
            self.engine, "peer:1", max_running=max_running, timeout_s=timeout_s, emit=self.events.extend
        )

    def post(self, post_id: int, num_descriptors: int) -> None:
        src = np.array([(1000 * post_id + row, 8, 0) for row in range(num_descriptors)], np.uint64)
        self.connection.post(PostInFlight(post_id, Descriptors(src, src + np.array([500_000, 0, 0], np.uint64))))

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.connection.poll()

    def finish(self) -> None:
        while self.connection.is_active:
            self.engine.end()
            self.poll()

    def posts(self) -> list[int]:
        """Return the post id of each started descriptor."""
        return [src // 1000 for src, _, _ in self.engine.rows]


def test_there_are_never_more_under_way_than_the_window() -> None:
    bench = Bench(max_running=4)
    bench.post(1, 10)
    bench.post(2, 1)
    while bench.connection.is_active:
        assert bench.engine.num_running <= 4
        bench.engine.end(min(bench.engine.states))
        bench.poll()
    assert sorted(bench.engine.rows) == [
        *((1000 + row, 501_000 + row, 8) for row in range(10)),
        (2000, 502_000, 8),
    ]
    assert bench.events == [PostEnded(2, None), PostEnded(1, None)]


def test_a_large_post_does_not_hold_up_a_small_one() -> None:
    bench = Bench(max_running=8)
    bench.post(1, 10_000)
    bench.post(2, 4)
    bench.post(3, 4)
    bench.engine.end()
    bench.poll()
    bench.engine.end()
    bench.poll(2)
    bench.engine.end()
    bench.poll(2)
    assert {2, 3} <= {event.post_id for event in bench.events if isinstance(event, PostEnded)}
    assert len(bench.engine.rows) <= 40


def test_a_post_ends_when_its_last_descriptor_does_in_any_order() -> None:
    bench = Bench()
    bench.post(1, 4)
    for transfer_id in (3, 1, 4):
        bench.engine.end(transfer_id)
        bench.poll()
        assert bench.events == []
        assert [post.post_id for post in bench.connection.unended] == [1]
    bench.engine.end(2)
    bench.poll()
    assert bench.events == [PostEnded(1, None)]
    assert bench.connection.unended == []
    assert not bench.connection.is_active


def test_a_failure_starts_nothing_more_and_is_in_doubt_until_the_rest_has_ended() -> None:
    bench = Bench(max_running=4)
    bench.post(1, 100)
    bench.engine.end(2, state=FAILED)
    bench.poll(3)
    (doubt,) = bench.events
    assert isinstance(doubt, PostInDoubt)
    assert "refused" in doubt.error
    assert len(bench.engine.rows) == 4
    bench.engine.end(1, 3)
    bench.engine.end(4, state=FAILED)
    bench.poll()
    assert bench.events == [doubt, PostEnded(1, doubt.error)]
    assert bench.engine.states == {}


def test_the_failure_of_the_last_running_descriptor_ends_the_post_at_once() -> None:
    bench = Bench()
    bench.post(1, 1)
    bench.engine.end(1, state=FAILED)
    bench.poll()
    (end,) = bench.events
    assert isinstance(end, PostEnded)
    assert end.error is not None


def test_a_failed_post_gives_its_credit_to_the_others() -> None:
    bench = Bench(max_running=2)
    bench.post(1, 50)
    bench.post(2, 3)
    bench.engine.end(1, state=FAILED)
    bench.poll()
    bench.finish()
    assert {event.post_id: event.error is None for event in bench.events if isinstance(event, PostEnded)} == {
        1: False,
        2: True,
    }
    assert bench.posts().count(1) == 2


def test_a_timeout_lingers_after_everything_has_ended_here() -> None:
    """Its bytes may still lie in the buffers of a peer that hangs."""
    bench = Bench(timeout_s=0.0)
    bench.post(1, 2)
    bench.engine.end(1, state=FAILED)
    bench.poll()
    bench.engine.end(2)
    bench.poll()
    doubt, end = bench.events
    assert isinstance(doubt, PostInDoubt)
    assert end == PostEnded(1, doubt.error, lingers=True)
    assert "timed out" in doubt.error


def test_a_failure_after_another_connection_was_closed_lingers_unless_those_to_its_own_peer_are_aborted() -> None:
    """It may have gone over a sound connection, which the rank must not list as sound then."""
    bench = Bench(timeout_s=1e9)
    bench.post(1, 2)
    bench.engine.closed_at = time.monotonic()
    bench.engine.end(1, 2, state=FAILED)
    bench.poll()
    assert bench.engine.aborted_at >= bench.engine.closed_at, "the other connection was of another peer, or silent"
    doubt, end = bench.events
    assert isinstance(doubt, PostInDoubt)
    assert end == PostEnded(1, doubt.error, lingers=True)
    aborted_at = bench.engine.aborted_at
    bench.post(2, 1)
    bench.engine.end(3, state=FAILED)
    bench.poll()
    assert bench.engine.aborted_at == aborted_at, "later writes go over later connections"
    end = bench.events[-1]
    assert isinstance(end, PostEnded)
    assert not end.lingers


def test_what_the_library_gives_up_on_has_not_ended() -> None:
    bench = Bench()
    bench.post(1, 2)
    bench.engine.end(1, state=EXPIRED)
    bench.engine.end(2)
    bench.poll(3)
    assert [type(event) for event in bench.events] == [PostInDoubt]
    assert [post.post_id for post in bench.connection.unended] == [1]
    assert not bench.connection.is_active


@pytest.mark.parametrize("refuse_from", [0, 2])
def test_an_engine_that_takes_nothing_more(refuse_from: int) -> None:
    bench = Bench()
    bench.engine.refuse_from = refuse_from
    bench.post(1, 3)
    bench.finish()
    assert [type(event) for event in bench.events] == [PostInDoubt, PostEnded][refuse_from == 0 :]
    assert bench.connection.unended == []


@given(
    posts=st.lists(st.integers(1, 30), max_size=6),
    window=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([DONE, DONE, DONE, FAILED])), max_size=60),
)
def test_whatever_ends_when_every_post_has_one_end(
    posts: list[int], window: int, steps: Sequence[tuple[int, int]]
) -> None:
    """The connection polls each transfer until it ends, and never again: the fake engine would raise."""
    bench = Bench(max_running=window)
    for post_id, num_descriptors in enumerate(posts):
        bench.post(post_id, num_descriptors)
    failed = set()
    for pick, state in steps:
        running = [one for one, now in bench.engine.states.items() if now == RUNNING]
        if running:
            chosen = running[pick % len(running)]
            bench.engine.end(chosen, state=state)
            failed |= {bench.posts()[chosen - 1]} if state == FAILED else set()
        assert bench.engine.num_running <= window
        bench.poll()
    bench.finish()
    ends = [event for event in bench.events if isinstance(event, PostEnded)]
    assert sorted(end.post_id for end in ends) == list(range(len(posts)))
    assert {end.post_id for end in ends if end.error is not None} == failed
    for post_id in set(range(len(posts))) - failed:
        assert bench.posts().count(post_id) == posts[post_id]


def test_nothing_is_started_while_a_session_is_opened() -> None:
    bench = Bench(max_running=4)
    bench.post(1, 6)
    bench.engine._num_opening = 1
    bench.engine.end()
    bench.poll(2)
    bench.post(2, 1)
    assert len(bench.engine.rows) == 4
    assert bench.connection.is_active
    bench.engine._num_opening = 0
    bench.finish()
    assert {event.post_id for event in bench.events if isinstance(event, PostEnded)} == {1, 2}
