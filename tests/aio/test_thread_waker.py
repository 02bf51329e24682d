"""Any thread can wake the event loop without blocking."""

import asyncio
import sys
import threading

import anyio
import anyio.to_thread
import pytest

from benchmarks.resources import num_files
from kvflow.aio.thread_waker import ThreadWaker
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_THREADS = 4
CALLS_PER_THREAD = 500


@pytest.fixture(params=["linux", "elsewhere"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the system to test: Linux, or one without `eventfd`."""
    if request.param == "elsewhere":
        monkeypatch.setattr(sys, "platform", "elsewhere")
    return str(request.param)


@pytest.mark.usefixtures("system")
async def test_every_call_from_any_thread_is_made_once_on_the_event_loop_in_order() -> None:
    doorbell = ThreadWaker()
    made: list[tuple[int, int]] = []
    threads = set()
    has_all = anyio.Event()

    def make(thread: int, number: int) -> None:
        threads.add(threading.get_ident())
        made.append((thread, number))
        if len(made) == NUM_THREADS * CALLS_PER_THREAD:
            has_all.set()

    def ring(thread: int) -> None:
        for number in range(CALLS_PER_THREAD):
            doorbell.call_soon(lambda number=number: make(thread, number))  # type: ignore[misc]

    async with anyio.create_task_group() as tasks:
        for thread in range(NUM_THREADS):
            tasks.start_soon(anyio.to_thread.run_sync, ring, thread)
    await has_all.wait()
    for thread in range(NUM_THREADS):
        assert [number for of, number in made if of == thread] == list(range(CALLS_PER_THREAD))
    assert threads == {threading.get_ident()}
    doorbell.close()


async def test_the_thread_that_rings_keeps_the_interpreter() -> None:
    """The event loop does not run between two rings unless the thread releases the GIL itself."""
    doorbell = ThreadWaker()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    seen: list[list[int]] = []
    made: list[int] = []

    def ring() -> None:
        for number in range(100):
            doorbell.call_soon(lambda number=number: made.append(number))  # type: ignore[misc]
        seen.append(list(made))

    try:
        await anyio.to_thread.run_sync(ring)
    finally:
        sys.setswitchinterval(interval_s)
    assert seen == [[]]
    await until(lambda: len(made) == 100)
    doorbell.close()


@pytest.mark.usefixtures("system")
async def test_closing_makes_what_is_left_and_gives_the_descriptor_back() -> None:
    before = num_files()
    doorbell = ThreadWaker()
    made: list[str] = []
    doorbell.call_soon(lambda: made.append("left"))
    doorbell.close()
    await asyncio.sleep(0)
    assert made == ["left"]
    await until(lambda: num_files() <= before)
    doorbell.close()


@pytest.mark.usefixtures("system")
async def test_a_call_may_ask_for_another() -> None:
    doorbell = ThreadWaker()
    made: list[str] = []
    doorbell.call_soon(lambda: doorbell.call_soon(lambda: made.append("second")))
    await until(lambda: made)
    doorbell.close()


async def test_calls_that_come_at_once_wake_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    doorbell = ThreadWaker()
    written: list[int] = []
    write = doorbell._write

    def count(fd: int, value: int) -> int:
        written.append(value)
        return int(write(fd, value))

    monkeypatch.setattr(doorbell, "_write", count)
    made: list[int] = []
    for number in range(100):
        doorbell.call_soon(lambda number=number: made.append(number))  # type: ignore[misc]
    await until(lambda: len(made) == 100)
    doorbell.call_soon(lambda: made.append(100))
    await until(lambda: len(made) == 101)
    assert (made, written) == (list(range(101)), [1, 1])
    doorbell.close()


async def test_a_call_from_a_signal_handler_in_the_middle_of_another_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    doorbell = ThreadWaker()
    made: list[str] = []
    write = doorbell._write

    def be_interrupted(fd: int, value: int) -> int:
        monkeypatch.setattr(doorbell, "_write", write)
        doorbell.call_soon(lambda: made.append("handler"))
        return int(write(fd, value))

    monkeypatch.setattr(doorbell, "_write", be_interrupted)
    doorbell.call_soon(lambda: made.append("thread"))
    await until(lambda: len(made) == 2)
    doorbell.close()


async def test_a_signal_handler_that_raises_silences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    doorbell = ThreadWaker()
    made: list[str] = []
    write = doorbell._write

    def fail(fd: int, value: int) -> int:
        monkeypatch.setattr(doorbell, "_write", write)
        raise KeyboardInterrupt

    monkeypatch.setattr(doorbell, "_write", fail)
    with pytest.raises(KeyboardInterrupt):
        doorbell.call_soon(lambda: made.append("first"))
    doorbell.call_soon(lambda: made.append("second"))
    await until(lambda: "second" in made)
    doorbell.close()


async def test_the_event_loop_has_its_turn_although_calls_go_on() -> None:
    doorbell = ThreadWaker()
    turns = 0

    def again() -> None:
        if turns < 10:
            doorbell.call_soon(again)

    doorbell.call_soon(again)
    while turns < 10:  # hangs if the waker makes calls until none is left
        await asyncio.sleep(0)
        turns += 1
    doorbell.close()


@pytest.mark.usefixtures("system")
async def test_a_closed_one_takes_no_call() -> None:
    doorbell = ThreadWaker()
    doorbell.close()
    with pytest.raises(RuntimeError, match="closed"):
        doorbell.call_soon(lambda: None)


@pytest.mark.usefixtures("system")
def test_nobody_answers_after_the_event_loop() -> None:
    async def install() -> ThreadWaker:
        return ThreadWaker()

    doorbell = asyncio.run(install())
    with pytest.raises(RuntimeError, match="closed"):
        doorbell.call_soon(lambda: None)
    doorbell.close()


@pytest.mark.usefixtures("system")
async def test_a_call_that_raises_does_not_keep_the_others_from_being_made() -> None:
    doorbell = ThreadWaker()
    made: list[str] = []
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    error = ValueError("odd")

    def fail() -> None:
        raise error

    for call in (lambda: made.append("first"), fail, lambda: made.append("last")):
        doorbell.call_soon(call)
    await until(lambda: len(made) == 2)
    assert (made, told) == (["first", "last"], [error])
    doorbell.close()
