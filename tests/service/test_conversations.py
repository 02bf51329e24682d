"""Conversations whose turns move between three servers, each of which may be killed at any time.

`KVFLOW_CONVERSATIONS=2000 pytest tests/service/test_conversations.py -m slow -s` runs more of them.
"""

import os
import random
import signal
import sys
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Final

import anyio
import pytest
from anyio.abc import TaskGroup

import kvflow
from benchmarks.processes import ChildProcess, Report
from kvflow.cli.tasks import open_tasks
from tests.support.instances import NUM_PAGES
from tests.support.slow import slow_except
from tests.support.turn_process import TurnOptions

pytestmark = pytest.mark.anyio

NAMES: Final = ("a", "b", "c")
NUM_TURNS: Final = 5
AT_ONCE: Final = 6
"""Their pages, on all servers, fit into the pool of one."""

NUM_CONVERSATIONS: Final = int(os.environ.get("KVFLOW_CONVERSATIONS", "60"))


INSTEAD: Final = {"sent": "kept", "holds": "lost"}
"""What a server reports if a move has failed."""


class ServerGone(Exception):
    """A server was killed, or has not done what it was told."""


class Fleet:
    """Three servers, which come back after they were killed."""

    def __init__(self, registry: str, backend: str, tasks: TaskGroup) -> None:
        self._registry, self._backend, self._tasks = registry, backend, tasks
        self._servers: dict[str, ChildProcess] = {}
        self._lives = Counter[str]()
        self._waiting: dict[tuple[str, str], tuple[str, anyio.Event, list[Report]]] = {}
        self.wrong: list[Report] = []
        self.counts = Counter[str]()

    async def start(self, name: str, stack: AsyncExitStack) -> None:
        options = TurnOptions(name, self._registry, self._backend)
        life = self._lives[name]

        def note(report: Report) -> None:
            if life == self._lives[name]:
                self._note(name, report)

        module = "tests.support.turn_process"
        server = ChildProcess(name, module, options, self._tasks, shows_errors=True, on_report=note)
        await stack.enter_async_context(server)
        await server.expect("ready")
        self._servers[name] = server

    async def kill(self, rng: random.Random, stack: AsyncExitStack) -> None:
        """Kill a server, and start another process in its place."""
        name = rng.choice(list(self._servers))
        self._servers.pop(name).send_signal(signal.SIGKILL)
        self._lives[name] += 1
        self.counts["killed"] += 1
        for server, of in list(self._waiting):
            if server == name:
                self._waiting[server, of][1].set()
        await self.start(name, stack)

    def _note(self, name: str, report: Report) -> None:
        self.counts[report["event"]] += 1
        self.counts["pages"] += report.get("moved", 0)
        if report["event"] == "holds" and not report["ok"]:
            self.wrong.append(report)
        event, arrived, reports = self._waiting.get((name, report.get("of", "")), ("", None, []))
        if arrived is not None and report["event"] in (event, INSTEAD.get(event)):
            reports.append(report)
            arrived.set()

    async def ask(self, name: str, of: str, event: str, do: str, **values: Any) -> Report:
        """Give a server an order, and wait for a report."""
        if name not in self._servers:
            raise ServerGone(name)
        with self.expecting(name, of, event) as wait:
            await self.tell(name, do, **({"of": of} if of else {}), **values)
            report: Report = await wait()
            return report

    async def tell(self, name: str, do: str, **values: Any) -> None:
        if (server := self._servers.get(name)) is not None:
            try:
                await server.tell(do, **values)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
                raise ServerGone(name) from error

    def expecting(self, name: str, of: str, event: str) -> "Expected":
        return Expected(self._waiting, (name, of), event)


