"""The second stage around its queue: devices, credit, and the pressure that reaches the engine."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream

from kvflow.config import Limits
from kvflow.errors import FailureReason, Stage
from kvflow.stages.enqueue import ChunkJob, Enqueue
from kvflow.state.events import Event, PlanFailed
from tests.stages.parts import PEERS, context, delivery, effect
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Device:
    """A device event that happens when the test says so, well or badly."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._happened.set()

    def synchronize(self) -> None:
        self._happened.wait()
        if self._error is not None:
            raise self._error


@dataclass
class Bench:
    """The stage, what it passes on, and what it tells the core."""

    stage: Enqueue
    jobs: MemoryObjectReceiveStream[ChunkJob]
    events: list[Event]
    devices: list[Device] = field(default_factory=list)

    def device(self) -> Device:
        self.devices.append(Device())
        return self.devices[-1]

    async def passed(self, count: int) -> list[int]:
        return [(await self.jobs.receive()).seq for _ in range(count)]


@asynccontextmanager
async def running(limits: Limits | None = None, bytes_per_token: int = 1) -> AsyncIterator[Bench]:
    events: list[Event] = []
    into, out = anyio.create_memory_object_stream[ChunkJob](16)
    async with into, out, anyio.create_task_group() as tasks:
        here = context(events, tasks, limits=limits)
        bench = Bench(Enqueue(here, into, lambda _: bytes_per_token), out, events)
        tasks.start_soon(bench.stage.run)
        try:
            yield bench
        finally:
            for device in bench.devices:
                device.finish()
            tasks.cancel_scope.cancel()


async def test_jobs_carry_what_was_asked_for() -> None:
    async with running(bytes_per_token=7) as bench:
        bench.stage.put(effect(delivery(), 3, last=True))
        passed = await bench.jobs.receive()
        assert (passed.delivery, passed.seq, passed.ranges) == (delivery(), 3, {"kv": (3, 4)})
        assert (passed.num_bytes, passed.is_last) == (7, True)


async def test_credit_that_comes_back_lets_the_next_go() -> None:
    async with running(Limits(posts_per_peer=1)) as bench:
        for seq in range(3):
            bench.stage.put(effect(delivery(), seq))
        for expected in range(3):
            passed = await bench.jobs.receive()
            assert passed.seq == expected
            await anyio.wait_all_tasks_blocked()
            assert bench.jobs.statistics().current_buffer_used == 0
            bench.stage.end(passed)


async def test_chunk_waits_for_its_device() -> None:
    async with running() as bench:
        device = bench.device()
        bench.stage.put(effect(delivery(), 0, device))
        await until(lambda: bench.stage.num_not_ready)
        bench.stage.put(effect(delivery(PEERS[1]), 1))
        assert await bench.passed(1) == [1]
        device.finish()
        assert await bench.passed(1) == [0]
        assert bench.stage.num_not_ready == 0


async def test_chunks_keep_their_order_when_devices_do_not() -> None:
    """`is_last` promises that no job of the delivery follows."""
    async with running() as bench:
        slow, quick = bench.device(), bench.device()
        bench.stage.put(effect(delivery(), 0, slow))
        bench.stage.put(effect(delivery(), 1, quick))
        bench.stage.put(effect(delivery(), 2, last=True))
        quick.finish()
        await until(lambda: bench.stage.num_not_ready < 2)
        await anyio.wait_all_tasks_blocked()
        slow.finish()
        assert await bench.passed(3) == [0, 1, 2]


async def test_device_that_fails_fails_its_chunk_only() -> None:
    async with running() as bench:
        device = bench.device()
        bench.stage.put(effect(delivery(), 4, device))
        device.finish(RuntimeError("illegal memory access"))
        await until(lambda: bench.events)
        (failed,) = bench.events
        assert isinstance(failed, PlanFailed)
        assert (failed.delivery, failed.seq) == (delivery(), 4)
        assert (failed.failure.reason, failed.failure.stage) == (FailureReason.NOT_READY, Stage.ENQUEUE)
        assert failed.failure.detail == "RuntimeError: illegal memory access"
        bench.stage.put(effect(delivery(), 5))
        assert await bench.passed(1) == [5]


async def test_dropped_chunks_are_not_passed_on() -> None:
    async with running(Limits(posts_per_peer=1)) as bench:
        for room in (1, 2):
            bench.stage.put(effect(delivery(room=room), 0))
            bench.stage.put(effect(delivery(room=room), 1))
        first = await bench.jobs.receive()
        bench.stage.drop(first.delivery)
        bench.stage.end(first)
        assert (await bench.jobs.receive()).delivery == delivery(room=2)
        assert len(bench.stage.queue) == 1


async def settle_wait(bench: Bench, free: Callable[[], object]) -> None:
    """Check that the engine waits for room until something frees it."""
    has_room = anyio.Event()

    async def wait() -> None:
        await bench.stage.wait_for_room()
        has_room.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not has_room.is_set()
        free()
        with anyio.fail_after(5):
            await has_room.wait()


async def test_engine_waits_while_the_queue_is_full() -> None:
    async with running(Limits(posts_per_peer=1, queued_chunks=2)) as bench:
        for seq in range(3):
            bench.stage.put(effect(delivery(), seq))
        first = await bench.jobs.receive()
        await settle_wait(bench, lambda: bench.stage.end(first))


async def test_engine_goes_on_when_what_is_queued_is_dropped() -> None:
    async with running(Limits(posts_per_peer=1, queued_chunks=1)) as bench:
        for seq in range(2):
            bench.stage.put(effect(delivery(), seq))
        await bench.passed(1)
        await settle_wait(bench, lambda: bench.stage.drop(delivery()))


@pytest.mark.parametrize("error", [None, RuntimeError("late")], ids=["ready", "failed"])
async def test_engine_goes_on_at_once_when_what_waits_for_a_device_is_dropped(error: Exception | None) -> None:
    """And whatever becomes of the device afterwards concerns nobody."""
    async with running(Limits(queued_chunks=1)) as bench:
        device = bench.device()
        bench.stage.put(effect(delivery(), 0, device))
        await until(lambda: bench.stage.num_not_ready)
        await settle_wait(bench, lambda: bench.stage.drop(delivery()))
        device.finish(error)
        bench.stage.put(effect(delivery(room=2), 7))
        assert await bench.passed(1) == [7]
        assert bench.events == []
