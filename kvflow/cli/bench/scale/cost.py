"""What one transfer costs while many others are in flight, or with many peers."""

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import anyio
from msgspec import structs

from kvflow.cli.bench.rows import Measured, Row, compare, there_and_back
from kvflow.cli.bench.scale.rooms import Rooms, deploy

__all__ = ["CostSettings", "measure_in_flight", "measure_peers", "measure_standing"]

WARM_UP: Final = 100
"""Transfers before the measured ones."""


class CostSettings(NamedTuple):
    """What to measure.

    Attributes:
        in_flight: Transfers in flight; each case is held against the one that is nearest to 100.
        peers: Peers of the one rank; each case is held against the first.
        rounds: Of each case; all cases take turns.
        transfers: Measured in a round.
        in_flight_with_peers: In flight over all peers.
        standing_s: For how long it is measured what waiting costs, after rooms have waited for so long already.
    """

    in_flight: Sequence[int] = (10, 100, 1_000, 10_000)
    peers: Sequence[int] = (1, 4, 16, 64)
    rounds: int = 3
    transfers: int = 1_000
    in_flight_with_peers: int = 256
    standing_s: float = 20.0


class _Case(NamedTuple):
    name: str
    num_prefill: int
    num_decode: int
    in_flight: int


class _Cost(NamedTuple):
    """Of one transfer, in microseconds."""

    cpu: float
    wall: float


async def measure_in_flight(settings: CostSettings, report: Callable[[Row], None]) -> list[Row]:
    """Finish the oldest and open a new one, over and over, while so many are in flight between two ranks."""
    cases = [_Case(f"{count} in flight", 1, 1, count) for count in settings.in_flight]
    nearest = min(range(len(cases)), key=lambda index: abs(cases[index].in_flight - 100))
    costs = await _measure(cases, settings)
    return _rows("transfers in flight", cases, costs, nearest, report)


async def measure_peers(settings: CostSettings, report: Callable[[Row], None]) -> list[Row]:
    """The same with a rank that has many peers, which take turns."""
    rows: list[Row] = []
    in_flight = settings.in_flight_with_peers
    to_one_prefill = [_Case(f"{count} decode ranks to 1 prefill rank", 1, count, in_flight) for count in settings.peers]
    to_one_decode = [_Case(f"{count} prefill ranks to 1 decode rank", count, 1, in_flight) for count in settings.peers]
    for cases in (to_one_prefill, to_one_decode):
        costs = await _measure(cases, settings)
        rows += _rows(f"peers, {in_flight} in flight", cases, costs, 0, report)
    return rows


async def measure_standing(settings: CostSettings, report: Callable[[Row], None]) -> list[Row]:
    """Measure what transfers cost by the second while they wait: pings, and words that are said again."""
    count = max(settings.in_flight)
    async with deploy() as pairs:
        rooms = Rooms(pairs)
        await rooms.fill(count)
        await anyio.sleep(settings.standing_s)
        began, cpu = time.monotonic(), time.process_time()
        await anyio.sleep(settings.standing_s)
        share = 100 * (time.process_time() - cpu) / (time.monotonic() - began)
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


async def _measure(cases: Sequence[_Case], settings: CostSettings) -> list[list[_Cost]]:
    """Give the costs of each case, one for each round."""
    costs: list[list[_Cost]] = [[] for _ in cases]
    for index in there_and_back(range(len(cases)), settings.rounds):
        costs[index].append(await _measure_once(cases[index], settings.transfers))
    return costs


async def _measure_once(case: _Case, transfers: int) -> _Cost:
    async with deploy(case.num_prefill, case.num_decode) as pairs:
        rooms = Rooms(pairs)
        await rooms.fill(max(case.in_flight, len(pairs)))
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
    """Rows of every case for both quantities; the ratio is to the case with the index `base`."""
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
