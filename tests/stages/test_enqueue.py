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
from kvflow.stages.enqueue import Enqueue
from kvflow.state.events import Event, PlanFailed
from kvflow.state.queue import ChunkJob
from kvflow.state.window import Cost
from kvflow.wire.messages import PeerId
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


SMALL = Cost(1, 1)


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
async def running(limits: Limits | None = None, cost: Cost = SMALL) -> AsyncIterator[Bench]:
    events: list[Event] = []
    into, out = anyio.create_memory_object_stream[ChunkJob](16)
    async with into, out, anyio.create_task_group() as tasks:
        here = context(events, tasks, limits=limits)

        async def pass_on() -> None:
            while (passed := bench.stage.next_job()) is not None:
                into.send_nowait(passed)

        def on_change() -> None:
            tasks.start_soon(pass_on)

        bench = Bench(Enqueue(here, lambda _: cost, on_change), out, events)
        try:
            yield bench
        finally:
            for device in bench.devices:
                device.finish()
            tasks.cancel_scope.cancel()


async def test_jobs_carry_what_was_asked_for() -> None:
    async with running(cost=Cost(7, 2)) as bench:
        bench.stage.put(effect(delivery(), 3, last=True))
        passed = await bench.jobs.receive()
        assert (passed.delivery, passed.seq, passed.ranges) == (delivery(), 3, {"kv": (3, 4)})
        assert (passed.cost, passed.is_last) == (Cost(7, 2), True)


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
        await anyio.wait_all_tasks_blocked()
        assert bench.stage.num_not_ready == 3
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


async def test_dropped_chunks_that_nobody_has_looked_at_are_not_passed_on() -> None:
    """Not even those that come in one step with their end."""
    async with running() as bench:
        bench.stage.put(effect(delivery(), 0))
        bench.stage.drop(delivery())
        bench.stage.put(effect(delivery(room=2), 1))
        assert await bench.passed(1) == [1]
        assert bench.stage.num_queued == 0


async def test_chunk_that_fits_goes_when_the_one_before_it_is_dropped() -> None:
    async with running(Limits(bytes_per_peer=100)) as bench:
        costs = iter([Cost(60, 1), Cost(50, 1), Cost(40, 1)])
        bench.stage._cost = lambda _: next(costs)
        for room in (1, 2, 3):
            bench.stage.put(effect(delivery(room=room), room))
        assert await bench.passed(1) == [1]
        await anyio.wait_all_tasks_blocked()
        assert bench.jobs.statistics().current_buffer_used == 0
        bench.stage.drop(delivery(room=2))
        assert await bench.passed(1) == [3]


@asynccontextmanager
async def waiting_for(bench: Bench, *peers: PeerId) -> AsyncIterator[anyio.Event]:
    """An engine that waits for room at some peers; the event says that it has it."""
    has_room = anyio.Event()

    async def wait() -> None:
        await bench.stage.wait_for_room(lambda: peers)
        has_room.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        yield has_room
        tasks.cancel_scope.cancel()


async def settle_wait(bench: Bench, free: Callable[[], object]) -> None:
    """Check that the engine waits for room until something frees it."""
    async with waiting_for(bench, PEERS[0]) as has_room:
        assert not has_room.is_set()
        free()
        with anyio.fail_after(5):
            await has_room.wait()
    assert not bench.stage._gates


async def fill(bench: Bench, *peers: PeerId, count: int = 2) -> list[ChunkJob]:
    """Put chunks to some peers, of which all but the first wait for credit; give the first ones."""
    for peer in peers:
        for seq in range(count):
            bench.stage.put(effect(delivery(peer), seq))
    return [await bench.jobs.receive() for _ in peers]


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


async def test_engine_goes_on_when_the_device_of_what_is_queued_fails() -> None:
    async with running(Limits(queued_chunks=1)) as bench:
        device = bench.device()
        bench.stage.put(effect(delivery(), 0, device))
        await settle_wait(bench, lambda: device.finish(RuntimeError("illegal memory access")))


async def test_engine_waits_for_peers_of_its_room_only() -> None:
    async with running(Limits(posts_per_peer=1, queued_chunks=1)) as bench:
        await fill(bench, PEERS[0])
        async with waiting_for(bench, PEERS[1], PEERS[2]) as has_room:
            assert has_room.is_set()


async def test_engine_waits_until_every_peer_of_its_room_has_room() -> None:
    async with running(Limits(posts_per_peer=1, queued_chunks=1)) as bench:
        slow, slower = await fill(bench, PEERS[0], PEERS[1])
        async with waiting_for(bench, PEERS[0], PEERS[1], PEERS[2]) as has_room:
            bench.stage.end(slow)
            await anyio.wait_all_tasks_blocked()
            assert not has_room.is_set()
            bench.stage.end(slower)
            with anyio.fail_after(5):
                await has_room.wait()


async def test_engines_get_room_in_the_order_in_which_they_came() -> None:
    """One chunk leaves, one engine goes on; who comes while others wait waits behind them."""
    async with running(Limits(posts_per_peer=1, queued_chunks=1)) as bench:
        (under_way,) = await fill(bench, PEERS[0])
        offered: list[int] = []

        async def offer(room: int) -> None:
            await bench.stage.wait_for_room(lambda: PEERS[:1])
            offered.append(room)
            bench.stage.put(effect(delivery(room=room), room))

        async with anyio.create_task_group() as tasks:
            for room in (5, 3, 4):
                tasks.start_soon(offer, room)
                await anyio.wait_all_tasks_blocked()
            for expected in ([5], [5, 3], [5, 3, 4]):
                bench.stage.end(under_way)
                popped = bench.stage.next_job()
                assert popped is not None
                under_way = popped
                with anyio.CancelScope() as newcomer:
                    newcomer.cancel()
                    await bench.stage.wait_for_room(lambda: PEERS[:1])
                assert newcomer.cancelled_caught
                await anyio.wait_all_tasks_blocked()
                assert offered == expected
        assert not bench.stage._gates
