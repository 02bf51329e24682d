"""Deadlines that change while the clock sleeps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvflow.aio.clock import Clock, now

pytestmark = pytest.mark.anyio

SOON_S = 0.01
FAR_S = 1e6


class Deadlines:
    """A changing deadline, how often it was asked for, and when it was due."""

    def __init__(self) -> None:
        self.next: float | None = None
        self.following: list[float] = []
        self.due: list[float] = []
        self.num_asked = 0
        self.hit = anyio.Event()
        self.clock = Clock(self.ask, self.on_due)

    def ask(self) -> float | None:
        self.num_asked += 1
        return self.next

    def set(self, after_s: float | None) -> None:
        self.next = None if after_s is None else now() + after_s
        self.clock.check()

    def on_due(self) -> None:
        assert self.next is not None
        self.due.append(now() - self.next)
        self.next = now() + self.following.pop(0) if self.following else None
        self.hit.set()


@asynccontextmanager
async def running(deadlines: Deadlines) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.clock.run)
        await anyio.wait_all_tasks_blocked()
        yield
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("before_s", [None, FAR_S], ids=["from none", "from a far one"])
async def test_a_deadline_that_becomes_earlier_is_kept(before_s: float | None) -> None:
    deadlines = Deadlines()
    deadlines.set(before_s)
    async with running(deadlines):
        deadlines.set(SOON_S)
        await deadlines.hit.wait()
    assert len(deadlines.due) == 1


@pytest.mark.parametrize("after_s", [SOON_S, 0.0, -5.0], ids=["soon", "now", "long past"])
async def test_a_deadline_from_before_the_clock_ran_is_kept(after_s: float) -> None:
    deadlines = Deadlines()
    deadlines.set(after_s)
    async with running(deadlines):
        await deadlines.hit.wait()
    assert len(deadlines.due) == 1


async def test_no_deadline_is_called_before_its_time() -> None:
    deadlines = Deadlines()
    deadlines.following = [SOON_S / 10] * 20
    async with running(deadlines):
        deadlines.set(SOON_S)
        while len(deadlines.due) < 21:
            deadlines.hit = anyio.Event()
            await deadlines.hit.wait()
    assert min(deadlines.due) >= 0


async def test_a_deadline_that_is_put_off_is_kept_at_its_new_time() -> None:
    calls: list[bool] = []
    on_time = anyio.Event()
    deadlines = Deadlines()

    def on_due() -> None:
        assert deadlines.next is not None
        calls.append(now() >= deadlines.next)
        if calls[-1]:
            deadlines.next = None
            on_time.set()

    deadlines.clock = Clock(deadlines.ask, on_due)
    async with running(deadlines):
        deadlines.set(SOON_S)
        await anyio.wait_all_tasks_blocked()
        deadlines.set(4 * SOON_S)
        await on_time.wait()
    assert calls == [True]


async def test_checking_wakes_the_clock_only_for_an_earlier_deadline() -> None:
    deadlines = Deadlines()
    async with running(deadlines):
        deadlines.set(FAR_S)
        await anyio.wait_all_tasks_blocked()
        asked = deadlines.num_asked
        for later_s in (FAR_S + 1, 2 * FAR_S, None):
            deadlines.set(later_s)
            await anyio.wait_all_tasks_blocked()
        assert deadlines.num_asked == asked + 3  # by `check`, never by the clock itself
        deadlines.set(FAR_S / 2)
        await anyio.wait_all_tasks_blocked()
        assert deadlines.num_asked > asked + 4  # by `check`, and by the clock that it woke
        assert not deadlines.due


async def test_a_clock_can_be_checked_from_its_own_call() -> None:
    deadlines = Deadlines()
    due: list[int] = []
    done = anyio.Event()

    def on_due() -> None:
        due.append(len(due))
        deadlines.set(SOON_S / 10 if len(due) < 5 else None)
        if len(due) == 5:
            done.set()

    deadlines.clock = Clock(deadlines.ask, on_due)
    async with running(deadlines):
        deadlines.set(SOON_S)
        await done.wait()
    assert due == list(range(5))


async def test_a_failure_in_the_call_ends_the_clock() -> None:
    def on_due() -> None:
        raise ValueError("due")

    clock = Clock(lambda: 0.0, on_due)
    with pytest.raises(ValueError, match="due"):
        await clock.run()


class _Shifted(asyncio.SelectorEventLoop):
    """An event loop whose clock has another origin."""

    def time(self) -> float:
        return super().time() + FAR_S


def test_the_event_loop_may_have_a_clock_of_its_own() -> None:
    async def wait_for_a_deadline() -> int:
        deadlines = Deadlines()
        async with running(deadlines):
            deadlines.set(SOON_S)
            await deadlines.hit.wait()
        return deadlines.num_asked

    loop = _Shifted()
    try:
        assert loop.run_until_complete(wait_for_a_deadline()) < 20
    finally:
        loop.close()
