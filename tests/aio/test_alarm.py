"""Alarms whose deadline changes while they are set."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest

from kvflow.aio.alarm import Alarm
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SOON_S = 0.01
FAR_S = 1e6


class Deadlines:
    """A deadline that changes; counts how often it is read, and records how late the alarm fires."""

    def __init__(self) -> None:
        self.next: float | None = None
        self.following: list[float] = []
        self.late_s: list[float] = []
        self.num_asked = 0
        self.lag_s: list[float] = []
        self.alarm = Alarm(self.ask, self.on_due, monotonic, self.lag_s.append)

    def ask(self) -> float | None:
        self.num_asked += 1
        return self.next

    def set(self, after_s: float | None) -> None:
        self.next = None if after_s is None else monotonic() + after_s
        self.alarm.check()

    def on_due(self) -> None:
        assert self.next is not None
        self.late_s.append(monotonic() - self.next)
        self.next = monotonic() + self.following.pop(0) if self.following else None


@contextmanager
def deadlines_of_a_test() -> Iterator[Deadlines]:
    deadlines = Deadlines()
    try:
        yield deadlines
    finally:
        deadlines.alarm.close()


@pytest.mark.parametrize("before_s", [None, FAR_S], ids=["from none", "from a far one"])
@pytest.mark.parametrize("after_s", [SOON_S, 0.0, -5.0], ids=["soon", "now", "long past"])
async def test_a_deadline_that_becomes_earlier_is_kept(before_s: float | None, after_s: float) -> None:
    with deadlines_of_a_test() as deadlines:
        deadlines.set(before_s)
        deadlines.set(after_s)
        await until(lambda: deadlines.late_s)
        assert len(deadlines.late_s) == 1


async def test_no_deadline_is_told_before_its_time() -> None:
    with deadlines_of_a_test() as deadlines:
        deadlines.following = [SOON_S / 10] * 20
        deadlines.set(SOON_S)
        await until(lambda: len(deadlines.late_s) == 21)
        assert min(deadlines.late_s) >= 0


async def test_lag_is_how_long_the_event_loop_was_busy() -> None:
    with deadlines_of_a_test() as deadlines:
        deadlines.set(-5.0)  # late, but not because of the event loop
        await until(lambda: deadlines.late_s)
        deadlines.set(SOON_S)
        time.sleep(3 * SOON_S)  # noqa: ASYNC251 - it is busy
        await until(lambda: len(deadlines.late_s) == 2)
        assert len(deadlines.lag_s) == 2
        assert 2 * SOON_S <= max(deadlines.lag_s) < 5.0


async def test_a_deadline_that_is_put_off_is_told_at_its_new_time() -> None:
    with deadlines_of_a_test() as deadlines:
        deadlines.set(SOON_S)
        deadlines.set(4 * SOON_S)
        await until(lambda: deadlines.late_s)
        assert len(deadlines.late_s) == 1
        assert deadlines.late_s[0] >= 0


async def test_a_deadline_that_is_taken_back_is_not_told() -> None:
    with deadlines_of_a_test() as deadlines:
        deadlines.set(SOON_S)
        deadlines.set(None)
        asked = deadlines.num_asked
        await until(lambda: deadlines.num_asked > asked)  # the timer of the former deadline reads it
        assert not deadlines.late_s


async def test_only_an_earlier_deadline_costs_a_timer() -> None:
    with deadlines_of_a_test() as deadlines:
        deadlines.set(FAR_S)
        before = deadlines.alarm._timer
        for later_s in (FAR_S + 1, 2 * FAR_S, None):
            deadlines.set(later_s)
            assert deadlines.alarm._timer is before
        deadlines.set(FAR_S / 2)
        assert deadlines.alarm._timer is not before


async def test_an_alarm_can_be_checked_and_closed_by_its_own_call() -> None:
    due: list[int] = []

    def on_due() -> None:
        due.append(len(due))
        deadlines.set(SOON_S / 10)
        if len(due) == 5:
            deadlines.alarm.close()

    with deadlines_of_a_test() as deadlines:
        deadlines.alarm = Alarm(deadlines.ask, on_due, monotonic)
        deadlines.set(SOON_S)
        await until(lambda: len(due) == 5)
        deadlines.set(0.0)
        assert deadlines.alarm._timer is None
    assert due == list(range(5))


async def test_a_call_that_fails_is_reported_and_not_repeated_by_itself() -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []

    def on_due() -> None:
        raise ValueError("due")

    alarm = Alarm(lambda: 0.0, on_due, monotonic)
    loop.set_exception_handler(lambda _, context: reported.append(context))
    try:
        alarm.check()
        await until(lambda: reported)
        assert alarm._timer is None
        alarm.check()
        await until(lambda: len(reported) == 2)
    finally:
        loop.set_exception_handler(None)
    assert [str(context["exception"]) for context in reported] == ["due", "due"]


class _Shifted(asyncio.SelectorEventLoop):
    """An event loop whose clock starts elsewhere."""

    def time(self) -> float:
        return super().time() + FAR_S


def test_the_event_loop_may_have_a_clock_of_its_own() -> None:
    async def wait_for_a_deadline() -> int:
        with deadlines_of_a_test() as deadlines:
            deadlines.set(SOON_S)
            await until(lambda: deadlines.late_s)
            return deadlines.num_asked

    loop = _Shifted()
    try:
        assert loop.run_until_complete(wait_for_a_deadline()) < 20
    finally:
        loop.close()
