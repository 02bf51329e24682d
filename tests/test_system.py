"""The real ports of a rank."""

import threading
import time
from functools import partial

import anyio
import pytest

from kvflow.errors import ThreadShortage
from kvflow.system import MAX_THREADS, system_ports
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_clock_and_random_bytes() -> None:
    ports = system_ports()
    before = time.monotonic()
    assert before <= ports.now() <= time.monotonic()
    assert len(ports.random_bytes(16)) == 16
    assert ports.random_bytes(16) != ports.random_bytes(16)


async def test_function_runs_in_a_thread() -> None:
    assert await system_ports().run_in_thread(threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("why"), RuntimeError("why"), ThreadShortage("why")])
async def test_error_of_the_function_is_raised(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error), match="why") as caught:
        await system_ports().run_in_thread(fail)
    assert caught.value is error


async def test_cancelled_wait_goes_on_until_the_function_has_ended() -> None:
    may_end = threading.Event()
    ended: list[bool] = []

    def run() -> None:
        may_end.wait()
        ended.append(True)

    async def call() -> None:
        await system_ports().run_in_thread(run)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        threading.Timer(0.01, may_end.set).start()
    assert ended == [True]


async def test_without_threads_the_function_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    run = system_ports().run_in_thread

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for _ in range(2 * MAX_THREADS):  # a failed call must not use up a thread
            with pytest.raises(ThreadShortage) as caught:
                await run(partial(called.append, True))
    assert caught.value.values == {"detail": "can't start new thread"}
    assert not called
    await run(partial(called.append, True))
    assert called == [True]


async def test_no_more_functions_run_at_once_than_there_are_threads() -> None:
    ports = system_ports()
    may_end = threading.Event()
    running: list[int] = []

    def wait() -> None:
        running.append(1)
        may_end.wait()

    async def call() -> None:
        await ports.run_in_thread(wait)

    async with anyio.create_task_group() as tasks:
        for _ in range(MAX_THREADS + 10):
            tasks.start_soon(call)
        await until(lambda: len(running) == MAX_THREADS)
        await anyio.wait_all_tasks_blocked()
        assert len(running) == MAX_THREADS
        may_end.set()
    assert len(running) == MAX_THREADS + 10
