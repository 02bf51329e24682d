"""Native calls that the event loop makes itself because waking the owner thread would take longer."""

import asyncio
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import anyio.lowlevel
import pytest

from kvflow.backends.base import PostEnded
from kvflow.backends.nixl import NixlBackend
from kvflow.backends.nixl.agent import NixlAgent
from kvflow.backends.nixl.arrivals import Arrivals
from tests.backends.endpoints import copies, open_endpoints, same
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_BYTES = 4096

IDLE = {"busy_interval_s": 1.0, "quiet_interval_s": 1.0, "idle_interval_s": 1.0}
"""Options with which the owner thread seldom polls."""


@pytest.fixture
def posting_threads(monkeypatch: pytest.MonkeyPatch, api: Any) -> list[str]:
    """Record the names of the threads that make native posts from now on."""
    names: list[str] = []
    transfer = api.nixl_agent.transfer

    def record(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return transfer(*arguments)

    monkeypatch.setattr(api.nixl_agent, "transfer", record)
    return names


@pytest.mark.parametrize(("limit", "is_inline"), [(NUM_BYTES, True), (NUM_BYTES - 1, False)])
async def test_the_event_loop_posts_short_writes_once_a_connection_is_used(
    posting_threads: list[str], limit: int, is_inline: bool
) -> None:
    async with open_endpoints("nixl", NUM_BYTES, options={"inline_bytes": limit}) as (source, target):
        for post_id in range(20):  # sometimes the owner thread is polling, and holds the agent
            source.post(post_id, target, copies(source, target, (0,), NUM_BYTES), b"notice")
            await source.take_ends(post_id + 1)
            await target.take_notices(post_id + 1)
            await until(lambda: not source.backend._owner._unfinished)  # type: ignore[attr-defined] # it is idle
        assert same(source, target)
        owner = f"kvflow-nixl-{source.name}"
        assert posting_threads[0] == owner
        assert set(posting_threads) == ({owner, threading.current_thread().name} if is_inline else {owner})
        assert source.events == [PostEnded(post_id, None) for post_id in range(20)]


async def test_the_event_loop_posts_for_no_more_than_half_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a post that took from 10 to 15 s, one at 19 s is too early, and one at 20 s is not."""
    inline: list[int] = []
    async with open_endpoints("nixl", NUM_BYTES) as (source, target):
        owner: Any = source.backend._owner  # type: ignore[attr-defined]
        agent: Any = source.backend._agent  # type: ignore[attr-defined]

        def run_now(command: Callable[[], None]) -> bool:
            if getattr(command, "func", None) == agent.post_now:
                inline.append(post_id)
            owner.submit(command)
            return True

        times = iter((10.0, 15.0, 19.0, 20.0, 21.0))
        monkeypatch.setattr("kvflow.backends.nixl.backend.monotonic", lambda: next(times))
        monkeypatch.setattr(NixlAgent, "is_used_to", lambda _agent, _peer: True)
        monkeypatch.setattr(owner, "run_now", run_now)
        for post_id in range(3):
            source.post(post_id, target, copies(source, target, (0,), NUM_BYTES), b"notice")
        await source.take_ends(3)
    assert inline == [0, 2]


async def test_the_event_loop_finds_notices_before_the_owner_thread_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds some, not all: UCX may read its sockets without handling what it has read at once."""
    found: list[bool] = []
    poll = NixlBackend._poll

    def record(backend: NixlBackend) -> bool:
        found.append(poll(backend))
        return found[-1]

    monkeypatch.setattr(NixlBackend, "_poll", record)
    async with open_endpoints("nixl", NUM_BYTES, options=IDLE) as (source, target):
        for post_id in range(5):
            source.post(post_id, target, copies(source, target), b"%d" % post_id)
            await target.take_notices(post_id + 1)
        assert target.notices() == [b"0", b"1", b"2", b"3", b"4"]
    assert any(found)


@pytest.mark.parametrize(("pause_s", "goes_on"), [(0.0, True), (3600.0, False)])
async def test_what_stays_readable_is_looked_at_now_and_then(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, goes_on: bool
) -> None:
    monkeypatch.setattr("kvflow.backends.nixl.arrivals.PAUSE_S", pause_s)
    looks: list[bool] = []
    mine, theirs = socket.socketpair()
    with mine, theirs, select.epoll() as epoll:
        epoll.register(mine, select.EPOLLIN)

        def look() -> bool:
            looks.append(len(looks) < 2)  # the first poll finds something, the second does not
            return looks[-1]

        arrivals = Arrivals([epoll.fileno()], look)
        await anyio.wait_all_tasks_blocked()
        assert not looks
        theirs.send(b"x")
        await until(lambda: len(looks) >= (6 if goes_on else 3))
        arrivals.close()
        seen = len(looks)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert len(looks) == seen
        assert goes_on or seen == 3


async def test_arrivals_that_cannot_be_watched_leave_no_watch_behind() -> None:
    """The selector of the event loop cannot watch itself."""
    loop = asyncio.get_running_loop()
    with select.epoll() as epoll:
        own = os.dup(loop._selector.fileno())  # type: ignore[attr-defined]
        try:
            with pytest.raises(OSError, match="Invalid argument"):
                Arrivals([epoll.fileno(), own], lambda: True)
            assert not loop.remove_reader(epoll.fileno())
        finally:
            os.close(own)


async def test_closing_arrivals_twice_does_nothing() -> None:
    with select.epoll() as epoll:
        arrivals = Arrivals([epoll.fileno()], lambda: True)
        arrivals.close()
        arrivals.close()
