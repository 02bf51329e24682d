"""Long messages are decoded off the event loop, one at a time, and no message of their connection overtakes them."""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import pytest

from kvflow.control.reading import OrderedReading, ReadingContext
from kvflow.errors import RemoteProtocolError, ThreadShortage
from kvflow.gate import rates
from kvflow.gate.sizes import LONG_BYTES
from kvflow.observe.logs import get_logger
from kvflow.observe.trace import AnomalyLog
from kvflow.system import system_ports
from kvflow.wire.codec import Reader, encode
from kvflow.wire.messages import Notice, Ping
from tests.support.cores import PREFILL
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

Result = TypeVar("Result")
Told = tuple[bytes, str]

KINDS: Reader[Ping | Notice] = Reader(Ping | Notice)
PING = encode(Ping(peer=PREFILL))


class Slow:
    """Worker threads that wait for a permission of the test."""

    def __init__(self) -> None:
        self.may_go_on = threading.Semaphore(0)
        self.num_running = 0
        self.most = 0

    async def __call__(self, function: Callable[[], Result]) -> Result:
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        try:
            await anyio.to_thread.run_sync(self.may_go_on.acquire)
            return function()
        finally:
            self.num_running -= 1


class Ends:
    """Record of read and refused messages by connection; a connection's first letter is its principal."""

    def __init__(self, start_task: Callable[..., object], run_in_thread: Any) -> None:
        self.told: list[Told] = []
        self.postponed: list[bytes] = []
        ports = replace(system_ports(), run_in_thread=run_in_thread)
        self.anomalies = AnomalyLog(get_logger(), ports.now)
        self.context = ReadingContext(ports, self.anomalies, start_task)
        self.reading = OrderedReading(KINDS, self.context, lambda one: one[:1].decode(), self._take, self._refuse)

    def say(self, connection: bytes, data: bytes) -> None:
        if not self.reading.parse_message(connection, KINDS.identify_message([data])):
            self.postponed.append(connection)

    def _take(self, connection: bytes, message: Ping | Notice, _num_bytes: int) -> None:
        self.told.append((connection, type(message).__name__))

    def _refuse(self, connection: bytes, error: RemoteProtocolError, _num_bytes: int) -> None:
        self.told.append((connection, error.message))
        raise RemoteProtocolError("break the connection")


@asynccontextmanager
async def ends(run_in_thread: Callable[..., Awaitable[Any]]) -> AsyncIterator[Ends]:
    async with anyio.create_task_group() as tasks:
        yield Ends(tasks.start_soon, run_in_thread)


def long(num_bytes: int = LONG_BYTES) -> bytes:
    metadata = bytes(num_bytes)
    notice = Notice(room=1, generation=1, token=0, engine_rank=0, seq=0, ranges={}, num_bytes=0, metadata=metadata)
    return encode(notice)


async def test_nothing_overtakes_a_long_message_of_its_connection() -> None:
    slow = Slow()
    async with ends(slow) as one:
        for data in (PING, long(), PING, long(), PING):
            one.say(b"a1", data)
        one.say(b"a2", PING)
        one.say(b"b1", PING)
        assert one.told == [(b"a1", "Ping"), (b"a2", "Ping"), (b"b1", "Ping")]
        one.told.clear()
        slow.may_go_on.release()
        await until(lambda: len(one.told) == 2)
        slow.may_go_on.release()
        await until(lambda: len(one.told) == 4)
        assert one.told == [(b"a1", "Notice"), (b"a1", "Ping")] * 2
    one.say(b"a1", PING)
    assert one.told[-1] == (b"a1", "Ping")


async def test_one_is_read_at_a_time_and_principals_take_turns() -> None:
    slow = Slow()
    async with ends(slow) as one:
        for connection in (b"a1", b"a2", b"a1", b"b1", b"c1"):
            one.say(connection, long())
        for _ in range(5):
            slow.may_go_on.release()
    assert slow.most == 1
    assert [connection for connection, _ in one.told] == [b"a1", b"b1", b"c1", b"a2", b"a1"]


async def test_what_waits_has_a_bound_for_each_principal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_QUEUED_BYTES", 3 * LONG_BYTES)
    slow = Slow()
    async with ends(slow) as one:
        one.say(b"a1", long())
        one.say(b"a2", long())
        one.say(b"a3", long())
        while len(one.postponed) < 2:
            one.say(b"a1", PING)
        one.say(b"b1", long())
        for _ in range(3):
            slow.may_go_on.release()
    assert one.postponed == [b"a3", b"a1"]
    assert (one.anomalies.counts, one.anomalies.postponed) == ({}, {"message_over_budget": 2})
    assert [connection for connection, what in one.told if what == "Notice"] == [b"a1", b"b1", b"a2"]


async def test_a_long_message_that_is_malformed_is_refused_in_its_turn() -> None:
    slow = Slow()
    async with ends(slow) as one:
        one.say(b"a1", long()[:-1])
        one.say(b"a1", PING)
        slow.may_go_on.release()
    assert one.told == [(b"a1", "message is malformed"), (b"a1", "Ping")]


async def test_without_threads_it_is_read_on_the_event_loop() -> None:
    async def none_left(_function: Callable[[], object]) -> object:
        raise ThreadShortage("none")

    async with ends(none_left) as one:
        one.say(b"a1", long())
    assert (one.told, one.anomalies.counts) == ([(b"a1", "Notice")], {"thread_shortage": 1})
