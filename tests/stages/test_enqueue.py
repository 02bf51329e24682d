"""Chunks that are checked, and wait for a device."""

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
from kvflow.stages.context import StageContext
from kvflow.stages.enqueue import DEVICE_WAITS_AT_ONCE, DeviceWaits, finish_chunk, make_chunk
from kvflow.state.effects import AwaitData
from kvflow.state.events import DataReady, DeliveryId, PrefillEvent
from kvflow.system import system_ports
from tests.support.cores import DECODE, PREFILL
from tests.support.instances import make_pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

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

    async def no_thread(_: Callable[[], object], **_options: bool) -> None:
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
