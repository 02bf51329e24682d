"""Cost of a transfer with many others in flight or with many peers, and cost and memory of waiting transfers."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import anyio
from msgspec import structs

from benchmarks.memory import measure_memory
from benchmarks.options import cases_of, counts, names
from benchmarks.resources import cpu_share
from benchmarks.rooms import BATCH, Rooms, deploy
from benchmarks.rows import Measured, Row, compare, print_rows, there_and_back
from kvflow.cli.options import check_positive

__all__ = ["ScaleSettings", "add_arguments", "measure_scale", "prepare"]

CASES: Final = ("memory", "in-flight", "peers", "waiting")

WARM_UP: Final = 100
"""Transfers before the measured ones."""


class ScaleSettings(NamedTuple):
    """What to measure.

    Attributes:
        in_flight: Transfers in flight; the case nearest to 100 is the base of the ratios.
        peers: Peers of the one rank; the first case is the base of the ratios.
        rounds: Rounds of each case; the cases take turns.
        transfers: Transfers measured in a round.
        in_flight_with_peers: Transfers in flight over all peers.
        waiting: Number of waiting transfers in the memory measurement.
        standing_s: How long to measure the CPU cost of waiting, after the rooms have waited as long.
    """

    in_flight: Sequence[int] = (10, 100, 1_000, 10_000)
    peers: Sequence[int] = (1, 4, 16, 64)
    rounds: int = 3
    transfers: int = 1_000
    in_flight_with_peers: int = 256
    waiting: int = 5_000
    standing_s: float = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--cases", type=names, default="all", metavar="NAME,...", help=f"of {', '.join(CASES)}")
    parser.add_argument("--in-flight", type=counts, default="10,100,1000,10000", metavar="N,...", help="transfers")
    parser.add_argument("--peers", type=counts, default="1,4,16,64", metavar="N,...", help="of one rank")
    parser.add_argument("--waiting", type=int, default=5_000, metavar="N", help="for memory")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each case")
    parser.add_argument("--transfers", type=int, default=1_000, metavar="N", help="of a round")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="for what waiting costs")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "waiting", "rounds", "transfers", "seconds")
    cases = cases_of(arguments.cases, CASES)
    settings = ScaleSettings(
        in_flight=arguments.in_flight,
        peers=arguments.peers,
        rounds=arguments.rounds,
        transfers=arguments.transfers,
        waiting=arguments.waiting,
        standing_s=arguments.seconds,
    )
    return lambda: print_rows(lambda report: measure_scale(settings, cases, report), is_json=arguments.json)


async def measure_scale(settings: ScaleSettings, cases: Sequence[str], report: Callable[[Row], None]) -> list[Row]:
    """Measure some of `CASES`; call `report` with each row."""
    rows: list[Row] = []
    if "memory" in cases:
        rows += await measure_memory(settings.waiting, report)
    for case, measure in (("in-flight", measure_in_flight), ("peers", measure_peers), ("waiting", measure_standing)):
        if case in cases:
            rows += await measure(settings, report)
    return rows


class _Case(NamedTuple):
    name: str
    num_prefill: int
    num_decode: int
    in_flight: int


class _Cost(NamedTuple):
    """Cost of one transfer, in microseconds."""

    cpu: float
    wall: float


async def measure_in_flight(settings: ScaleSettings, report: Callable[[Row], None]) -> list[Row]:
    """Measure the turnover of rooms (finish the oldest, open a new one) by the number in flight between two ranks."""
    cases = [_Case(f"{count} in flight", 1, 1, count) for count in settings.in_flight]
    nearest = min(range(len(cases)), key=lambda index: abs(cases[index].in_flight - 100))
    costs = await _measure(cases, settings)
    return _rows("transfers in flight", cases, costs, nearest, report)


async def measure_peers(settings: ScaleSettings, report: Callable[[Row], None]) -> list[Row]:
    """Measure the turnover of rooms by the number of peers of one rank, which take turns."""
    rows: list[Row] = []
    in_flight = settings.in_flight_with_peers
    to_one_prefill = [_Case(f"{count} decode ranks to 1 prefill rank", 1, count, in_flight) for count in settings.peers]
    to_one_decode = [_Case(f"{count} prefill ranks to 1 decode rank", count, 1, in_flight) for count in settings.peers]
    for cases in (to_one_prefill, to_one_decode):
        costs = await _measure(cases, settings)
        rows += _rows(f"peers, {in_flight} in flight", cases, costs, 0, report)
    return rows


async def measure_standing(settings: ScaleSettings, report: Callable[[Row], None]) -> list[Row]:
    """Measure the CPU cost of waiting transfers: pings and retransmissions."""
    count = max(settings.in_flight)
    async with deploy(num_rooms=count) as pairs:
        rooms = Rooms(pairs)
        await rooms.fill(count)
        await anyio.sleep(settings.standing_s)
        share = await cpu_share(settings.standing_s)
        await rooms.finish_all()
    measured = Measured(
        bench="scale",
        group="waiting",
        case=f"{count} wait, both sides",
        quantity="CPU",
        unit="% of a core",
        better="lower",
    )
    row = compare(measured, [share])
    report(row)
    return [row]


async def _measure(cases: Sequence[_Case], settings: ScaleSettings) -> list[list[_Cost]]:
    """Return the costs of each case, one for each round."""
    costs: list[list[_Cost]] = [[] for _ in cases]
    for index in there_and_back(range(len(cases)), settings.rounds):
        costs[index].append(await _measure_once(cases[index], settings.transfers))
    return costs


async def _measure_once(case: _Case, transfers: int) -> _Cost:
    num_rooms = max(case.in_flight, case.num_prefill * case.num_decode)
    async with deploy(case.num_prefill, case.num_decode, num_rooms=num_rooms + BATCH) as pairs:
        rooms = Rooms(pairs)
        await rooms.fill(num_rooms)
        await rooms.turn_over(WARM_UP)
        began, cpu = time.perf_counter(), time.process_time()
        await rooms.turn_over(transfers)
        cost = _Cost(
            cpu=(time.process_time() - cpu) / transfers * 1e6, wall=(time.perf_counter() - began) / transfers * 1e6
        )
        await rooms.finish_all()
    return cost


def _rows(
    group: str, cases: Sequence[_Case], costs: Sequence[Sequence[_Cost]], base: int, report: Callable[[Row], None]
) -> list[Row]:
    """Make the rows of each case for both quantities, with ratios to the case at index `base`."""
    rows = []
    for quantity, unit in (("cpu", "us of CPU, both sides"), ("wall", "us")):
        values = [[getattr(cost, quantity) for cost in rounds] for rounds in costs]
        for case, own in zip(cases, values, strict=True):
            measured = Measured(
                bench="scale", group=group, case=case.name, quantity=f"{quantity} of a transfer", unit=unit,
                better="lower",
            )  # fmt: skip
            held = compare(measured, own, values[base])
            row = structs.replace(
                compare(measured, own, others={"reference": values[base]}),
                ratio=held.ratio,
                paired_ratio=held.paired_ratio,
            )
            report(row)
            rows.append(row)
    return rows
