"""Child processes as seen by their parent."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from benchmarks.processes import ChildFailed, ChildProcess, Report
from kvflow.cli.tasks import open_tasks
from tests.support.echo_child import EchoOptions
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

PARENT = """
import anyio
from benchmarks.processes import ChildProcess
from kvflow.cli.tasks import open_tasks
from tests.support.echo_child import EchoOptions

async def main():
    async with open_tasks() as tasks, ChildProcess("echo", "tests.support.echo_child", EchoOptions(), tasks) as child:
        print((await child.expect("ready"))["pid"], flush=True)
        await child.tell("hang")
        await anyio.sleep_forever()

anyio.run(main)
"""


@asynccontextmanager
async def open_child(*, answer_s: float = 30.0) -> AsyncIterator[ChildProcess]:
    async with (
        open_tasks() as tasks,
        ChildProcess("echo", "tests.support.echo_child", EchoOptions(), tasks, answer_s=answer_s) as child,
    ):
        yield child


async def talk(*orders: Report, expecting: tuple[str, int] = ("ready", 0), answer_s: float = 30.0) -> None:
    """Send some orders to a child, wait for one of its reports, and let it exit."""
    async with open_child(answer_s=answer_s) as child:
        for order in orders:
            await child.tell(**order)
        await child.expect(*expecting)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_orders_and_reports_go_by_room() -> None:
    async with open_child() as child:
        for room in (1, 2):
            await child.tell("echo", room=room, text=f"text {room}")
        assert (await child.expect("echoed", 2))["text"] == "text 2"
        assert (await child.expect("echoed", 1))["text"] == "text 1"


async def test_every_report_is_told() -> None:
    told: list[Report] = []
    async with (
        open_tasks() as tasks,
        ChildProcess("echo", "tests.support.echo_child", EchoOptions("hello"), tasks, on_report=told.append) as child,
    ):
        await child.expect("hello")
    assert [report["event"] for report in told] == ["hello"]


async def test_first_of_several_events_stays_to_be_expected() -> None:
    async with open_child() as child:
        await child.tell("echo", room=1, text="")
        assert await child.wait_for(1, "never", "echoed") == "echoed"
        assert await child.expect("echoed", 1)


async def test_what_a_child_prints_is_a_failure_that_shows_it() -> None:
    orders = {"do": "print", "text": "standard output"}, {"do": "echo", "room": 1, "text": ""}
    with pytest.raises(ChildFailed) as caught:
        await talk(*orders, expecting=("echoed", 1))
    assert caught.value.values == {"child": "echo", "exit_code": 0, "printed": "standard output"}


async def test_child_that_ends_early_is_named_with_what_it_printed() -> None:
    with pytest.raises(ChildFailed) as caught:
        await talk({"do": "crash"}, expecting=("echoed", 1))
    assert caught.value.values["event"] == "echoed"
    assert "cannot go on" in str(caught.value.values["printed"])


async def test_the_error_of_a_child_is_raised_as_it_was_told() -> None:
    with pytest.raises(ChildFailed) as caught:
        await talk({"do": "fail"}, expecting=("echoed", 1))
    assert str(caught.value) == "child cannot go on (because='told so') (child='echo')"


async def test_an_error_is_a_failure_although_nothing_is_expected() -> None:
    with pytest.raises(ChildFailed, match="child cannot go on"):
        await talk({"do": "fail"})


async def test_exit_code_is_a_failure_although_nothing_is_expected() -> None:
    with pytest.raises(ChildFailed) as caught:
        await talk({"do": "exit"})
    assert caught.value.values == {"child": "echo", "exit_code": 3, "printed": ""}


async def test_room_that_is_refused_is_not_waited_for() -> None:
    with pytest.raises(ChildFailed, match="pool is full"):
        await talk({"do": "refuse", "room": 3}, expecting=("echoed", 3))


async def test_child_that_does_not_answer_is_named() -> None:
    with pytest.raises(ChildFailed) as caught:
        await talk({"do": "hang"}, expecting=("echoed", 1), answer_s=1.0)
    assert caught.value.values["event"] == "echoed"


async def test_child_that_was_killed_may_have_any_exit_code() -> None:
    async with open_child() as child:
        pid = (await child.expect("ready"))["pid"]
        child.send_signal(signal.SIGKILL)
    assert not is_alive(pid)


async def test_child_is_killed_when_its_block_is_cancelled() -> None:
    with anyio.CancelScope() as scope:
        async with open_child() as child:
            pid = (await child.expect("ready"))["pid"]
            await child.tell("hang")
            scope.cancel()
            await anyio.sleep_forever()
    assert not is_alive(pid)


def test_child_is_killed_when_its_event_loop_is_closed() -> None:
    """Closing cancels all tasks at once, also the one that listens to the child."""
    ready: list[Report] = []

    async def use() -> None:
        async with open_child() as child:
            ready.append(await child.expect("ready"))
            child.send_signal(signal.SIGSTOP)
            await anyio.sleep_forever()

    async def leave() -> None:
        asyncio.ensure_future(use())  # noqa: RUF006 - ends with the event loop
        await until(lambda: ready)

    asyncio.run(leave())
    assert not is_alive(ready[0]["pid"])


async def test_child_does_not_outlive_whoever_started_it() -> None:
    async with await anyio.open_process([sys.executable, "-c", PARENT], stderr=None) as parent:
        assert parent.stdout is not None
        pid = int(await parent.stdout.receive())
        parent.kill()
        await until(lambda: not is_alive(pid))


async def test_error_of_a_task_comes_by_itself() -> None:
    async def fail() -> None:
        raise ChildFailed("first")

    async def run() -> None:
        async with open_tasks() as outer, open_tasks() as inner:
            outer.start_soon(fail)
            inner.start_soon(anyio.sleep_forever)

    with pytest.raises(ChildFailed, match="first"):
        await run()
