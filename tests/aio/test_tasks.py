"""Background tasks of an object that is opened and closed like a file."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest

from kvflow.aio.tasks import OwnedTasks
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Recorder:
    """Owned tasks, with a log of their starts, ends and crashes."""

    def __init__(self) -> None:
        self.crashes: list[Exception] = []
        self.log: list[str] = []
        self.tasks = OwnedTasks(self.crashes.append)

    async def live(self, name: str) -> None:
        """Run until cancelled."""
        self.log.append(f"{name} started")
        try:
            await anyio.sleep_forever()
        finally:
            self.log.append(f"{name} ended")

    async def fail(self, error: Exception) -> None:
        raise error

    async def fail_at_the_end(self, error: Exception) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise error

    async def settle(self) -> None:
        await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def opened() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    await recorder.tasks.open()
    yield recorder


async def in_another_task(act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.create_task(_run(act))


async def _run(act: Callable[[], Awaitable[None]]) -> None:
    await act()


async def test_task_that_is_started_early_runs_once_the_group_is_open() -> None:
    """A peer's message may come between the rank's sockets and its tasks."""
    recorder = Recorder()
    opening = asyncio.create_task(recorder.tasks.open())
    recorder.tasks.start(recorder.live, "early")  # the host task has not run yet
    await opening
    await recorder.settle()
    assert recorder.log == ["early started"]
    await recorder.tasks.close()
    assert recorder.log == ["early started", "early ended"]


async def test_tasks_run_until_they_are_closed() -> None:
    async with opened() as recorder:
        for name in ("a", "b"):
            recorder.tasks.start(recorder.live, name)
        await recorder.settle()
        assert recorder.log == ["a started", "b started"]
        await recorder.tasks.close()
        assert sorted(recorder.log[2:]) == ["a ended", "b ended"]
        assert not recorder.crashes


async def test_a_task_may_end_by_itself() -> None:
    ended = anyio.Event()

    async def end() -> None:
        ended.set()

    async with opened() as recorder:
        recorder.tasks.start(end)
        await ended.wait()
        recorder.tasks.start(recorder.live, "later")
        await recorder.settle()
        await recorder.tasks.close()
        assert recorder.log == ["later started", "later ended"]


async def test_closing_waits_for_the_clean_up_of_tasks() -> None:
    cleaned: list[str] = []

    async def clean_up() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                cleaned.append("up")

    async with opened() as recorder:
        recorder.tasks.start(clean_up)
        await recorder.settle()
        await recorder.tasks.close()
        assert cleaned == ["up"]


async def test_owners_are_opened_and_closed_by_any_task_in_any_order() -> None:
    recorders = [Recorder() for _ in range(4)]
    for recorder in recorders:
        await in_another_task(recorder.tasks.open)
        recorder.tasks.start(recorder.live, "task")
    await anyio.wait_all_tasks_blocked()
    for index in (2, 0, 3, 1):
        await in_another_task(recorders[index].tasks.close)
        assert recorders[index].log == ["task started", "task ended"]
    assert not any(recorder.crashes for recorder in recorders)


async def test_owners_may_be_nested_in_task_groups_that_end_earlier() -> None:
    recorder = Recorder()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.tasks.open)
    async with anyio.create_task_group() as tasks, anyio.create_task_group():
        recorder.tasks.start(recorder.live, "task")
        await recorder.settle()
        tasks.start_soon(recorder.tasks.close)
    assert recorder.log == ["task started", "task ended"]


async def test_cancelling_the_user_does_not_reach_the_tasks() -> None:
    recorder = Recorder()
    with anyio.CancelScope() as scope:
        await recorder.tasks.open()
        recorder.tasks.start(recorder.live, "before")
        scope.cancel()
        recorder.tasks.start(recorder.live, "after")
        await anyio.sleep_forever()
    await recorder.settle()
    assert recorder.log == ["before started", "after started"]
    await recorder.tasks.close()
    assert sorted(recorder.log[2:]) == ["after ended", "before ended"]


async def test_a_user_that_is_cancelled_closes_under_a_shield() -> None:
    recorder = Recorder()
    with anyio.CancelScope() as scope:
        await recorder.tasks.open()
        recorder.tasks.start(recorder.live, "task")
        await recorder.settle()
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await recorder.tasks.close()
        assert recorder.log == ["task started", "task ended"]


async def test_opening_can_be_cancelled() -> None:
    recorder = Recorder()
    before = asyncio.all_tasks()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await recorder.tasks.open()
    await recorder.settle()
    assert scope.cancelled_caught
    assert asyncio.all_tasks() == before


async def test_a_crash_is_reported_at_once_and_raised_at_close() -> None:
    error = ValueError("crash")
    async with opened() as recorder:
        recorder.tasks.start(recorder.live, "other")
        recorder.tasks.start(recorder.fail, error)
        await until(lambda: recorder.log == ["other started", "other ended"])
        assert recorder.crashes == [error]
        with pytest.raises(ExceptionGroup) as caught:
            await recorder.tasks.close()
        assert caught.value.exceptions == (error,)


async def test_several_crashes_are_reported_once_and_raised_together() -> None:
    first, second, third = ValueError("first"), KeyError("second"), OSError("third")
    async with opened() as recorder:
        recorder.tasks.start(recorder.fail_at_the_end, third)
        await recorder.settle()
        recorder.tasks.start(recorder.fail, first)
        recorder.tasks.start(recorder.fail, second)
        await recorder.settle()
        assert recorder.crashes == [first]
        with pytest.raises(ExceptionGroup) as caught:
            await recorder.tasks.close()
        assert set(caught.value.exceptions) == {first, second, third}


async def test_a_task_that_fails_while_it_is_ended_is_a_crash_too() -> None:
    error = ValueError("clean-up")
    async with opened() as recorder:
        recorder.tasks.start(recorder.fail_at_the_end, error)
        await recorder.settle()
        with pytest.raises(ExceptionGroup):
            await recorder.tasks.close()
        assert recorder.crashes == [error]


async def test_starting_after_a_crash_does_nothing() -> None:
    async with opened() as recorder:
        recorder.tasks.start(recorder.fail, ValueError("crash"))
        await recorder.settle()
        recorder.tasks.start(recorder.live, "late")
        await recorder.settle()
        with pytest.raises(ExceptionGroup):
            await recorder.tasks.close()
        assert not recorder.log


async def test_the_report_of_a_crash_may_start_tasks_and_they_do_not_run() -> None:
    log: list[str] = []

    async def note() -> None:
        log.append("ran")

    async def crash() -> None:
        raise ValueError("crash")

    tasks = OwnedTasks(lambda _: tasks.start(note))
    await tasks.open()
    tasks.start(crash)
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(ExceptionGroup):
        await tasks.close()
    assert not log


async def test_tasks_may_start_tasks() -> None:
    async with opened() as recorder:

        async def start_another() -> None:
            recorder.tasks.start(recorder.live, "second")

        recorder.tasks.start(start_another)
        await recorder.settle()
        assert recorder.log == ["second started"]
        await recorder.tasks.close()


async def test_closing_before_a_task_has_begun() -> None:
    async with opened() as recorder:
        recorder.tasks.start(recorder.live, "task")
        await recorder.tasks.close()
        assert recorder.log in ([], ["task started", "task ended"])
        assert not recorder.crashes


async def test_what_fails_outside_of_the_tasks_ends_them() -> None:
    async with opened() as recorder:
        recorder.tasks.start(recorder.live, "one")
        await recorder.settle()
        error = ValueError("from a callback")
        recorder.tasks.fail(error)
        recorder.tasks.fail(ValueError("too late"))
        await recorder.settle()
        assert recorder.crashes == [error]
        with pytest.raises(ExceptionGroup):
            await recorder.tasks.close()
        assert recorder.log == ["one started", "one ended"]


async def test_what_fails_before_the_tasks_are_open_ends_them_then() -> None:
    recorder = Recorder()
    error = ValueError("early")
    recorder.tasks.fail(error)
    assert not recorder.crashes
    await recorder.tasks.open()
    await recorder.settle()
    assert recorder.crashes == [error]
    with pytest.raises(ExceptionGroup):
        await recorder.tasks.close()


async def test_a_callback_of_another_thread_starts_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """If sniffio is installed, as with many HTTP clients, anyio finds its event loop in a context variable only."""
    library: ContextVar[str] = ContextVar("library")
    library.set("asyncio")
    sniffio = SimpleNamespace(current_async_library=library.get, AsyncLibraryNotFoundError=LookupError)
    monkeypatch.setattr("anyio._core._eventloop.sniffio", sniffio)
    started, failed = asyncio.Event(), list[Exception]()
    tasks = OwnedTasks(failed.append)
    await tasks.open()

    async def run() -> None:
        started.set()

    thread = threading.Thread(target=asyncio.get_running_loop().call_soon_threadsafe, args=(tasks.start, run))
    thread.start()
    await asyncio.wait_for(started.wait(), 10)
    thread.join()
    await tasks.close()
