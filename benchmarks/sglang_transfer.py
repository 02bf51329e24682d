"""Comparison of kvflow behind SGLang's interfaces with SGLang's own NIXL backend.

Each side is a process with SGLang's manager. A scheduler thread in it calls senders and receivers as SGLang's queues
do, and polls all of them every 0.2 ms. kvflow plays each round against SGLang with its eight NIXL threads and four
transfer workers of prefill, and with two of each, which suits a machine with few cores. After the rounds of a case,
every byte that decode received is checked. It runs in the environment that `make test-sglang` creates:

    .cache/sglang/bin/python -m benchmarks sglang_transfer
"""

import argparse
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks.embedded.command import Player, check_sglang, open_player, times
from benchmarks.embedded.loads import LANES, EmbeddedOptions, Load, Way
from benchmarks.options import cases_of, names
from benchmarks.pair.loads import SHAPES
from benchmarks.rows import Measured, Row, Tail, compare, percentile, print_rows, there_and_back
from kvflow.cli.options import check_positive
from kvflow.errors import ConfigError

__all__ = ["add_arguments", "prepare"]

KVFLOW: Final = "kvflow"
RIVALS: Final = {"8 threads": 8, "2 threads": 2}
"""SGLang's own backend, by number of threads."""

PLAYERS: Final = (KVFLOW, *RIVALS)

ENGINE: Final = "sleeps"
WARM_UP: Final = 8
REST_S: Final = 3.0
SIDES: Final = ("prefill", "decode")

CALLS: Final = {
    ("prefill", "send"): "Sender()",
    ("prefill", "finish"): "init() and send()",
    ("prefill", "completed"): "poll() of all senders",
    ("decode", "receive"): "Receiver(), init() and send_metadata()",
    ("decode", "completed"): "poll() of all receivers",
}

Played = tuple[dict[str, Any], dict[str, Any]]


class Case(NamedTuple):
    """What requests look like.

    Attributes:
        label: Name in rows.
        is_fragmented: Pages are in random order, as in a pool that has been used for long.
        chunks: Chunks of a request.
        has_prefix: Decode has the first half of the tokens in its cache.
    """

    label: str
    is_fragmented: bool = True
    chunks: int = 1
    has_prefix: bool = False


