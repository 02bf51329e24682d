"""Goodput of one transfer at a time, next to the bare transport and to a copy within one process."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Final

import msgspec

from kvflow.cli.bench.pair.options import MAX_TABLES, SHAPES, Load, PairOptions, Shape, Table, Way
from kvflow.cli.bench.pair.pair import Round, open_pair, rounds_in_turn
from kvflow.cli.bench.pair.pool import slots_for
from kvflow.cli.bench.rows import Measured, Row, compare

__all__ = ["TransferSettings", "measure_transfers"]

WAYS: Final[tuple[Way, ...]] = ("kvflow", "bare", "bare-napping", "bare-embedded", "bare-whole", "memcpy")
TABLES: Final[tuple[Table, ...]] = ("contiguous", "random")

ROUND_BYTES: Final = 2**30
MIN_TRANSFERS: Final = 2
MAX_TRANSFERS: Final = 32
"""Transfers of a round: as many as move so many bytes, within these bounds. The first one is slower than the others."""


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        backend: Transport, "nixl" or "mooncake".
        shapes: Of `SHAPES`.
        tokens: Of the transfers, whole pages.
        rounds: Of each way.
        pool_bytes: Of each side at least, so that caches do not keep the pages of small transfers.
    """

    backend: str = "nixl"
    shapes: tuple[str, ...] = ("llama3-8b", "mla")
    tokens: tuple[int, ...] = (16, 256, 512, 2048, 8192, 32768)
    rounds: int = 11
    pool_bytes: int = 2**28


async def measure_transfers(settings: TransferSettings, on_row: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """Run all cases, with processes of their own for each shape.

    Args:
        settings: What to run.
        on_row: Told of each case when it has ended.

    Raises:
        WorkerFailed: A process hangs, or ended with an error or with something on its standard error.
        WrongBytes: Something arrived wrongly.
    """
    rows: list[Row] = []
    for name in settings.shapes:
        shape = SHAPES[name]
        slots = slots_for(shape, settings.pool_bytes, max(settings.tokens))
        async with open_pair(PairOptions(backend=settings.backend, shape=name, slots=slots)) as pair:
            for tokens, table in product(settings.tokens, TABLES):
                loads = _loads(settings, shape, tokens, table)
                rounds = await rounds_in_turn(pair, loads, settings.rounds)
                rows.append(_row(settings.backend, name, loads["kvflow"], rounds))
                on_row(rows[-1])
    return rows


def _loads(settings: TransferSettings, shape: Shape, tokens: int, table: Table) -> dict[Way, Load]:
    num_bytes = tokens * shape.token_bytes
    count = min(MAX_TRANSFERS, max(MIN_TRANSFERS, ROUND_BYTES // num_bytes))
    tables = max(1, min(MAX_TABLES, settings.pool_bytes // num_bytes))
    return {way: Load(way=way, tokens=tokens, table=table, count=count, tables=tables) for way in WAYS}


def _row(backend: str, shape: str, load: Load, rounds: Mapping[Way, Sequence[Round]]) -> Row:
    num_bytes = load.tokens * SHAPES[shape].token_bytes
    rates = {
        way: [num_bytes / statistics.median(one.latencies_s) / 1e9 for one in played] for way, played in rounds.items()
    }
    bare_way: Way = max("bare", "bare-napping", key=lambda way: statistics.median(rates[way]))
    measured = Measured(
        bench="transfer",
        group=f"{shape} over {backend}, one transfer at a time",
        case=f"{load.tokens} tokens, {load.table}",
        quantity="goodput",
        unit="GB/s",
        better="higher",
    )
    return compare(
        measured,
        rates["kvflow"],
        rates[bare_way],
        others={
            "in event loops": rates["bare-embedded"],
            "one descriptor": rates["bare-whole"],
            "memcpy": rates["memcpy"],
        },
        facts={"bytes": num_bytes, "bare_way": bare_way, "transfers_per_round": load.count},
    )
