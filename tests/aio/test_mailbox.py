"""From any thread to the event loop."""

import asyncio
import threading

import anyio
import anyio.to_thread
import pytest

from kvflow.aio.mailbox import Mailbox

pytestmark = pytest.mark.anyio

NUM_THREADS = 4
ITEMS_PER_THREAD = 2000


async def test_all_there_is_is_taken_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    assert (len(mailbox), mailbox.take_nowait()) == (0, [])
    mailbox.put([1, 2])
    mailbox.put(iter([3]))
    mailbox.put([])
    assert len(mailbox) == 3
    assert await mailbox.take() == [1, 2, 3]
    assert (len(mailbox), mailbox.take_nowait()) == (0, [])


async def test_nothing_from_any_thread_is_lost_doubled_or_reordered() -> None:
    mailbox: Mailbox[tuple[int, int]] = Mailbox()

    def put_all(thread: int) -> None:
        for number in range(ITEMS_PER_THREAD):
            mailbox.put([(thread, number)])

    taken: list[tuple[int, int]] = []
    async with anyio.create_task_group() as tasks:
        for thread in range(NUM_THREADS):
            tasks.start_soon(anyio.to_thread.run_sync, put_all, thread)
        while len(taken) < NUM_THREADS * ITEMS_PER_THREAD:
            taken += await mailbox.take()
    for thread in range(NUM_THREADS):
        assert [number for source, number in taken if source == thread] == list(range(ITEMS_PER_THREAD))


async def test_a_taker_waits_through_wakes_without_items() -> None:
    mailbox: Mailbox[str] = Mailbox()
    taken: list[str] = []

    async def take() -> None:
        taken.extend(await mailbox.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
            mailbox.wake()
            mailbox.put([])
        await anyio.wait_all_tasks_blocked()
        assert not taken
        mailbox.put(["item"])
    assert taken == ["item"]


@pytest.mark.parametrize("from_thread", [False, True])
async def test_waiting_ends_with_a_wake(from_thread: bool) -> None:
    mailbox: Mailbox[str] = Mailbox()
    for _ in range(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mailbox.wait)
            await anyio.wait_all_tasks_blocked()
            if from_thread:
                await anyio.to_thread.run_sync(mailbox.wake)
            else:
                mailbox.wake()


async def test_waiting_is_over_at_once_if_there_are_items() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.put(["item"])
    await mailbox.wait()
    assert len(mailbox) == 1


async def test_a_cancelled_taker_loses_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mailbox.take)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        mailbox.put([1])
    assert await mailbox.take() == [1]


@pytest.mark.parametrize("from_thread", [False, True])
async def test_a_failure_reaches_a_taker_that_waits(from_thread: bool) -> None:
    mailbox: Mailbox[int] = Mailbox()
    error = ValueError("gone")

    async def take() -> None:
        with pytest.raises(ValueError, match="gone") as caught:
            await mailbox.take()
        assert caught.value is error

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        if from_thread:
            await anyio.to_thread.run_sync(mailbox.fail, error)
        else:
            mailbox.fail(error)


async def test_a_failure_comes_after_the_items_before_it_and_stays() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put([1, 2])
    mailbox.fail(ValueError("gone"))
    assert await mailbox.take() == [1, 2]
    for _ in range(3):
        with pytest.raises(ValueError, match="gone"):
            await mailbox.take()
        with pytest.raises(ValueError, match="gone"):
            await mailbox.wait()
    assert mailbox.take_nowait() == []


def test_a_loop_that_has_ended_takes_nothing_and_keeps_nothing() -> None:
    async def make() -> Mailbox[int]:
        mailbox: Mailbox[int] = Mailbox()
        mailbox.put([1])
        return mailbox

    mailbox = asyncio.run(make())
    mailbox.put([2, 3])
    mailbox.wake()
    mailbox.fail(ValueError("gone"))
    thread = threading.Thread(target=mailbox.put, args=([4],))
    thread.start()
    thread.join()
    assert len(mailbox) == 0
