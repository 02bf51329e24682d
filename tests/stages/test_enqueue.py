"""Rooms that queue for capacity, and chunks that wait for a device."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from kvflow.aio.pulse import Pulse
from kvflow.config import PrefillConfig
from kvflow.errors import FailureReason, PlanError, Stage, ThreadShortage
from kvflow.observe.logs import get_logger
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import AnomalyLog
from kvflow.room import RoomId
from kvflow.stages.context import StageContext
from kvflow.stages.enqueue import DEVICE_WAITS_AT_ONCE, CapacityLine, DeviceWaits, finish_chunk, make_chunk
from kvflow.state.effects import AwaitData
from kvflow.state.events import DataReady, DeliveryId, PrefillEvent
from kvflow.system import system_ports
from kvflow.wire.messages import PeerId
from tests.support.cores import DECODE, PREFILL, peer
from tests.support.instances import make_pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

A, B, C = (peer("decode", rank) for rank in range(3))


# The line ----------------------------------------------------------------------------------------------------------


class Line:
    """A line, the capacity behind it, and the rooms that passed it.

    Attributes:
        rooms: Decode ranks of each room.
        capacity: Number of chunks that each decode rank still accepts.
        gone: Rooms that had their turn, in order.
        asked: Rooms whose decode ranks the line has queried, in order.
    """

    def __init__(self, rooms: dict[RoomId, list[PeerId]], **capacity: int) -> None:
        self.rooms = rooms
        self.capacity = {A: capacity.get("a", 0), B: capacity.get("b", 0), C: capacity.get("c", 0)}
        self.full = {one for one, count in self.capacity.items() if not count}
        self.gone: list[RoomId] = []
        self.asked: list[RoomId] = []
        self.line = CapacityLine(self.full, self._peers_of)

    def _peers_of(self, room: RoomId) -> list[PeerId]:
        self.asked.append(room)
        return self.rooms[room]

    async def offer(self, room: RoomId) -> None:
        """Offer a chunk as an engine does: wait in line if necessary."""
        if not self.line.is_open(room):
            await self.line.wait(room)
        self._go(room)
        self.line.admit()

    def _go(self, room: RoomId) -> None:
        self.gone.append(room)
        for one in self.rooms[room]:
            self.add(one, -1)

    def add(self, one: PeerId, count: int) -> None:
        self.capacity[one] += count
        (self.full.discard if self.capacity[one] else self.full.add)(one)

    async def begin(self, tasks: TaskGroup, *rooms: RoomId) -> None:
        """Let rooms offer a chunk each, in this order, until they block."""
        for room in rooms:
            tasks.start_soon(self.offer, room)
            await anyio.wait_all_tasks_blocked()

    async def free(self, *peers: PeerId) -> None:
        """Let each decode rank accept one more chunk."""
        for one in peers:
            self.add(one, 1)
        self.line.admit()
        await anyio.wait_all_tasks_blocked()


async def test_who_has_capacity_does_not_wait() -> None:
    line = Line({1: [A]}, a=1)
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 1)
        assert line.gone == [1]


async def test_rooms_go_in_the_order_in_which_they_came_one_for_each_chunk_that_left() -> None:
    line = Line({5: [A], 3: [A], 4: [A]})
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 5, 3, 4)
        assert line.gone == []
        for expected in ([5], [5, 3], [5, 3, 4]):
            await line.free(A)
            assert line.gone == expected


async def test_capacity_that_comes_at_once_lets_several_go() -> None:
    line = Line({1: [A], 2: [A], 3: [A]})
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 1, 2, 3)
        line.add(A, 2)
        await line.free()
        assert line.gone == [1, 2]
        await line.free(A)


async def test_who_comes_later_waits_behind_those_who_wait_for_the_same_decode_rank() -> None:
    line = Line({1: [A, B], 2: [A], 3: [C]}, a=1, c=1)
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 1, 2, 3)  # A has capacity, but the first room needs B too
        assert not line.line.is_open(2)
        assert line.gone == [3]
        await line.free(B)
        assert line.gone == [3, 1]
        await line.free(A)
        assert line.gone == [3, 1, 2]


async def test_a_room_waits_until_every_decode_rank_of_it_has_capacity() -> None:
    line = Line({1: [A, B]})
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 1)
        await line.free(A)
        assert line.gone == []
        await line.free(B)
        assert line.gone == [1]


@pytest.mark.parametrize("has_turn", [False, True], ids=["waiting", "about to go"])
async def test_who_is_cancelled_gives_its_turn_to_the_next(has_turn: bool) -> None:
    line = Line({1: [A], 2: [A]})
    first = asyncio.create_task(line.offer(1))
    await anyio.wait_all_tasks_blocked()
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 2)
        if has_turn:
            line.add(A, 1)
            line.line.admit()  # the turn is given, the task has not run yet
            first.cancel()
            await anyio.wait_all_tasks_blocked()
        else:
            first.cancel()
            await line.free(A)
        assert line.gone == [2]
    assert first.cancelled()


async def test_who_has_failed_stops_waiting_and_holds_nobody_up() -> None:
    line = Line({1: [A, B], 2: [A]}, a=2)
    left: list[RoomId] = []

    async def wait_in_vain() -> None:
        await line.line.wait(1)
        left.append(1)
        line.line.admit()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_in_vain)
        await anyio.wait_all_tasks_blocked()
        await line.begin(tasks, 2)
        line.line.leave(1)
        await anyio.wait_all_tasks_blocked()
        assert (left, line.gone) == ([1], [2])


async def test_leaving_a_line_that_one_does_not_stand_in_does_nothing() -> None:
    line = Line({1: [A], 2: [A]})
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 1)
        line.line.leave(2)
        await anyio.wait_all_tasks_blocked()
        assert line.gone == []
        await line.free(A)
        assert line.gone == [1]


async def test_nothing_is_kept_of_who_has_gone() -> None:
    line = Line({1: [A], 2: [A]})
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 1, 2)
        line.line.leave(1)
        await line.free(A, A)
    kept = line.line
    assert not kept._waiting
    assert not kept._by_room
    assert not kept._num_waiting


async def test_whether_a_room_must_wait_is_seen_without_looking_at_everybody_who_waits() -> None:
    many: dict[RoomId, list[PeerId]] = {room: [A] for room in range(100)}
    line = Line({**many, 100: [A, B], 101: [B]}, b=1)
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, *many)
        line.asked.clear()
        assert line.line.is_open(101)
        line.add(A, 1)
        assert not line.line.is_open(100)
        assert line.asked == [101, 100]
        for room in many:
            line.line.leave(room)
        assert line.asked == [101, 100]
        line.add(A, 100)


async def test_who_asks_for_a_waiting_room_meanwhile_is_kept_for_it() -> None:
    line = Line({1: [A], 2: [B]}, b=1)
    async with anyio.create_task_group() as tasks:
        await line.begin(tasks, 1)
        line.rooms[1] = [A, B]
        await line.free()
        await line.begin(tasks, 2)  # there is capacity, but the first room waits for this decode rank too
        assert line.gone == []
        line.rooms[1] = [A, C]
        await line.free(A, C)
        assert line.gone == [1, 2]


# Devices -----------------------------------------------------------------------------------------------------------


class Device:
    """A device event that a test completes, with or without an error."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._error: Exception | None = None
        self.num_waiting = 0

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._happened.set()

    def synchronize(self) -> None:
        self.num_waiting += 1
        self._happened.wait()
        if self._error is not None:
            raise self._error


