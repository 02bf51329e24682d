"""Pages that nobody asked for: what warm-ups and moves of requests cost live ones, drains by moves, changes of role.

Three servers are processes with ranks of both roles. "a" computes, "b" decodes, and "c" is new.
"""

import argparse
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import anyio
import msgspec

import kvflow
from benchmarks.pools import PagePool, Pages, PoolShape
from benchmarks.processes import ChildProcess, Report
from benchmarks.rows import Measured, Row, Tail, compare, percentile, print_rows, there_and_back
from kvflow.cli.options import add_backend_option, check_backend, check_positive
from kvflow.cli.tasks import open_tasks

__all__ = ["NUM_LANES", "OffersOptions", "measure_offers", "pages_of", "pool_of", "prepare"]

SHAPE: Final = PoolShape(layers=8, heads=(0, 8), head_bytes=128)
"""16 KiB for each token."""

LIVE_TOKENS: Final = 64
WARM_TOKENS: Final = 1_024
AREAS: Final = ("live", "warm", "moved")
NUM_LANES: Final = 8
"""Page tables of each area; fewer rooms of an area are in flight at a time."""

AT_ONCE: Final = 4
"""Requests that a server moves at a time while it drains."""

GAP_S: Final = 0.005
"""Between the end of a live request and the next one."""

SHARE: Final = 5
"""One of this many requests moves."""


class OffersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a server."""

    name: str
    registry: str = ""
    backend: str = "nixl"


class OffersSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the measurement.

    Attributes:
        backend: Transport.
        rounds: Rounds of each case.
        requests: Live requests of a round.
        drained: Requests that a draining server moves.
        longest_s: How long the longest of them would go on.
    """

    backend: str = "nixl"
    rounds: int = 11
    requests: int = 100
    drained: int = 32
    longest_s: float = 10.0


