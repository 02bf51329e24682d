"""Small requests: how soon decode may run, how many go through in a second, and what CPU each of them takes."""

import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final, Literal

import msgspec

from kvflow.cli.bench.pair.options import MAX_TABLES, SHAPES, Load, PairOptions, Way
from kvflow.cli.bench.pair.pair import Pair, Round, open_pair, rounds_in_turn
from kvflow.cli.bench.pair.pool import slots_for
from kvflow.cli.bench.rows import Measured, Row, Tail, compare, percentile

__all__ = ["HandoverSettings", "measure_handovers"]

BARE_WAYS: Final[tuple[Way, ...]] = ("bare", "bare-napping")
WAYS: Final[tuple[Way, ...]] = ("kvflow", *BARE_WAYS, "bare-embedded")

Better = Literal["higher", "lower"]


class HandoverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        backend: Transport, "nixl" or "mooncake".
        shape: Of `SHAPES`.
        tokens: Of the requests, whole pages; those of the first number are also timed one by one.
        in_flight: How many requests are under way at once.
        rounds: Of each way.
        requests: Of the first number of tokens in a round; others move as many bytes, but at least two for each lane.
        pool_bytes: Of each side at least, so that caches do not keep the pages.
    """

    backend: str = "nixl"
    shape: str = "llama3-8b"
    tokens: tuple[int, ...] = (16, 256)
    in_flight: tuple[int, ...] = (1, 16, 64)
    rounds: int = 11
    requests: int = 256
    pool_bytes: int = 2**28


async def measure_handovers(settings: HandoverSettings, on_row: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """Run all cases with one pair of processes.

    Args:
        settings: What to run.
        on_row: Told of each row when its case has ended.

    Raises:
        WorkerFailed: A process hangs, or ended with an error or with something on its standard error.
        WrongBytes: Something arrived wrongly.
    """
    rows: list[Row] = []
    slots = slots_for(SHAPES[settings.shape], settings.pool_bytes, max(settings.tokens) * max(settings.in_flight))
    async with open_pair(PairOptions(backend=settings.backend, shape=settings.shape, slots=slots)) as pair:
        async for row in _measure(pair, settings):
            rows.append(row)
            on_row(row)
    return rows


async def _measure(pair: Pair, settings: HandoverSettings) -> AsyncIterator[Row]:
    first = settings.tokens[0]
    played = await rounds_in_turn(pair, _loads(settings, first, 1, is_announced=True), settings.rounds)
    yield _time_row(settings, first, played)
    for tokens, lanes in product(settings.tokens, settings.in_flight):
        loads = _loads(settings, tokens, lanes, is_announced=False)
        played = await rounds_in_turn(pair, loads, settings.rounds)
        for row in _rate_rows(settings, loads["kvflow"], played):
            yield row


def _loads(settings: HandoverSettings, tokens: int, lanes: int, *, is_announced: bool) -> dict[Way, Load]:
    num_bytes = tokens * SHAPES[settings.shape].token_bytes
    count = max(2 * lanes, settings.requests * settings.tokens[0] // tokens)
    tables = max(1, min(MAX_TABLES, settings.pool_bytes // num_bytes) // lanes) * lanes
    common = Load(
        way="kvflow",
        tokens=tokens,
        table="random",
        count=count,
        tables=tables,
        lanes=lanes,
        is_announced=is_announced,
    )
    return {way: msgspec.structs.replace(common, way=way) for way in WAYS}


def _time_row(settings: HandoverSettings, tokens: int, played: Mapping[Way, Sequence[Round]]) -> Row:
    times = {way: [statistics.median(one.latencies_s) * 1e6 for one in rounds] for way, rounds in played.items()}
    way = _best(times, "lower")
    kvflow, bare = ([took * 1e6 for one in played[each] for took in one.latencies_s] for each in ("kvflow", way))
    tail = Tail(
        kvflow_p50=percentile(kvflow, 0.5),
        kvflow_p99=percentile(kvflow, 0.99),
        bare_p50=percentile(bare, 0.5),
        bare_p99=percentile(bare, 0.99),
    )
    measured = _measured(settings, tokens, "one at a time", "time from last chunk ready to decode may run")
    measured = msgspec.structs.replace(measured, unit="us", better="lower")
    facts = {"bare_way": way, "requests": len(kvflow)}
    return compare(measured, times["kvflow"], times[way], others=_others(times), tail=tail, facts=facts)


def _rate_rows(settings: HandoverSettings, load: Load, played: Mapping[Way, Sequence[Round]]) -> Iterator[Row]:
    rates = {way: [load.count / one.elapsed_s for one in rounds] for way, rounds in played.items()}
    costs = {way: [one.cpu_s / load.count * 1e3 for one in rounds] for way, rounds in played.items()}
    case = f"{load.lanes} in flight"
    way = _best(rates, "higher")
    facts: dict[str, float | str] = {"requests_per_round": load.count}
    measured = msgspec.structs.replace(_measured(settings, load.tokens, case, "requests"), unit="1/s")
    yield compare(measured, rates["kvflow"], rates[way], others=_others(rates), facts={**facts, "bare_way": way})
    way = _best(costs, "lower")
    measured = msgspec.structs.replace(
        _measured(settings, load.tokens, case, "CPU of both sides"), unit="ms per request", better="lower"
    )
    facts |= {"bare_way": way, **_threads(load, played["kvflow"])}
    yield compare(measured, costs["kvflow"], costs[way], others=_others(costs), facts=facts)


def _others(values: Mapping[Way, Sequence[float]]) -> dict[str, Sequence[float]]:
    """What bare comes to where event loops and threads make its calls."""
    return {"in event loops": values["bare-embedded"]}


def _threads(load: Load, rounds: Sequence[Round]) -> dict[str, float]:
    """Milliseconds of CPU for each request in kvflow's own threads."""
    return {
        f"{name} ms": round(statistics.median(one.thread_cpu_s.get(name, 0.0) for one in rounds) / load.count * 1e3, 4)
        for name in rounds[0].thread_cpu_s
    }


def _measured(settings: HandoverSettings, tokens: int, case: str, quantity: str) -> Measured:
    return Measured(
        bench="handover",
        group=f"{settings.shape} over {settings.backend}, requests of {tokens} tokens",
        case=case,
        quantity=quantity,
        unit="",
        better="higher",
    )


def _best(values: Mapping[Way, Sequence[float]], better: Better) -> Way:
    """Which of the bare ways is the better one: where cores are few, a loop that naps is often the faster one."""
    choose = max if better == "higher" else min
    return choose(BARE_WAYS, key=lambda way: statistics.median(values[way]))
