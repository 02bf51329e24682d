"""Several prefill and decode instances under load, which find each other in a directory, and are killed and replaced.

The fleet plays the router and the clients: a fixed number of requests is open at any time. A request that fails is sent
again, as a new room, to other instances.
"""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from msgspec.structs import replace

from tests.hosts import lines
from tests.hosts.pool import PAGES_PER_LANE
from tests.hosts.worker import Settings
from tests.support.ports import unused_port
from tests.support.waiting import until

__all__ = ["REGISTRY", "Fleet", "Outcome", "Variant"]

PATIENCE_S: Final = 60.0
"""How long a request may take before it counts as stuck."""

MAX_LINE: Final = 65_536

REGISTRY: Final = "registry"
"""Name and role of the fleet's own registry."""


@dataclass
class Member:
    """One process, and the requests that it has."""

    settings: Settings
    process: Process
    opened: anyio.Event = field(default_factory=anyio.Event)
    drained: anyio.Event = field(default_factory=anyio.Event)
    library: str = ""
    closed: lines.Closed | None = None
    free_pages: int = 0

    @property
    def is_whole(self) -> bool:
        """True if every page of the pool is free; a registry has none."""
        return self.settings.role == REGISTRY or self.free_pages == self.settings.num_lanes * PAGES_PER_LANE


