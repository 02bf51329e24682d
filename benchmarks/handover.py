"""Latency until decode may start, rate and CPU time of small requests, compared with the bare transport."""

import argparse
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import product

import msgspec

from benchmarks.options import counts
from benchmarks.pair.loads import MAX_TABLES, SHAPES, TABLES, Load, Table
from benchmarks.pair.options import add_pair_options, check_pair_options
from benchmarks.pair.processes import Pair, Round, Rounds, open_pair, rounds_in_turn
from benchmarks.rows import Measured, Row, Tail, best_bare, compare, percentile, print_rows
from kvflow.cli.options import check_positive

__all__ = ["HandoverSettings", "add_arguments", "measure_handovers", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--shape", default="llama3-8b", metavar="NAME", help="cache shape")
    add_pair_options(parser, tokens="16,256")
    in_flight = "numbers of requests in flight"
    parser.add_argument("--in-flight", type=counts, default="1,16,64", metavar="N,...", help=in_flight)
    parser.add_argument("--table", default="random", choices=TABLES, help="order of the pages on both sides")
    parser.add_argument("--requests", type=int, default=256, metavar="N", help="requests in each round")
    parser.add_argument("--keys", action="store_true", help="encrypt the control channel")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the measurement.

    Raises:
        ConfigError: An option is invalid.
    """
    check_pair_options(arguments, arguments.shape)
    check_positive(arguments, "requests")
    settings = HandoverSettings(
        backend=arguments.backend,
        shape=arguments.shape,
        tokens=arguments.tokens,
        in_flight=arguments.in_flight,
        rounds=arguments.rounds,
        requests=arguments.requests,
        pool_bytes=arguments.pool_megabytes * 2**20,
        has_keys=arguments.keys,
        memory=arguments.memory,
        table=arguments.table,
    )
    return lambda: print_rows(lambda on_row: measure_handovers(settings, on_row), is_json=arguments.json)


class HandoverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the measurement.

    Attributes:
        backend: Transport, "nixl" or "mooncake".
        shape: Name in `SHAPES`.
        tokens: Tokens of the requests, in whole pages; those of the first number are also timed one by one.
        in_flight: Numbers of requests in flight.
        rounds: Number of rounds of each way.
        requests: Requests in a round with the first number of tokens; other rounds move as many bytes, but at least two
            requests per lane.
        pool_bytes: Minimum pool size of each side, so that caches do not hold all pages.
        has_keys: The control channel has keys.
        memory: Where the pools are, a name in `MEMORIES`.
        table: Order of the pages on both sides.
    """

    backend: str = "nixl"
    shape: str = "llama3-8b"
    tokens: tuple[int, ...] = (16, 256)
    in_flight: tuple[int, ...] = (1, 16, 64)
    rounds: int = 11
    requests: int = 256
    pool_bytes: int = 2**28
    has_keys: bool = False
    memory: str = "host"
    table: Table = "random"


async def measure_handovers(settings: HandoverSettings, on_row: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """Run all cases with one pair of processes.

    Args:
        settings: Settings of the measurement.
        on_row: Called with each row when its case has ended.

    Raises:
        ChildFailed: A process hangs, or ended with an error or with output on its standard error.
        WrongBytes: Wrong bytes have arrived.
    """
    rows: list[Row] = []
    tokens = max(settings.tokens) * max(settings.in_flight)
    async with open_pair(
        settings.backend,
        settings.shape,
        num_bytes=settings.pool_bytes,
        tokens=tokens,
        memory=settings.memory,
        has_keys=settings.has_keys,
    ) as pair:
        async for row in _measure(pair, settings):
            rows.append(row)
            on_row(row)
    return rows


async def _measure(pair: Pair, settings: HandoverSettings) -> AsyncIterator[Row]:
    first = settings.tokens[0]
    load = _load(settings, first, 1, is_announced=True)
    yield _time_row(settings, first, await rounds_in_turn(pair, load, settings.rounds))
    for tokens, lanes in product(settings.tokens, settings.in_flight):
        load = _load(settings, tokens, lanes, is_announced=False)
        for row in _rate_rows(settings, load, await rounds_in_turn(pair, load, settings.rounds)):
            yield row


def _load(settings: HandoverSettings, tokens: int, lanes: int, *, is_announced: bool) -> Load:
    num_bytes = tokens * SHAPES[settings.shape].token_bytes
    return Load(
        way="kvflow",
        tokens=tokens,
        table=settings.table,
        count=max(2 * lanes, settings.requests * settings.tokens[0] // tokens),
        tables=max(1, min(MAX_TABLES, settings.pool_bytes // num_bytes) // lanes) * lanes,
        lanes=lanes,
        is_announced=is_announced,
    )


def _time_row(settings: HandoverSettings, tokens: int, rounds: Rounds) -> Row:
    times = {way: [statistics.median(one.latencies_s) * 1e6 for one in played] for way, played in rounds.items()}
    way = best_bare(times, "lower")
    kvflow, bare = ([took * 1e6 for one in rounds[each] for took in one.latencies_s] for each in ("kvflow", way))
    tail = Tail(
        kvflow_p50=percentile(kvflow, 0.5),
        kvflow_p99=percentile(kvflow, 0.99),
        bare_p50=percentile(bare, 0.5),
        bare_p99=percentile(bare, 0.99),
    )
    measured = Measured(
        bench="handover",
        group=_group(settings, tokens),
        case="one at a time",
        quantity="handover latency",
        unit="us",
        better="lower",
    )
    facts: dict[str, float | str] = {"bare_way": way, "requests": len(kvflow)}
    return compare(measured, times["kvflow"], times[way], tail=tail, facts=facts)


def _rate_rows(settings: HandoverSettings, load: Load, rounds: Rounds) -> Iterator[Row]:
    requests = Measured(
        bench="handover",
        group=_group(settings, load.tokens),
        case=f"{load.lanes} in flight",
        quantity="requests",
        unit="1/s",
        better="higher",
    )
    rates = {way: [load.count / one.elapsed_s for one in played] for way, played in rounds.items()}
    way = best_bare(rates, "higher")
    facts: dict[str, float | str] = {"requests_per_round": load.count, "bare_way": way}
    yield compare(requests, rates["kvflow"], rates[way], facts=facts)
    cpu = msgspec.structs.replace(requests, quantity="CPU of both sides", unit="ms per request", better="lower")
    costs = {way: [one.cpu_s / load.count * 1e3 for one in played] for way, played in rounds.items()}
    way = best_bare(costs, "lower")
    facts = {"requests_per_round": load.count, "bare_way": way, **_threads(load, rounds["kvflow"])}
    yield compare(cpu, costs["kvflow"], costs[way], facts=facts)


def _threads(load: Load, rounds: Sequence[Round]) -> dict[str, float]:
    """Return the CPU milliseconds per request in kvflow's own threads."""
    return {
        f"{name} ms": round(statistics.median(one.thread_cpu_s.get(name, 0.0) for one in rounds) / load.count * 1e3, 4)
        for name in rounds[0].thread_cpu_s
    }


def _group(settings: HandoverSettings, tokens: int) -> str:
    keys = ", with keys" if settings.has_keys else ""
    return f"{settings.shape} over {settings.backend}, requests of {tokens} tokens{keys}"
