"""The threads that contact peers: their limits, also for calls that their callers have given up."""

import threading
from collections.abc import Callable, Iterator

import anyio
import anyio.abc
import pytest

from kvflow.backends.mooncake.contacts import ContactThreads
from kvflow.errors import BackendError
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def ignore() -> None:
    """Do nothing when a call was abandoned."""


class Calls:
    """Calls that hang until the test releases them all."""

    def __init__(self, at_once: int) -> None:
        self.threads = ContactThreads(at_once)
        self.running: list[str] = []
        self.abandoned: list[str] = []
        self.release = threading.Event()

    def hang(self, principal: str) -> str:
        self.running.append(principal)
        self.release.wait()
        return principal

    async def make(self, principal: str, resource: object = None) -> str:
        return await self.threads.run(
            principal,
            lambda: self.hang(principal),
            resource=resource,
            on_abandoned=lambda: self.abandoned.append(principal),
        )

    async def give_up(self, principal: str, resource: object = None) -> None:
        """Make a call, and give it up once it runs."""
        count = len(self.running)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.make, principal, resource)
            await until(lambda: len(self.running) > count)
            tasks.cancel_scope.cancel()

    async def is_waiting(self, principal: str, resource: object = None) -> bool:
        """Return whether a call does not begin now."""
        before = len(self.running)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.make, principal, resource)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        return len(self.running) == before


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls = Calls(at_once=8)
    yield calls
    calls.release.set()


async def test_a_principal_never_takes_all_places_even_if_its_callers_give_up(calls: Calls) -> None:
    for _ in range(4):
        await calls.give_up("attacker")
    assert await calls.is_waiting("attacker")
    for _ in range(2):
        await calls.give_up("honest")
    assert calls.running == ["attacker"] * 4 + ["honest"] * 2


async def test_places_are_returned_when_abandoned_calls_end(calls: Calls) -> None:
    for _ in range(4):
        await calls.give_up("one")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(calls.make, "one")
        await anyio.wait_all_tasks_blocked()
        assert len(calls.running) == 4
        calls.release.set()
    assert len(calls.running) == 5
    await until(lambda: calls.abandoned == ["one"] * 4)  # by threads that nobody waits for


async def test_a_resource_has_one_call_at_a_time_even_if_its_caller_gives_up(calls: Calls) -> None:
    await calls.give_up("one", "engine")
    assert await calls.is_waiting("one", "engine")
    assert await calls.is_waiting("two", "engine")
    await calls.give_up("two", "another engine")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(calls.make, "two", "engine")
        await anyio.wait_all_tasks_blocked()
        calls.release.set()
    assert calls.running == ["one", "two", "two"]


def fail() -> None:
    raise LookupError("scripted")


@pytest.mark.parametrize(("function", "error"), [(fail, LookupError), (ignore, None)])
async def test_results_and_errors_reach_the_caller(function: Callable[[], None], error: type[Exception] | None) -> None:
    threads = ContactThreads(2)
    for _ in range(4):
        if error is None:
            await threads.run("", function, on_abandoned=ignore)
        else:
            with pytest.raises(error):
                await threads.run("", function, on_abandoned=ignore)


async def test_a_thread_that_cannot_start_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = ContactThreads(2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(BackendError, match="cannot start a thread"):
                await threads.run("", ignore, resource="engine", on_abandoned=ignore)
    await threads.run("", ignore, resource="engine", on_abandoned=ignore)
