"""A flag that becomes true once."""

import anyio
import pytest

from kvflow.aio.flag import Flag

pytestmark = pytest.mark.anyio


async def test_setting_wakes_everybody_who_waits() -> None:
    flag = Flag()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await flag.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        assert not flag.is_set
        flag.set()
    assert woken == [0, 1, 2]
    assert flag.is_set


async def test_waiting_for_what_is_true_already_gives_others_a_turn() -> None:
    flag = Flag()
    flag.set()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await flag.wait()
        pytest.fail("cancellation must be seen")
    assert scope.cancelled_caught
    await flag.wait()
