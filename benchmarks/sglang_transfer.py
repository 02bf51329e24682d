"""Comparison of kvflow behind SGLang's interfaces with SGLang's own NIXL backend.

Each side is a process with SGLang's manager. A scheduler thread in it calls senders and receivers as SGLang's queues
do, and polls all of them every 0.2 ms. It runs in the environment that `make test-sglang` creates:

    .cache/sglang/bin/python -m benchmarks sglang_transfer
"""

import argparse
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec

from benchmarks.embedded.command import Player, check_sglang, open_player, times
from benchmarks.embedded.loads import LANES, EmbeddedOptions, Way
from benchmarks.pair.loads import SHAPES
from benchmarks.rows import Measured, Row, Tail, compare, percentile, print_rows, there_and_back
from kvflow.cli.options import check_positive

__all__ = ["add_arguments", "prepare"]

WAYS: Final[tuple[Way, ...]] = ("adapter", "sglang")
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b", help="of the cache")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="of a request")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="of a round")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of each way and number in flight")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "tokens", "requests", "rounds")
    check_sglang()
    options = EmbeddedOptions(backend="nixl", shape=arguments.shape, tokens=arguments.tokens)
    plan = Plan(options, arguments.requests, arguments.rounds)
    return lambda: print_rows(plan.measure, is_json=arguments.json)


class Plan(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        options: Options of all processes.
        count: Requests in a round.
        rounds: Rounds of each way and number in flight.
    """

    options: EmbeddedOptions
    count: int
    rounds: int

    async def measure(self, on_row: Callable[[Row], None]) -> list[Row]:
        """Measure both ways with the same processes; errors as in `open_sides`."""
        rows: list[Row] = []
        async with AsyncExitStack() as stack:
            players = {way: await stack.enter_async_context(open_player(self.options, way)) for way in WAYS}
            async for row in self._rows(players):
                rows.append(row)
                on_row(row)
        return rows

    async def _rows(self, players: dict[Way, Player]) -> AsyncIterator[Row]:
        for lanes in (1, LANES):
            played: dict[Way, list[Played]] = {way: [] for way in WAYS}
            for way in WAYS:
                await players[way].play(ENGINE, WARM_UP, lanes, 0.0)
            for way in there_and_back(WAYS, self.rounds):
                played[way].append(await players[way].play(ENGINE, self.count, lanes, 0.0))
            for row in self._transfers(f"{lanes} in flight", played):
                yield row
        for row in self._calls(f"{LANES} in flight", played):
            yield row
        rested = {way: await players[way].rest(REST_S) for way in WAYS}
        for number, side in enumerate(SIDES):
            idle = {way: [[100 * found[number]["cpu_s"] / found[number]["wall_s"]]] for way, found in rested.items()}
            yield _row(self._measured("idle", f"CPU of {side}, % of a core", "%"), idle)

    def _transfers(self, case: str, played: dict[Way, list[Played]]) -> Iterator[Row]:
        rates = {way: [[self.count / got["wall_s"]] for _, got in rounds] for way, rounds in played.items()}
        yield _row(self._measured(case, "requests a second", "1/s", "higher"), rates)
        took = {
            way: [times(sent["began_ns"], got["ended_ns"]) for sent, got in rounds] for way, rounds in played.items()
        }
        yield _row(self._measured(case, "from send() to decode's Success", "ms"), took)
        for number, side in enumerate(SIDES):
            cpu = {way: [[1e3 * one[number]["cpu_s"] / self.count] for one in rounds] for way, rounds in played.items()}
            yield _row(self._measured(case, f"CPU of {side} a request", "ms"), cpu)

    def _calls(self, case: str, played: dict[Way, list[Played]]) -> Iterator[Row]:
        for (side, call), name in CALLS.items():
            number = SIDES.index(side)
            took = {way: [one[number]["calls_us"][call] for one in rounds] for way, rounds in played.items()}
            yield _row(self._measured(case, name, "us"), took)

    def _measured(self, case: str, quantity: str, unit: str, better: Any = "lower") -> Measured:
        options = self.options
        group = f"{options.shape} over NIXL, requests of {options.tokens} tokens; bare is SGLang's own backend"
        return Measured(bench="sglang_transfer", group=group, case=case, quantity=quantity, unit=unit, better=better)


def _row(measured: Measured, values: Mapping[Way, Sequence[Sequence[float]]]) -> Row:
    """Make a row from the values of each round: medians by round, and percentiles over all rounds."""
    medians = {way: [statistics.median(one) for one in rounds] for way, rounds in values.items()}
    own, other = ([value for one in values[way] for value in one] for way in WAYS)
    if len(own) == len(medians["adapter"]):  # a round has one value
        return compare(measured, medians["adapter"], medians["sglang"])
    tail = Tail(
        kvflow_p50=percentile(own, 0.5),
        kvflow_p99=percentile(own, 0.99),
        bare_p50=percentile(other, 0.5),
        bare_p99=percentile(other, 0.99),
    )
    return compare(measured, medians["adapter"], medians["sglang"], tail=tail)
