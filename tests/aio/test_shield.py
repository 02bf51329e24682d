"""Work that is shielded from cancellation."""

import asyncio

import anyio
import pytest

from kvflow.aio.shield import run_shielded

pytestmark = pytest.mark.anyio


class Work:
    """Blocks until the test releases it, and records its end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_go_on = asyncio.Event()
        self.has_ended = False
        self._error = error

    async def run(self) -> int:
        await self.may_go_on.wait()
        self.has_ended = True
        if self._error is not None:
            raise self._error
        return 7


async def test_its_result_is_given_and_its_error_raised() -> None:
    work, failing = Work(), Work(ValueError("why"))
    work.may_go_on.set()
    failing.may_go_on.set()
    assert await run_shielded(work.run()) == 7
    with pytest.raises(ValueError, match="why"):
        await run_shielded(failing.run())


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_task_waits_for_it_and_is_cancelled_then(times: int) -> None:
    work = Work()
    task = asyncio.create_task(run_shielded(work.run()))
    for _ in range(times):
        await anyio.wait_all_tasks_blocked()
        task.cancel()
    await anyio.wait_all_tasks_blocked()
    assert not task.done()
    work.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.has_ended


async def test_a_cancelled_scope_waits_for_it_and_is_left_then() -> None:
    work = Work()
    with anyio.CancelScope() as scope:
        scope.cancel()
        asyncio.get_running_loop().call_soon(work.may_go_on.set)
        assert await run_shielded(work.run()) == 7
        await anyio.lowlevel.checkpoint()
        pytest.fail("cancellation must be seen")
    assert scope.cancelled_caught


async def test_time_that_is_up_is_seen_after_it() -> None:
    work = Work()

    async def wait_too_long() -> None:
        async with asyncio.timeout(0.001):
            asyncio.get_running_loop().call_later(0.01, work.may_go_on.set)
            await run_shielded(work.run())

    with pytest.raises(TimeoutError):
        await wait_too_long()
    assert work.has_ended


async def test_its_error_is_not_lost_if_its_caller_was_cancelled() -> None:
    work = Work(ValueError("why"))
    task = asyncio.create_task(run_shielded(work.run()))
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    work.may_go_on.set()
    with pytest.raises(ValueError, match="why"):
        await task
