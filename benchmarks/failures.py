"""Effects of a kill, stop or abort of one process on its peer in the middle of a transfer.

Two engines in processes of their own move pages with content that differs in each round. After each disturbance the
peer must have noticed, every page must be accounted for, and the next transfer must succeed, byte for byte.
"""

import argparse
import math
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import structs

import kvflow
from benchmarks.options import cases_of, names
from benchmarks.processes import ChildFailed, ChildProcess, Report
from benchmarks.rows import percentile
from benchmarks.sides import DECODE, PREFILL, SideName, SideOptions
from kvflow.cli.options import add_backend_option, check_backend, check_positive
from kvflow.cli.tasks import open_tasks

__all__ = [
    "CASES",
    "Engine",
    "EngineOptions",
    "FailureRow",
    "FailureSettings",
    "add_arguments",
    "measure_failures",
    "prepare",
]

MODULE: Final = "benchmarks.failures_worker"

OTHER: Final[dict[SideName, SideName]] = {PREFILL: DECODE, DECODE: PREFILL}

ANY_PORT: Final = "tcp://127.0.0.1:0"
FIRST_CHUNKS: Final = 3
"""Chunks offered before the disturbance; prefill computes and sends the rest meanwhile."""

SPREAD_S: Final = 0.02
"""The disturbance comes at a random time, at most this long after those chunks."""

STOPPED_LEASES: Final = 4.0
"""How long a process is stopped, in leases."""

GIVE_BACK_S: Final = 20.0
"""How long the survivor may take to hold no more files and threads than before the first disturbance."""

LOOK_AGAIN_S: Final = 0.05

MAX_MISSES: Final = 10
"""Limit of successive disturbances that come after the end of their transfer, which do not count."""


class EngineOptions(SideOptions, frozen=True, kw_only=True):
    """One incarnation of an engine.

    Attributes:
        bind: Address of the prefill rank's control socket.
        lease_s: Silence after which the peer counts as lost.
        layers: Number of tensors; each page has one cell in each.
        cell_bytes: Bytes of a cell, which is one descriptor.
        tokens: Tokens of one transfer; a page holds one.
        chunks: Chunks of one transfer.
        num_pages: Pages of the pool.
    """

    bind: str = "tcp://127.0.0.1:0"
    lease_s: float = 3.0
    layers: int = 4
    cell_bytes: int = 4096
    tokens: int = 3072
    chunks: int = 16
    num_pages: int = 12288


class Engine(ChildProcess):
    """Handle of one incarnation of an engine, in a child process."""

    def __init__(self, options: EngineOptions, tasks: TaskGroup) -> None:
        super().__init__(options.side, MODULE, options, tasks)
        self.options = options
        self.endpoint = ""

    async def expect_ready(self) -> None:
        """Wait until the rank is open."""
        self.endpoint = (await self.expect("ready"))["endpoint"]


class FailureRow(msgspec.Struct, kw_only=True):
    """Results of one case.

    Attributes:
        rounds: Disturbances in the middle of a transfer.
        ok: Rounds without a fault.
        known_ms_p50: Time from the disturbance until `done` or `chunk` raised in the surviving engine.
        quarantined_pages: Pages of the surviving rank still in quarantine at the end of the case.
        next_transfer_ok: Rounds whose next transfer succeeded.
        rss_start_mb: Resident memory of the surviving process after the first transfer.
        fds: Growth of the open files of the surviving process from the first transfer to the end.
        fds_max: Growth up to the round with the most open files.
        threads: Growth of its threads, as for `fds`.
        faults: Number of faults by kind.
    """

    case: str
    backend: str
    rounds: int
    ok: int
    known_ms_p50: float
    known_ms_p99: float
    known_ms_max: float
    quarantined_pages: int
    next_transfer_ok: int
    rss_start_mb: float
    rss_end_mb: float
    fds: int
    fds_max: int
    threads: int
    faults: dict[str, int]


class FailureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Cases and options of a run.

    Attributes:
        cases: Names of `CASES`.
        rounds: Rounds of each case.
        engine: Options of the engines; the benchmark fills in side, registry and address.
        seed: Seed of the random times of the disturbances.
    """

    cases: tuple[str, ...]
    rounds: int = 50
    engine: EngineOptions = EngineOptions()
    seed: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_backend_option(parser)
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="of each case")
    parser.add_argument("--cases", type=names, default="all", metavar="NAME,...", help=f"of {', '.join(CASES)}")
    parser.add_argument("--lease", type=float, default=3.0, metavar="S", help="of the ranks")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "rounds", "lease")
    backend = check_backend(arguments.backend, between_processes=True)
    settings = FailureSettings(
        cases=cases_of(arguments.cases, CASES),
        rounds=arguments.rounds,
        engine=EngineOptions(backend=backend, lease_s=arguments.lease),
        seed=arguments.seed,
    )
    return partial(_print, settings, is_json=arguments.json)


def _print(settings: "FailureSettings", *, is_json: bool) -> int:
    def show(case: str, number: int) -> None:
        if not is_json:
            print(f"\r{case}: {number} of {settings.rounds}", end="", file=sys.stderr, flush=True)

    rows = anyio.run(measure_failures, settings, show)
    if is_json:
        print("\n".join(msgspec.json.encode(row).decode() for row in rows))
        return 0
    heads = f"{'case':16} {'rounds':>6} {'ok':>4} {'next':>5} {'p50 ms':>9} {'p99 ms':>9} {'max ms':>9}"
    print(f"\r{heads} {'quarantined':>11} {'MB':>13} {'fds':>4} {'most':>4} {'threads':>7}")
    for row in rows:
        print(
            f"{row.case:16} {row.rounds:6} {row.ok:4} {row.next_transfer_ok:5} {row.known_ms_p50:9.2f} "
            f"{row.known_ms_p99:9.2f} {row.known_ms_max:9.2f} {row.quarantined_pages:11} "
            f"{row.rss_start_mb:6.1f}-{row.rss_end_mb:6.1f} {row.fds:+4} {row.fds_max:+4} {row.threads:+7}"
        )
        for fault, count in row.faults.items():
            print(f"  {count} x {fault}")
    return 0


@dataclass
class _Pair:
    """Both engines of a case. The survivor runs until the end."""

    survivor: Engine
    victim: Engine
    victims: AsyncExitStack
    tasks: TaskGroup
    rng: random.Random
    room: int = 0
    known_ms: list[float] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def prefill(self) -> Engine:
        return self.survivor if self.survivor.options.side == PREFILL else self.victim

    async def begin(self) -> int:
        """Start a transfer of a new room on both sides."""
        self.room += 1
        for worker in (self.survivor, self.victim):
            await worker.tell("transfer", room=self.room)
        return self.room

    async def begin_and_wait_for_the_middle(self) -> int:
        """Start a transfer, and return at a random time while it runs."""
        room = await self.begin()
        if await self.prefill.wait_for(room, f"chunk {FIRST_CHUNKS}", "ended") == "ended":
            self.fault("failed before it was disturbed")
        await anyio.sleep(self.rng.uniform(0, SPREAD_S))
        return room

    async def replace_victim(self, bind: str) -> None:
        """Replace the victim by another incarnation, which binds to `bind`."""
        await self.victims.aclose()
        options = structs.replace(self.victim.options, bind=bind)
        self.victim = await self.victims.enter_async_context(Engine(options, self.tasks))
        await self.victim.expect_ready()

    def fault(self, kind: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1


Disturb = Callable[[_Pair, int], Awaitable[bool]]


async def measure_failures(
    settings: FailureSettings, on_round: Callable[[str, int], None] = lambda _case, _number: None
) -> list[FailureRow]:
    """Run the cases one after another, each with processes and a registry of its own.

    Args:
        settings: What to run.
        on_round: Called as (case, number) at the end of each round.

    Raises:
        ChildFailed: A process hangs, or exited with an error or output on its standard error.
    """
    return [await _measure(case, settings, on_round) for case in settings.cases]


async def _measure(case: str, settings: FailureSettings, on_round: Callable[[str, int], None]) -> FailureRow:
    disturb, victim = CASES[case]
    async with _open_pair(victim, settings) as pair:
        await _transfer_next(pair)
        first = last = await _settle(pair.survivor)
        num_ok = num_next_ok = most_fds = 0
        for number in range(settings.rounds):
            faults_before = sum(pair.faults.values())
            await _disturb_in_the_middle(pair, disturb, number)
            is_next_ok = await _transfer_next(pair)
            last = await _settle(pair.survivor, first)
            _check_account(pair, last)
            most_fds = max(most_fds, last["fds"])
            num_next_ok += is_next_ok
            num_ok += is_next_ok and sum(pair.faults.values()) == faults_before
            on_round(case, number + 1)
    return FailureRow(
        case=case,
        backend=settings.engine.backend,
        rounds=settings.rounds,
        ok=num_ok,
        known_ms_p50=_percentile(pair.known_ms, 0.5),
        known_ms_p99=_percentile(pair.known_ms, 0.99),
        known_ms_max=_percentile(pair.known_ms, 1.0),
        quarantined_pages=last["quarantined_pages"],
        next_transfer_ok=num_next_ok,
        rss_start_mb=round(first["rss_mb"], 1),
        rss_end_mb=round(last["rss_mb"], 1),
        fds=last["fds"] - first["fds"],
        fds_max=most_fds - first["fds"],
        threads=last["threads"] - first["threads"],
        faults=pair.faults,
    )


@asynccontextmanager
async def _open_pair(victim: SideName, settings: FailureSettings) -> AsyncIterator[_Pair]:
    async with (
        kvflow.Registry() as registry,
        open_tasks() as tasks,
        AsyncExitStack() as survivors,
        AsyncExitStack() as victims,
    ):
        workers = {}
        for side, stack in ((OTHER[victim], survivors), (victim, victims)):
            options = structs.replace(settings.engine, side=side, registry=registry.endpoint, bind=ANY_PORT)
            workers[side] = await stack.enter_async_context(Engine(options, tasks))
        for worker in workers.values():
            await worker.expect_ready()
        rng = random.Random(settings.seed)  # noqa: S311 - moments need no secret
        yield _Pair(workers[OTHER[victim]], workers[victim], victims, tasks, rng)


async def _disturb_in_the_middle(pair: _Pair, disturb: Disturb, number: int) -> None:
    """Start and disturb transfers until a disturbance comes before the end of its transfer."""
    for _ in range(MAX_MISSES):
        if await disturb(pair, number):
            return
    raise ChildFailed("transfers end before they can be disturbed", tries=MAX_MISSES)


async def _kill(pair: _Pair, number: int) -> bool:
    """Kill and replace the victim; alternate between at once and once noticed, and between same and new address."""
    room = await pair.begin_and_wait_for_the_middle()
    killed_s = pair.victim.send_signal(signal.SIGKILL)
    bind = pair.victim.endpoint if pair.victim.endpoint and number % 2 else ANY_PORT
    is_at_once = number // 2 % 2 == 1
    if is_at_once:
        await pair.replace_victim(bind)
    ended = await pair.survivor.expect("ended", room)
    if not is_at_once:
        await pair.replace_victim(bind)
    return _note(pair, ended, killed_s)


async def _stop(pair: _Pair, _: int) -> bool:
    """Stop the victim for `STOPPED_LEASES`."""
    room = await pair.begin_and_wait_for_the_middle()
    stopped_s = pair.victim.send_signal(signal.SIGSTOP)
    await anyio.sleep(STOPPED_LEASES * pair.victim.options.lease_s)
    pair.victim.send_signal(signal.SIGCONT)
    ended = await pair.survivor.expect("ended", room)
    _check_bytes(pair, await pair.victim.expect("ended", room))
    return _note(pair, ended, stopped_s)


async def _abort(pair: _Pair, _: int) -> bool:
    """Make the victim's engine leave the block of its transfer."""
    room = await pair.begin_and_wait_for_the_middle()
    await pair.victim.tell("abort", room=room)
    aborted = await pair.victim.expect("aborted", room)
    ended = await pair.survivor.expect("ended", room)
    _check_bytes(pair, await pair.victim.expect("ended", room))
    return _note(pair, ended, aborted["at_s"])


