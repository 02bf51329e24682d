"""Which events a rank receives, and when."""

import functools
import threading
from collections.abc import Sequence

import anyio
import anyio.to_thread
import pytest

from kvflow.backends import BackendEvent, PostEnded
from kvflow.backends.delivery import EventDelivery
from kvflow.errors import BackendError
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ENDS = [PostEnded(number, None) for number in range(4)]


class Rank:
    """Records the events of each delivery."""

    def __init__(self) -> None:
        self.batches: list[list[BackendEvent]] = []
        self.errors: list[BackendError] = []

    def delivery(self) -> EventDelivery:
        return EventDelivery(self.take, self.errors.append)

    def take(self, events: Sequence[BackendEvent]) -> None:
        self.batches.append(list(events))


async def test_nothing_is_delivered_before_the_caller_is_done_and_then_all_of_it_at_once() -> None:
    rank = Rank()
    delivery = rank.delivery()
    delivery.deliver_soon(ENDS[:1])
    delivery.deliver_soon(ENDS[1:3])
    assert (rank.batches, len(delivery)) == ([], 3)
    await until(lambda: rank.batches)
    assert (rank.batches, len(delivery)) == ([ENDS[:3]], 0)


async def test_what_gathers_in_a_thread_wakes_the_loop_once() -> None:
    rank, calls = Rank(), list[object]()
    delivery = EventDelivery(rank.take, rank.errors.append, calls.append)
    for event in ENDS:
        await anyio.to_thread.run_sync(functools.partial(delivery.deliver_soon, [event]))
    assert (calls, rank.batches) == ([delivery.deliver], [])
    delivery.deliver()
    assert rank.batches == [ENDS]
    await anyio.to_thread.run_sync(functools.partial(delivery.deliver_soon, ENDS))
    assert len(calls) == 2


async def test_a_breakdown_is_reported_once_behind_what_came_before_it() -> None:
    rank, error = Rank(), BackendError("first")
    delivery = rank.delivery()
    delivery.deliver_soon(ENDS[:1])
    delivery.fail(error)
    delivery.fail(BackendError("second"))
    await until(lambda: rank.errors)
    delivery.fail(BackendError("third"))
    delivery.deliver_soon(ENDS[1:])
    await anyio.wait_all_tasks_blocked()
    assert (rank.batches, rank.errors) == ([ENDS[:1]], [error])
    delivery.close()
    assert (rank.batches, rank.errors) == ([ENDS[:1], ENDS[1:]], [error])


async def test_closing_delivers_what_is_left_and_nothing_is_delivered_after_it() -> None:
    rank = Rank()
    delivery = rank.delivery()
    delivery.deliver_soon(ENDS[:2])
    delivery.close()
    assert rank.batches == [ENDS[:2]]
    delivery.deliver_soon(ENDS[2:])
    delivery.fail(BackendError("too late"))
    await anyio.wait_all_tasks_blocked()
    delivery.close()
    assert (rank.batches, rank.errors) == ([ENDS[:2]], [])


def test_a_thread_may_outlive_the_loop() -> None:
    rank, made = Rank(), list[EventDelivery]()

    async def make() -> None:
        made.append(rank.delivery())

    anyio.run(make)
    for _ in range(2):
        thread = threading.Thread(target=made[0].deliver_soon, args=(ENDS,))
        thread.start()
        thread.join()
    assert (rank.batches, len(made[0])) == ([], 0)
