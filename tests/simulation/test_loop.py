"""Virtual time, and processes in it that die, stop and continue."""

import asyncio
import gc
from collections.abc import Iterator

import anyio
import pytest

from simulation.engines import DeviceEvent, cancelled_at
from simulation.loop import Process, Violation, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    one = VirtualLoop()
    yield one
    one.close()


def process_of(loop: VirtualLoop) -> Process:
    return Process(loop, "P", "P")


async def tick(lines: list[str], every_s: float) -> None:
    while True:
        lines.append(f"P {asyncio.get_running_loop().time():.1f}")
        await anyio.sleep(every_s)


def test_time_jumps_to_the_next_timer(loop: VirtualLoop) -> None:
    lines: list[str] = []
    process_of(loop).start(lambda: tick(lines, 3600.0))
    loop.advance(7200.0)
    assert lines == ["P 0.0", "P 3600.0", "P 7200.0"]
    assert loop.now == 7200.0


def test_anyio_works_as_on_a_real_loop(loop: VirtualLoop) -> None:
    async def main() -> None:
        with anyio.move_on_after(1.0) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
        lines.append(str(scope.cancelled_caught))

    lines: list[str] = []
    process = process_of(loop).start(main)
    loop.advance(2.0)
    assert lines == ["True"]
    assert not process.is_alive
    assert process.exit is None


def test_a_killed_process_runs_nothing_any_more_not_even_its_cleanup(loop: VirtualLoop) -> None:
    async def main() -> None:
        try:
            await tick(lines, 1.0)
        finally:
            lines.append("cleanup")

    lines: list[str] = []
    process = process_of(loop).start(main)
    loop.advance(1.5)
    process.kill()
    loop.advance(5.0)
    assert lines == ["P 0.0", "P 1.0"]


def test_a_stopped_process_runs_everything_later(loop: VirtualLoop) -> None:
    lines: list[str] = []
    process = process_of(loop).start(lambda: tick(lines, 1.0))
    loop.advance(0.5)
    process.pause()
    loop.advance(2.2)
    assert lines == ["P 0.0"]
    process.resume()
    loop.advance(1.0)
    assert lines == ["P 0.0", "P 2.7", "P 3.7"]
    assert process.stopped_s == pytest.approx(2.2)


def test_a_clock_that_stands_still_puts_timers_off(loop: VirtualLoop) -> None:
    lines: list[str] = []
    process = process_of(loop).start(lambda: tick(lines, 1.0))
    loop.advance(0.5)
    process.pause(stops_clock=True)
    loop.advance(10.0)
    process.resume()
    loop.advance(0.4)
    assert lines == ["P 0.0"]
    loop.advance(1.2)
    assert lines == ["P 0.0", "P 1.0", "P 2.0"]
    assert process.now() == pytest.approx(loop.now - 10.0)


def test_an_exception_that_nobody_catches_stops_the_run(loop: VirtualLoop) -> None:
    def fail() -> None:
        raise ValueError("of a callback")

    process = process_of(loop)
    loop.call_in(1.0, process.call, fail)
    with pytest.raises(Violation, match=r"P: .*of a callback"):
        loop.advance(2.0)


def test_a_process_that_spins_is_found(loop: VirtualLoop) -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110 - which is the fault
            await asyncio.sleep(0)

    process_of(loop).start(spin)
    with pytest.raises(Violation, match="time stands still"):
        loop.advance(1.0)


def test_real_threads_are_refused(loop: VirtualLoop) -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    process = process_of(loop).start(main)
    loop.advance(1.0)
    assert isinstance(process.exit, Violation)


def test_work_in_a_thread_takes_time_and_waits_for_devices(loop: VirtualLoop) -> None:
    async def main() -> None:
        lines.append(await process.run_in_thread(wait, 0.25))
        lines.append(f"{loop.now:.2f}")

    def wait() -> str:
        event.synchronize()
        return f"done at {loop.now:.2f}"

    lines: list[str] = []
    event = DeviceEvent()
    process = process_of(loop).start(main)
    loop.call_in(1.0, event.happen)
    loop.advance(2.0)
    assert lines == ["done at 1.00", "1.00"]


def test_a_task_can_be_cancelled_at_each_of_its_await_points(loop: VirtualLoop) -> None:
    async def work() -> bool:
        try:
            await anyio.sleep(1.0)
            await anyio.sleep(1.0)
        except asyncio.CancelledError:
            lines.append(f"cancelled at {loop.now:.1f}")
            raise
        lines.append("done")
        return True

    async def main() -> None:
        for number in (1, 2, 3):
            task = process.spawn(cancelled_at(work(), number))
            await asyncio.wait([task])
            lines.append(f"was cancelled: {task.cancelled()}")

    lines: list[str] = []
    process = process_of(loop).start(main)
    loop.advance(10.0)
    assert lines == [
        "cancelled at 0.0",
        "was cancelled: True",
        "cancelled at 1.0",
        "was cancelled: True",
        "done",
        "was cancelled: False",
    ]


def test_tasks_that_are_started_by_the_cleanup_of_others_are_ended_too(recwarn: pytest.WarningsRecorder) -> None:
    async def leave() -> None:
        await anyio.sleep_forever()

    async def main() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            await asyncio.ensure_future(leave())

    loop = VirtualLoop()
    process = process_of(loop)
    tasks = [process.spawn(main()) for _ in range(600)]  # enough that the loop drops finished tasks meanwhile
    loop.advance(1.0)
    loop.close()
    del tasks
    gc.collect()
    assert not [str(one.message) for one in recwarn]