CASES: Final[dict[str, tuple[Disturb, SideName]]] = {
    "sigkill-prefill": (_kill, PREFILL),
    "sigkill-decode": (_kill, DECODE),
    "sigstop-prefill": (_stop, PREFILL),
    "sigstop-decode": (_stop, DECODE),
    "abort-prefill": (_abort, PREFILL),
    "abort-decode": (_abort, DECODE),
}
"""Disturbance and victim of each case."""


def _note(pair: _Pair, ended: Report, disturbed_s: float) -> bool:
    """Record how long the survivor took to notice; return False if its transfer had ended before."""
    _check_bytes(pair, ended)
    if not ended["reason"] or ended["at_s"] < disturbed_s:
        return False
    pair.known_ms.append((ended["at_s"] - disturbed_s) * 1e3)
    return True


async def _transfer_next(pair: _Pair) -> bool:
    """Run an undisturbed transfer; return whether it succeeded on both sides."""
    room = await pair.begin()
    reports = [await worker.expect("ended", room) for worker in (pair.survivor, pair.victim)]
    for report in reports:
        _check_bytes(pair, report)
        if report["outcome"] != "success":
            pair.fault(f"next transfer: {report['reason']}")
    return all(report["outcome"] == "success" for report in reports)


def _check_bytes(pair: _Pair, ended: Report) -> None:
    if ended["is_intact"] is False:
        pair.fault("wrong bytes")


async def _settle(worker: Engine, before: Report | None = None) -> Report:
    """Return the account of a process once it holds no more than before; what it holds now, if that takes too long."""
    give_up_s = time.monotonic() + GIVE_BACK_S
    while True:
        await worker.tell("settle")
        account = await worker.expect("account")
        is_given_back = before is None or all(account[held] <= before[held] for held in ("fds", "threads"))
        if is_given_back or time.monotonic() > give_up_s:
            return account
        await anyio.sleep(LOOK_AGAIN_S)  # nothing tells when a library has closed the connections of a dead process


def _check_account(pair: _Pair, account: Report) -> None:
    """Check that no page is lost, nothing is open or in quarantine, and no free page was written."""
    pages = account["pages"]
    if pages["free"] + pages["held"] + pages["quarantined"] != pages["all"]:
        pair.fault("pages lost")
    if not account["is_settled"]:
        pair.fault("quarantined" if pages["quarantined"] else "left open")
    if not account["is_untouched"]:
        pair.fault("free page written")


def _percentile(values: list[float], share: float) -> float:
    return round(percentile(values, share), 2) if values else math.nan