@dataclass(frozen=True)
class Variant:
    """What a process of an instance has.

    Attributes:
        environment: Its environment variables, by default those of this process.
        changes: Settings of the worker that differ from those of the fleet.
    """

    environment: Mapping[str, str] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a request.

    Attributes:
        attempts: Rooms that it took.
        reasons: Why those before the last one failed.
    """

    attempts: int
    reasons: list[str]


class Fleet:
    """A number of prefill and decode instances at one directory.

    Args:
        registry: URL of a directory, or the address at which the fleet has a registry of its own.
        num_prefill: Prefill instances.
        num_decode: Decode instances.
        tasks: Runs what reads the reports.
        backend: Transport.
    """

    def __init__(
        self, registry: str, num_prefill: int, num_decode: int, tasks: TaskGroup, backend: str = "nixl"
    ) -> None:
        self._registry, self._backend, self._tasks = registry, backend, tasks
        self.prefill = [f"prefill-{number}" for number in range(num_prefill)]
        self.decode = [f"decode-{number}" for number in range(num_decode)]
        self.variants: dict[str, Variant] = {}
        """What the next process of each instance has, and that of the registry."""
        self._ports = {name: unused_port() for name in self.prefill}
        self._members: dict[str, Member] = {}
        self._waiting: dict[tuple[str, int], tuple[anyio.Event, list[str]]] = {}
        self._rooms = 0
        self.violations: list[lines.Report] = []
        self.outcomes: list[Outcome] = []
        self.ended_at: list[float] = []

    async def start_all(self) -> None:
        """Start the registry, if the fleet has one, and then every instance."""
        if self._registry.startswith("tcp:"):
            await self.start(REGISTRY)
        async with anyio.create_task_group() as tasks:
            for name in [*self.prefill, *self.decode]:
                tasks.start_soon(self.start, name)

    async def start(self, name: str) -> None:
        """Start the process of an instance, and wait until its rank is open."""
        role, variant = name.partition("-")[0], self.variants.get(name, Variant())
        binds = {REGISTRY: self._registry, "prefill": f"tcp://127.0.0.1:{self._ports.get(name)}"}
        settings = Settings(
            role=role,
            instance=name,
            decode=name,
            instances=tuple(self.prefill),
            bind=binds.get(role, ""),
            registry=self._registry,
            backend=self._backend,
            num_lanes=32,
            compute_s=0.05,
            use_s=0.02,
            log_level=50,
        )
        settings = replace(settings, **variant.changes)
        command = [sys.executable, "-m", "tests.hosts.worker", msgspec.json.encode(settings).decode()]
        process = await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None, env=variant.environment)
        member = self._members[name] = Member(settings, process)
        self._tasks.start_soon(self._read, name, member)
        with anyio.fail_after(PATIENCE_S):
            await member.opened.wait()

    def is_running(self, name: str) -> bool:
        """Return whether the rank of an instance is open."""
        return name in self._members and self._members[name].opened.is_set()

    async def replace(self, name: str) -> None:
        """Kill an instance, and start another process under its name, a prefill one at its address."""
        member = self._members.pop(name)
        member.process.send_signal(signal.SIGKILL)
        self._give_up(name)
        await member.process.wait()
        await self.start(name)

    async def renew(self, name: str) -> None:
        """Drain an instance, which still gets requests until then, close it, and start another process in its place.

        A registry is closed at once.
        """
        member = self._members[name]
        with anyio.fail_after(PATIENCE_S):
            if name != REGISTRY:
                await self._order(member, lines.Drain(PATIENCE_S))
                await member.drained.wait()
            del self._members[name]
            await until(lambda: not any(decode == name for decode, _ in self._waiting))
            await self._order(member, lines.Close())
            assert await member.process.wait() == 0
            await until(lambda: member.closed or name == REGISTRY)
        await self.start(name)

    def libraries(self) -> dict[str, str]:
        """Return the files that the instances have loaded kvflow from."""
        return {name: member.library for name, member in self._members.items()}

    async def close(self) -> None:
        """Close every rank in an orderly way, and wait for the processes to end."""
        for member in self._members.values():
            with suppress(anyio.BrokenResourceError):
                await self._order(member, lines.Close())
        with anyio.fail_after(PATIENCE_S):
            for member in self._members.values():
                await member.process.wait()

    def kill_all(self) -> None:
        """End every process at once."""
        for member in self._members.values():
            with suppress(ProcessLookupError):
                member.process.kill()

    async def settle(self) -> None:
        """Wait until all pages are free; the time limit of the test applies."""
        await until(lambda: all(member.is_whole for member in self._members.values()))

    async def load(self, at_once: int, over: anyio.Event, rng: random.Random) -> None:
        """Keep a number of requests open until an event, and then finish them."""
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(self._keep_asking, over, rng)

    async def _keep_asking(self, over: anyio.Event, rng: random.Random) -> None:
        while not over.is_set():
            reasons: list[str] = []
            while (reason := await self._ask(rng)) != lines.SUCCESS:
                reasons.append(reason)
            self.outcomes.append(Outcome(len(reasons) + 1, reasons))
            self.ended_at.append(time.monotonic())

    async def _ask(self, rng: random.Random) -> str:
        """Send one room to an instance of each role that is there, and return what became of it."""
        prefills, decodes = (list(filter(self.is_running, names)) for names in (self.prefill, self.decode))
        if not (prefills and decodes):
            await anyio.sleep(0.01)
            return "not there"
        prefill, decode = rng.choice(prefills), rng.choice(decodes)
        self._rooms += 1
        room = self._rooms * len(self.prefill) + self.prefill.index(prefill)
        ended, reasons = anyio.Event(), list[str]()
        self._waiting[decode, room] = (ended, reasons)
        try:
            for member in (self._members[prefill], self._members[decode]):
                await self._order(member, lines.Room(room))
            with anyio.move_on_after(PATIENCE_S):
                await ended.wait()
        except (KeyError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await anyio.lowlevel.checkpoint()  # it may be asked for again at once, and all processes may have ended
            return "killed"
        finally:
            del self._waiting[decode, room]
        return reasons[0] if reasons else "stuck"

    def _give_up(self, name: str) -> None:
        for (decode, _), (ended, reasons) in self._waiting.items():
            if decode == name:
                reasons.append("killed")
                ended.set()

    async def _order(self, member: Member, command: lines.Command) -> None:
        assert member.process.stdin is not None
        await member.process.stdin.send(msgspec.json.encode(command) + b"\n")

    async def _read(self, name: str, member: Member) -> None:
        assert member.process.stdout is not None
        reader = BufferedByteReceiveStream(member.process.stdout)
        decoder = msgspec.json.Decoder(lines.Report)
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            while True:
                self._note(name, member, decoder.decode(await reader.receive_until(b"\n", MAX_LINE)))

    def _note(self, name: str, member: Member, report: lines.Report) -> None:
        match report:
            case lines.Opened():
                member.library = report.library
                member.opened.set()
            case lines.Second():
                member.free_pages = report.free_pages
            case lines.Drained():
                member.drained.set()
            case lines.Closed():
                member.closed = report
            case lines.Ended():
                ended, reasons = self._waiting.get((name, report.room), (None, []))
                if ended is not None:
                    reasons.append(report.reason)
                    ended.set()
        if is_violation(report):
            self.violations.append(report)


def is_violation(report: lines.Report) -> bool:
    """Return whether pages are wrong, lost, or written when they should not be, or a drain has not ended."""
    match report:
        case lines.Closed():
            return report.quarantined_pages > 0
        case lines.Drained():
            return not report.is_settled
        case lines.Landed():
            return report.memory == "safe"
        case lines.Ended():
            return report.reason == lines.WRONG_PAGES
        case _:
            return isinstance(report, lines.Trespassed)


@asynccontextmanager
async def open_fleet(
    registry: str,
    num_prefill: int,
    num_decode: int,
    backend: str = "nixl",
    variants: Callable[[str], Variant] = lambda _name: Variant(),
) -> AsyncIterator[Fleet]:
    """Start a fleet, and end its processes with the block."""
    async with anyio.create_task_group() as tasks:
        fleet = Fleet(registry, num_prefill, num_decode, tasks, backend)
        fleet.variants = {name: variants(name) for name in (REGISTRY, *fleet.prefill, *fleet.decode)}
        try:
            await fleet.start_all()
            yield fleet
        finally:
            fleet.kill_all()


def count_reasons(outcomes: list[Outcome]) -> Counter[str]:
    """Count why rooms failed that were sent again."""
    return Counter(reason for outcome in outcomes for reason in outcome.reasons)