class Expected:
    """A wait for one report of a server, from the beginning of the block."""

    def __init__(self, waiting: dict[Any, Any], key: tuple[str, str], event: str) -> None:
        self._waiting, self._key, self._event = waiting, key, event

    def __enter__(self) -> Any:
        entry: tuple[str, anyio.Event, list[Report]] = (self._event, anyio.Event(), [])
        self._waiting[self._key] = entry

        async def wait() -> Report:
            with anyio.move_on_after(30.0):
                await entry[1].wait()
            report: Report = entry[2][0] if entry[2] else {}
            if report.get("event") != self._event or not report.get("ok", True):
                raise ServerGone(self._key[0], report)
            return report

        return wait

    def __exit__(self, *_: object) -> None:
        self._waiting.pop(self._key, None)


async def converse(fleet: Fleet, number: int, rng: random.Random) -> None:
    """Hold one conversation of five turns, each on another server than the one before."""
    attempt, turn, at = 0, 0, rng.choice(NAMES)
    name = f"{number}.{attempt}"
    while turn < NUM_TURNS:
        try:
            await fleet.ask(at, name, "computed", "compute", turn=turn)
            if turn + 1 == NUM_TURNS:
                break
            to = rng.choice([other for other in NAMES if other != at])
            with fleet.expecting(to, name, "holds") as received:
                await fleet.ask(at, name, "sent", "offer", turn=turn, to=to)
                await received()
            at, turn = to, turn + 1
        except ServerGone:  # the turn is computed from the beginning, on a server that lives
            fleet.counts["computed again"] += 1
            await end(fleet, name)
            attempt, at = attempt + 1, rng.choice(NAMES)
            name = f"{number}.{attempt}"
            await anyio.sleep(0.05)
    await end(fleet, name)


async def end(fleet: Fleet, name: str) -> None:
    for server in NAMES:
        try:
            await fleet.tell(server, "end", of=name)
        except ServerGone:
            continue


async def hold(num_conversations: int, backend: str, num_kills: int) -> Fleet:
    rng = random.Random(num_conversations)  # noqa: S311 - repeatable
    async with kvflow.Registry(trust=kvflow.Trust.none()) as registry, open_tasks() as tasks, AsyncExitStack() as stack:
        fleet = Fleet(registry.endpoint, backend, tasks)
        for name in NAMES:
            await fleet.start(name, stack)
        waiting = list(range(num_conversations))
        num_ended = 0

        async def work() -> None:
            nonlocal num_ended
            while waiting:
                await converse(fleet, waiting.pop(), rng)
                num_ended += 1
                if num_kills and num_ended % max(num_conversations // num_kills, 1) == 0:
                    await fleet.kill(rng, stack)

        async with anyio.create_task_group() as workers:
            for _ in range(AT_ONCE):
                workers.start_soon(work)
        await settled(fleet)
    return fleet


async def settled(fleet: Fleet) -> None:
    """Wait until every page of every server is free again."""
    while True:
        accounts = [await fleet.ask(name, "", "account", "account") for name in NAMES]
        if all(one["free"] == NUM_PAGES and not one["quarantined"] and not one["kept"] for one in accounts):
            return
        await anyio.sleep(0.1)


@pytest.mark.parametrize("backend", slow_except(["nixl"], ["nixl", "mooncake"]))
async def test_turns_move_and_only_what_is_lacking(backend: str) -> None:
    fleet = await hold(6, backend, num_kills=0)
    assert fleet.wrong == []
    assert fleet.counts["holds"] == 6 * (NUM_TURNS - 1)
    assert fleet.counts["computed again"] == 0
    assert fleet.counts["pages"] < 6 * sum(range(1, NUM_TURNS))


@pytest.mark.slow
@pytest.mark.timeout(3_600)
async def test_no_conversation_gets_wrong_pages_and_no_page_is_lost_while_servers_are_killed() -> None:
    fleet = await hold(NUM_CONVERSATIONS, "nixl", num_kills=max(NUM_CONVERSATIONS // 20, 2))
    sys.stdout.write(f"{dict(fleet.counts)}\n")
    assert fleet.wrong == []
    assert fleet.counts["killed"] >= 2
    assert fleet.counts["computed again"]