def pool_of(options: OffersOptions) -> PagePool:
    """Create the pool of a server."""
    return PagePool(SHAPE, len(AREAS) * NUM_LANES * WARM_TOKENS // SHAPE.page_size)


def pages_of(area: str, lane: int, tokens: int) -> Pages:
    """Return the page table of a lane."""
    size = WARM_TOKENS // SHAPE.page_size
    first = (AREAS.index(area) * NUM_LANES + lane % NUM_LANES) * size
    return range(first, first + tokens // SHAPE.page_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    default = OffersSettings()
    add_backend_option(parser)
    parser.add_argument("--rounds", type=int, default=default.rounds, metavar="N", help="of each case")
    parser.add_argument("--requests", type=int, default=default.requests, metavar="N", help="live requests in a round")
    parser.add_argument("--drained", type=int, default=default.drained, metavar="N", help="requests of a drain")
    longest = "how long the longest request of a drain would go on"
    parser.add_argument("--longest", type=float, default=default.longest_s, metavar="S", help=longest)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "rounds", "requests", "drained", "longest")
    settings = OffersSettings(
        backend=check_backend(arguments.backend, between_processes=True),
        rounds=arguments.rounds,
        requests=arguments.requests,
        drained=arguments.drained,
        longest_s=arguments.longest,
    )
    return lambda: print_rows(partial(measure_offers, settings), is_json=arguments.json)


@dataclass
class _Fleet:
    """The servers; rooms have numbers of their own."""

    servers: dict[str, ChildProcess]
    next_room: int = 0
    facts: dict[str, list[float]] = field(default_factory=dict)

    async def order(self, server: str, do: str, kind: str, **values: Any) -> Report:
        """Give a server an order, and wait until it is done."""
        await self.servers[server].tell(do, kind=kind, **values)
        return await self.servers[server].expect(f"{do} {kind}")

    async def send(self, kind: str, to: str, count: int, **values: Any) -> Report:
        """Send rooms from "a" to a server, which receives them; return what it reports."""
        first, found = self.next_room, {}
        self.next_room += count
        rooms = {"first": first, "count": count, "tokens": WARM_TOKENS if kind == "warm" else LIVE_TOKENS}

        async def receive() -> None:
            found.update(await self.order(to, "receive", kind, **rooms))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await self.order("a", "send", kind, **rooms, gap_s=0.0 if kind == "warm" else GAP_S)
        self.note(f"{kind} s", found["seconds"])
        return found

    async def move(self, count: int, tokens: int, *, at_once: int, gap_s: float) -> Report:
        """Move requests from "b" to "c"."""
        first = self.next_room
        self.next_room += count
        before = (await self.order("c", "account", "moved"))["process_s"]
        moved = await self.order(
            "b", "move", "moved", first=first, count=count, tokens=tokens, at_once=at_once, gap_s=gap_s
        )
        after = (await self.order("c", "account", "moved"))["process_s"]
        return {**moved, "cpu_s": moved["cpu_s"] + after - before}

    def note(self, fact: str, value: float) -> None:
        self.facts.setdefault(fact, []).append(value)

    def take_facts(self) -> dict[str, float | str]:
        """Return the medians of what was noted since the last call."""
        facts, self.facts = self.facts, {}
        return {name: round(statistics.median(values), 4) for name, values in facts.items()}


@asynccontextmanager
async def _open_fleet(backend: str) -> AsyncIterator[_Fleet]:
    async with kvflow.Registry() as registry, open_tasks() as tasks, AsyncExitStack() as stack:
        servers = {}
        for name in "abc":
            options = OffersOptions(name=name, registry=registry.endpoint, backend=backend)
            child = ChildProcess(name, "benchmarks.offers_worker", options, tasks)
            servers[name] = await stack.enter_async_context(child)
            await child.expect("ready")
        yield _Fleet(servers)


async def measure_offers(settings: OffersSettings, on_row: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """Run all cases with the same servers; call `on_row` with each row when its case has ended.

    Raises:
        ChildFailed: A server hangs, or ended with an error or with output on its standard error.
    """
    rows: list[Row] = []
    async with _open_fleet(settings.backend) as fleet:
        for measure in (_beside_warm_up, _beside_moves, _moves, _drain, _roles):
            rows.append(await measure(fleet, settings))
            on_row(rows[-1])
    return rows


def _measured(case: str, quantity: str, unit: str = "ms") -> Measured:
    return Measured(bench="offers", group="offers", case=case, quantity=quantity, unit=unit, better="lower")


async def _beside(fleet: _Fleet, settings: OffersSettings, case: str, other: Callable[[], Any]) -> Row:
    """Compare the handovers of live requests beside something else with those without it."""
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    await fleet.send("live", "b", settings.requests)
    await other()
    fleet.take_facts()
    for is_beside in there_and_back((True, False), settings.rounds):
        async with anyio.create_task_group() as tasks:
            if is_beside:
                tasks.start_soon(other)
            found = await fleet.send("live", "b", settings.requests)
        times[is_beside].append([took * 1e3 for took in found["times_s"]])
    with_it, without = ([took for one in times[way] for took in one] for way in (True, False))
    tail = Tail(
        kvflow_p50=percentile(with_it, 0.5),
        kvflow_p99=percentile(with_it, 0.99),
        bare_p50=percentile(without, 0.5),
        bare_p99=percentile(without, 0.99),
    )
    medians = {way: [statistics.median(one) for one in times[way]] for way in times}
    return compare(
        _measured(case, "handover of live requests"), medians[True], medians[False], tail=tail, facts=fleet.take_facts()
    )


async def _beside_warm_up(fleet: _Fleet, settings: OffersSettings) -> Row:
    return await _beside(fleet, settings, "beside a warm-up", partial(fleet.send, "warm", "c", settings.requests))


async def _beside_moves(fleet: _Fleet, settings: OffersSettings) -> Row:
    count = max(1, settings.requests // SHARE)
    move = partial(fleet.move, count, LIVE_TOKENS, at_once=1, gap_s=SHARE * GAP_S)
    return await _beside(fleet, settings, f"one of {SHARE} moves", move)


async def _moves(fleet: _Fleet, settings: OffersSettings) -> Row:
    """Measure the CPU of both servers for one move."""
    costs = []
    for _ in range(settings.rounds):
        moved = await fleet.move(settings.requests, LIVE_TOKENS, at_once=1, gap_s=0.0)
        costs.append(moved["cpu_s"] / settings.requests * 1e3)
        fleet.note("ms each", moved["seconds"] / settings.requests * 1e3)
    facts = {"bytes": LIVE_TOKENS * SHAPE.token_bytes, **fleet.take_facts()}
    return compare(_measured("move of a request", "CPU of both servers"), costs, facts=facts)


async def _drain(fleet: _Fleet, settings: OffersSettings) -> Row:
    """Compare a drain by moves with the wait for the longest request."""
    times = []
    for _ in range(settings.rounds):
        moved = await fleet.move(settings.drained, WARM_TOKENS, at_once=AT_ONCE, gap_s=0.0)
        times.append(moved["seconds"] * 1e3)
    facts: dict[str, float | str] = {"requests": settings.drained, "bytes each": WARM_TOKENS * SHAPE.token_bytes}
    return compare(_measured("drain by moves", "time"), times, [settings.longest_s * 1e3] * len(times), facts=facts)


async def _roles(fleet: _Fleet, settings: OffersSettings) -> Row:
    """Measure how long a drained prefill server takes until it has received its first room as a decode server."""
    times = []
    for _ in range(settings.rounds):
        room = fleet.next_room
        fleet.next_room += 1
        rooms = {"first": room, "tokens": LIVE_TOKENS}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(fleet.order, "a", "send", "live", count=1, gap_s=0.0, **rooms))
            switched = await fleet.order("c", "switch", "live", **rooms)
        times.append(switched["switch_s"] * 1e3)
        for fact in ("drain_s", "open_s", "close_s"):
            fleet.note(fact, switched[fact])
    return compare(_measured("prefill server becomes decode server", "time"), times, facts=fleet.take_facts())
