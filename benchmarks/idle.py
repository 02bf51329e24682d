"""CPU cost of connected ranks that are idle."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio

import kvflow
from benchmarks.resources import cpu_share
from benchmarks.rooms import Rooms, deploy
from benchmarks.rows import Measured, Row, compare, print_rows
from kvflow.cli.options import add_backend_option, check_backend, check_positive

__all__ = ["add_arguments", "measure_idle", "prepare"]

SETTLE_S: Final = 1.0
"""Wait between the transfer and the measurement, for the transfer's remaining work to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_backend_option(parser)
    parser.add_argument("--pairs", type=int, default=1, metavar="N", help="prefill and decode ranks")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable.
    """
    check_positive(arguments, "pairs", "seconds")
    backend = check_backend(arguments.backend)
    measure = partial(measure_idle, backend, arguments.pairs, arguments.seconds)
    return lambda: print_rows(measure, is_json=arguments.json)


async def measure_idle(backend: str, pairs: int, seconds: float, on_row: Callable[[Row], None]) -> list[Row]:
    """Connect pairs of ranks by one transfer each, then measure this process while it is idle.

    Args:
        backend: Transport of every rank.
        pairs: Prefill instances of one rank, each with a decode rank of its own.
        seconds: How long to measure.
        on_row: Called with the row.

    Returns:
        One row: CPU time of the whole process (every thread, registry included) as a share of one core, divided by the
        number of ranks.
    """
    async with deploy(pairs, pairs, backend=backend, timeouts=kvflow.Timeouts()) as every_pair:
        for pair in every_pair[:: pairs + 1]:  # the first with the first, the second with the second, ...
            rooms = Rooms([pair])
            await rooms.fill(1)
            await rooms.finish_all()
        await anyio.sleep(SETTLE_S)
        share = await cpu_share(seconds) / (2 * pairs)
    measured = Measured(
        bench="idle",
        group=f"connected ranks over {backend}",
        case=f"{2 * pairs} with nothing to do for {seconds:.1f} s",
        quantity="CPU of a rank",
        unit="% of a core",
        better="lower",
    )
    row = compare(measured, [share], facts={"ranks": 2 * pairs, "seconds": seconds})
    on_row(row)
    return [row]