CASES: Final = {
    "contiguous": Case("consecutive pages", is_fragmented=False),
    "fragmented": Case("pages in random order"),
    "chunks": Case("random order, 4 chunks", chunks=4),
    "prefix": Case("random order, first half cached on decode", has_prefix=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--cases", type=names, default="all", metavar="NAME,...", help=f"of {', '.join(CASES)}")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b", help="of the cache")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of a request")
    parser.add_argument("--requests", type=int, default=60, metavar="N", help="of a round")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of each way and number in flight")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "tokens", "requests", "rounds")
    cases = [CASES[name] for name in cases_of(arguments.cases, CASES)]
    pages = arguments.tokens // SHAPES[arguments.shape].page_size
    least = max(case.chunks + case.has_prefix for case in cases)
    if pages < least:
        raise ConfigError("a request has too few pages for these cases", option="--tokens", pages=pages, least=least)
    check_sglang()
    options = EmbeddedOptions(backend="nixl", shape=arguments.shape, tokens=arguments.tokens)
    plan = Plan(options, cases, pages, arguments.requests, arguments.rounds)
    return lambda: print_rows(plan.measure, is_json=arguments.json)


class Plan(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        options: Options of all processes.
        cases: Cases, one after another.
        pages: Pages of a request.
        count: Requests in a round.
        rounds: Rounds of each way and number in flight.
    """

    options: EmbeddedOptions
    cases: Sequence[Case]
    pages: int
    count: int
    rounds: int

    async def measure(self, on_row: Callable[[Row], None]) -> list[Row]:
        """Measure all ways with the same processes; errors as in `open_sides` and `Player.check`."""
        rows: list[Row] = []
        async with AsyncExitStack() as stack:
            players = {}
            for name in PLAYERS:
                way: Way = "sglang" if name in RIVALS else "adapter"
                options = msgspec.structs.replace(self.options, threads=RIVALS.get(name, self.options.threads))
                players[name] = await stack.enter_async_context(open_player(options, way))
            async for row in self._rows(players):
                rows.append(row)
                on_row(row)
        return rows

    async def _rows(self, players: Mapping[str, Player]) -> AsyncIterator[Row]:
        for case in self.cases:
            async for row in self._case(case, players):
                yield row
        rested = {name: await player.rest(REST_S) for name, player in players.items()}
        for number, side in enumerate(SIDES):
            idle = {name: [[100 * found[number]["cpu_s"] / found[number]["wall_s"]]] for name, found in rested.items()}
            for row in self._compared("idle", f"CPU of {side}, % of a core", "%", idle):
                yield row

    async def _case(self, case: Case, players: Mapping[str, Player]) -> AsyncIterator[Row]:
        for lanes in (1, LANES):
            label = f"{case.label}, {lanes} in flight"
            load = Load(
                engine=ENGINE,
                count=self.count,
                lanes=lanes,
                is_fragmented=case.is_fragmented,
                chunks=case.chunks,
                prefix=self.pages // 2 if case.has_prefix else 0,
            )
            played: dict[str, list[Played]] = {name: [] for name in PLAYERS}
            for player in players.values():
                await player.play(msgspec.structs.replace(load, count=WARM_UP))
            for name in there_and_back(PLAYERS, self.rounds):
                played[name].append(await players[name].play(load))
            for row in self._transfers(label, played):
                yield row
        for row in self._calls(label, played):
            yield row
        for player in players.values():
            await player.check()

    def _transfers(self, case: str, played: dict[str, list[Played]]) -> Iterator[Row]:
        rates = {name: [[self.count / got["wall_s"]] for _, got in rounds] for name, rounds in played.items()}
        yield from self._compared(case, "requests a second", "1/s", rates, "higher")
        took = {
            name: [times(sent["began_ns"], got["ended_ns"]) for sent, got in rounds] for name, rounds in played.items()
        }
        yield from self._compared(case, "from send() to decode's Success", "ms", took)
        for number, side in enumerate(SIDES):
            cpu = {
                name: [[1e3 * one[number]["cpu_s"] / self.count] for one in rounds] for name, rounds in played.items()
            }
            yield from self._compared(case, f"CPU of {side} a request", "ms", cpu)

    def _calls(self, case: str, played: dict[str, list[Played]]) -> Iterator[Row]:
        for (side, call), quantity in CALLS.items():
            number = SIDES.index(side)
            took = {name: [one[number]["calls_us"][call] for one in rounds] for name, rounds in played.items()}
            yield from self._compared(case, quantity, "us", took)

    def _compared(
        self,
        case: str,
        quantity: str,
        unit: str,
        values: Mapping[str, Sequence[Sequence[float]]],
        better: Any = "lower",
    ) -> Iterator[Row]:
        """Yield a row for each number of SGLang's threads."""
        options = self.options
        group = f"{options.shape} over NIXL, requests of {options.tokens} tokens; bare is SGLang's own backend"
        for name in RIVALS:
            measured = Measured(
                bench="sglang_transfer",
                group=group,
                case=f"{case}; SGLang with {name}",
                quantity=quantity,
                unit=unit,
                better=better,
            )
            yield _row(measured, values[KVFLOW], values[name])


def _row(measured: Measured, own: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Row:
    """Make a row from the values of each round: medians by round, and percentiles over all rounds."""
    medians = [[statistics.median(one) for one in rounds] for rounds in (own, other)]
    single, others = ([value for one in rounds for value in one] for rounds in (own, other))
    if len(single) == len(own):  # a round has one value
        return compare(measured, *medians)
    tail = Tail(
        kvflow_p50=percentile(single, 0.5),
        kvflow_p99=percentile(single, 0.99),
        bare_p50=percentile(others, 0.5),
        bare_p99=percentile(others, 0.99),
    )
    return compare(measured, *medians, tail=tail)
