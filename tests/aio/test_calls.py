"""Calls from threads, made on the event loop."""

import asyncio
import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest

from kvflow.aio.calls import Calls
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_THREADS = 4
CALLS_PER_THREAD = 2_000


async def test_nothing_from_any_thread_is_lost_doubled_or_reordered() -> None:
    calls = Calls()
    made: list[tuple[int, int, int]] = []

    def make(thread: int, number: int) -> None:
        made.append((thread, number, threading.get_ident()))

    def put_all(thread: int) -> None:
        for number in range(CALLS_PER_THREAD):
            calls.put(lambda number=number: make(thread, number))  # type: ignore[misc]

    async with anyio.create_task_group() as tasks:
        for thread in range(NUM_THREADS):
            tasks.start_soon(anyio.to_thread.run_sync, put_all, thread)
    await until(lambda: len(made) == NUM_THREADS * CALLS_PER_THREAD)
    for thread in range(NUM_THREADS):
        assert [number for source, number, _ in made if source == thread] == list(range(CALLS_PER_THREAD))
    assert {ident for _, _, ident in made} == {threading.get_ident()}


async def test_a_call_may_put_another() -> None:
    calls = Calls()
    made: list[str] = []
    calls.put(lambda: calls.put(lambda: made.append("second")))
    await until(lambda: made)


async def test_a_call_that_fails_is_reported_and_the_next_is_made() -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    made: list[str] = []

    def fail() -> None:
        raise ValueError("call")

    calls = Calls()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    try:
        calls.put(fail)
        calls.put(lambda: made.append("next"))
        await until(lambda: made)
    finally:
        loop.set_exception_handler(None)
    assert [str(context["exception"]) for context in reported] == ["call"]


def test_a_loop_that_has_ended_makes_no_call_and_keeps_none() -> None:
    async def make() -> Calls:
        return Calls()

    calls = asyncio.run(make())
    made: list[str] = []
    for _ in range(2):
        calls.put(lambda: made.append("never"))
    assert (made, len(calls._calls)) == ([], 0)
