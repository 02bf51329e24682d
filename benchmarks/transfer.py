"""Goodput of one transfer at a time, compared with the bare transport."""

import argparse
import statistics
from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

import msgspec

from benchmarks.options import names
from benchmarks.pair.loads import MAX_TABLES, SHAPES, TABLES, Load
from benchmarks.pair.options import add_pair_options, check_pair_options
from benchmarks.pair.processes import Rounds, open_pair, rounds_in_turn
from benchmarks.rows import Measured, Row, best_bare, compare, print_rows

__all__ = ["TransferSettings", "add_arguments", "measure_transfers", "prepare"]

ROUND_BYTES: Final = 2**30
MIN_TRANSFERS: Final = 2
MAX_TRANSFERS: Final = 32
"""Transfers of a round: enough to move `ROUND_BYTES`, within these bounds. The first one is slower than the others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--shapes", type=names, default="llama3-8b,mla", metavar="NAME,...", help="cache shapes")
    add_pair_options(parser, tokens="16,256,512,2048,8192,32768")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the measurement.

    Raises:
        ConfigError: An option is invalid.
    """
    check_pair_options(arguments, *arguments.shapes)
    settings = TransferSettings(
        backend=arguments.backend,
        shapes=arguments.shapes,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        pool_bytes=arguments.pool_megabytes * 2**20,
        memory=arguments.memory,
    )
    return lambda: print_rows(lambda on_row: measure_transfers(settings, on_row), is_json=arguments.json)


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the measurement.

    Attributes:
        backend: Transport, "nixl" or "mooncake".
        shapes: Names in `SHAPES`.
        tokens: Tokens of the transfers, in whole pages.
        rounds: Number of rounds of each way.
        pool_bytes: Minimum pool size of each side, so that caches do not hold the pages of small transfers.
        memory: Where the pools are, a name in `MEMORIES`.
    """

    backend: str = "nixl"
    shapes: tuple[str, ...] = ("llama3-8b", "mla")
    tokens: tuple[int, ...] = (16, 256, 512, 2048, 8192, 32768)
    rounds: int = 11
    pool_bytes: int = 2**28
    memory: str = "host"


async def measure_transfers(settings: TransferSettings, on_row: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """Run all cases, with new processes for each shape.

    Args:
        settings: Settings of the measurement.
        on_row: Called with each row when its case has ended.

    Raises:
        ChildFailed: A process hangs, or ended with an error or with output on its standard error.
        WrongBytes: Wrong bytes have arrived.
    """
    rows: list[Row] = []
    tokens = max(settings.tokens)
    for shape in settings.shapes:
        async with open_pair(
            settings.backend, shape, num_bytes=settings.pool_bytes, tokens=tokens, memory=settings.memory
        ) as pair:
            for load in _loads(settings, SHAPES[shape].token_bytes):
                rounds = await rounds_in_turn(pair, load, settings.rounds)
                rows.append(_row(settings.backend, shape, load, rounds))
                on_row(rows[-1])
    return rows


def _loads(settings: TransferSettings, token_bytes: int) -> Iterator[Load]:
    for tokens, table in product(settings.tokens, TABLES):
        num_bytes = tokens * token_bytes
        count = min(MAX_TRANSFERS, max(MIN_TRANSFERS, ROUND_BYTES // num_bytes))
        tables = max(1, min(MAX_TABLES, settings.pool_bytes // num_bytes))
        yield Load(way="kvflow", tokens=tokens, table=table, count=count, tables=tables)


def _row(backend: str, shape: str, load: Load, rounds: Rounds) -> Row:
    num_bytes = load.tokens * SHAPES[shape].token_bytes
    rates = {
        way: [num_bytes / statistics.median(one.latencies_s) / 1e9 for one in played] for way, played in rounds.items()
    }
    measured = Measured(
        bench="transfer",
        group=f"{shape} over {backend}, one transfer at a time",
        case=f"{load.tokens} tokens, {load.table}",
        quantity="goodput",
        unit="GB/s",
        better="higher",
    )
    way = best_bare(rates, measured.better)
    facts: dict[str, float | str] = {"bytes": num_bytes, "bare_way": way, "transfers_per_round": load.count}
    return compare(measured, rates["kvflow"], rates[way], facts=facts)