class Bench:
    """Waits for devices, and the resulting events for the core."""

    def __init__(self, tasks: TaskGroup, **ports: Any) -> None:
        self.events: list[PrefillEvent] = []
        self.devices: list[Device] = []
        log = get_logger()

        def start_task(run: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
            tasks.start_soon(run, *args)

        context: StageContext[PrefillEvent] = StageContext(
            me=PREFILL,
            config=PrefillConfig(instance="prefill", registry="tcp://127.0.0.1:1"),
            ports=replace(system_ports(), **ports),
            now=lambda: 0.0,
            dispatch=self.events.append,
            start_task=start_task,
            times=StageTimes(),
            pulse=Pulse(lambda: 0.0, lambda: False, lambda _: None),
            anomalies=AnomalyLog(log, lambda: 0.0),
        )
        self._waits = DeviceWaits(context)

    def wait(self, seq: int = 0) -> Device:
        """Start the wait of a piece for its own device event."""
        self.devices.append(Device())
        self._waits.start(AwaitData(DeliveryId(1, DECODE, 1), seq, self.devices[-1]))
        return self.devices[-1]


@asynccontextmanager
async def running(**ports: Any) -> AsyncIterator[Bench]:
    async with anyio.create_task_group() as tasks:
        bench = Bench(tasks, **ports)
        try:
            yield bench
        finally:
            for device in bench.devices:
                device.finish()


def ready(seq: int) -> DataReady:
    return DataReady(DeliveryId(1, DECODE, 1), seq, None)


async def test_the_core_hears_when_each_device_is_done() -> None:
    async with running() as bench:
        slow, quick = bench.wait(0), bench.wait(1)
        await until(lambda: slow.num_waiting)
        quick.finish()
        await until(lambda: bench.events)
        assert bench.events == [ready(1)]
        slow.finish()
        await until(lambda: len(bench.events) == 2)
        assert bench.events[1] == ready(0)


async def test_a_device_that_fails_fails_its_piece_only() -> None:
    async with running() as bench:
        bench.wait(4).finish(RuntimeError("illegal memory access"))
        await until(lambda: bench.events)
        (told,) = bench.events
        assert isinstance(told, DataReady)
        assert (told.delivery, told.wait) == (DeliveryId(1, DECODE, 1), 4)
        assert told.failure is not None
        assert (told.failure.reason, told.failure.stage) == (FailureReason.NOT_READY, Stage.ENQUEUE)
        assert told.failure.detail == "RuntimeError: illegal memory access"
        bench.wait(5).finish()
        await until(lambda: len(bench.events) == 2)
        assert bench.events[1] == ready(5)


async def test_without_a_thread_a_device_is_not_waited_for_on_the_event_loop() -> None:
    """The device might depend on work that the event loop has yet to do."""

    async def no_thread(_: Callable[[], object]) -> None:
        raise ThreadShortage("cannot start a thread")

    async with running(run_in_thread=no_thread) as bench:
        device = bench.wait()
        await until(lambda: bench.events)
        (told,) = bench.events
        assert isinstance(told, DataReady)
        assert told.failure is not None
        assert told.failure.reason is FailureReason.NOT_READY
        assert not device.num_waiting


async def test_devices_leave_threads_for_other_work() -> None:
    async with running() as bench:
        devices = [bench.wait(seq) for seq in range(DEVICE_WAITS_AT_ONCE + 1)]
        await until(lambda: sum(device.num_waiting for device in devices) == DEVICE_WAITS_AT_ONCE)
        await anyio.wait_all_tasks_blocked()
        assert devices[-1].num_waiting == 0
        devices[0].finish()
        await until(lambda: devices[-1].num_waiting)


# Chunks ------------------------------------------------------------------------------------------------------------


def test_a_chunk_holds_the_pages_of_its_tokens() -> None:
    chunk = make_chunk(make_pool().layout, (2, 7), {"kv": [5, 2]})
    assert (chunk.tokens, dict(chunk.ranges), chunk.last, chunk.metadata) == ((2, 7), {"kv": (2, 7)}, False, b"")
    assert (chunk.pages["kv"].pages.tolist(), chunk.pages["kv"].first_token) == ([5, 2], 0)


@pytest.mark.parametrize("metadata", [b"token", bytearray(b"token"), memoryview(b"token")])
def test_the_last_chunk_carries_the_metadata(metadata: bytes) -> None:
    chunk = make_chunk(make_pool().layout, (0, 4), {"kv": [5]})
    last = finish_chunk(chunk, metadata, 5)
    assert (last.last, last.metadata, type(last.metadata)) == (True, b"token", bytes)
    assert (last.tokens, last.pages) == (chunk.tokens, chunk.pages)


@pytest.mark.parametrize(
    ("metadata", "values"),
    [
        (b"123456", {"num_bytes": 6, "limit": 5, "setting": "limits.metadata_bytes"}),
        ("token", {"type": "str"}),
        (None, {"type": "NoneType"}),
    ],
)
def test_metadata_that_cannot_travel_is_refused(metadata: Any, values: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="metadata") as caught:
        finish_chunk(make_chunk(make_pool().layout, (0, 4), {"kv": [5]}), metadata, 5)
    assert caught.value.values == values
