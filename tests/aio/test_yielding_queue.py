"""A queue whose items are taken a few at a time."""

import anyio
import anyio.lowlevel
import pytest

from kvflow.aio.yielding_queue import YieldingQueue

pytestmark = pytest.mark.anyio


async def test_a_burst_is_taken_in_order_and_others_run_in_between() -> None:
    happened: list[object] = []
    turns: YieldingQueue[int] = YieldingQueue(happened.append, at_once=3)
    turns.take = happened.append

    async def run_too() -> None:
        for _ in range(4):
            happened.append("other")
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_too)
        turns.put_items(range(8))
        assert happened == [0, 1, 2]
        turns.put_items([8])
        assert happened == [0, 1, 2]
    assert [item for item in happened if item != "other"] == list(range(9))
    assert happened.index("other") < happened.index(8)


async def test_what_waits_can_be_taken_at_once() -> None:
    taken: list[int] = []
    errors: list[Exception] = []
    turns: YieldingQueue[int] = YieldingQueue(errors.append, at_once=1)
    turns.take = taken.append
    turns.put_items(range(3))
    turns.take_all()
    assert taken == [0, 1, 2]
    await anyio.lowlevel.checkpoint()
    turns.put_items([3])
    assert taken == [0, 1, 2, 3]


async def test_an_error_is_passed_on_and_the_others_are_taken() -> None:
    quotients: list[float] = []
    errors: list[Exception] = []
    turns: YieldingQueue[int] = YieldingQueue(errors.append, at_once=5)
    turns.take = lambda item: quotients.append(6 / item)
    turns.put_items([1, 0, 2])
    assert quotients == [6, 3]
    assert [type(error) for error in errors] == [ZeroDivisionError]
