"""Measure kvflow on this machine, next to the transport that it uses."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvflow.cli.options import HelpFormatter, check_positive, counts, names
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.cli.bench.rows import Measure

__all__ = ["add_arguments", "prepare"]

PAGE_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the measurements and their options."""
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    transfer = cases.add_parser("transfer", help="goodput of one transfer at a time", formatter_class=HelpFormatter)
    transfer.add_argument(
        "--shapes",
        type=names,
        default="llama3-8b,mla",
        metavar="NAME,...",
        help="shapes of the cache",
    )
    _add_common(transfer, "16,256,512,2048,8192,32768")
    transfer.set_defaults(load=_transfer)
    handover = cases.add_parser("handover", help="small requests: latency, rate and CPU", formatter_class=HelpFormatter)
    handover.add_argument(
        "--shape",
        dest="shapes",
        type=names,
        default="llama3-8b",
        metavar="NAME",
        help="shape of the cache",
    )
    _add_common(handover, "16,256")
    handover.add_argument(
        "--in-flight",
        type=counts,
        default="1,16,64",
        metavar="N,...",
        help="requests in flight at once",
    )
    handover.add_argument("--requests", type=int, default=256, metavar="N", help="requests in each round")
    handover.add_argument("--keys", action="store_true", help="let the control channel have keys")
    handover.set_defaults(load=_handover)


def _add_common(parser: argparse.ArgumentParser, tokens: str) -> None:
    parser.add_argument("--backend", default="nixl", choices=["nixl", "mooncake"], help="transport between processes")
    parser.add_argument("--tokens", type=counts, default=tokens, metavar="N,...", help="tokens of each request")
    parser.add_argument(
        "--rounds",
        type=int,
        default=11,
        metavar="N",
        help="rounds of kvflow and of the bare transport",
    )
    parser.add_argument(
        "--pool-megabytes",
        type=int,
        default=256,
        metavar="N",
        help="least size of the pool on each side",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each row and nothing else")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Load a measurement, and check its options.

    Raises:
        ConfigError: An option is unusable.
    """
    from kvflow.cli.bench.loads import SHAPES  # noqa: PLC0415 - `kvflow --help` works without numpy
    from kvflow.cli.bench.rows import print_rows  # noqa: PLC0415 - as above

    unknown = [name for name in arguments.shapes if name not in SHAPES]
    if unknown:
        raise ConfigError("no such shape", unknown=unknown, shapes=list(SHAPES))
    odd = [number for number in arguments.tokens if number % PAGE_SIZE]
    if odd:
        raise ConfigError("tokens must fill whole pages", tokens=odd, page_size=PAGE_SIZE)
    check_positive(arguments, "rounds", "pool_megabytes")
    measure: Measure = arguments.load(arguments)
    return lambda: print_rows(measure, is_json=arguments.json)


def _transfer(arguments: argparse.Namespace) -> "Measure":
    from kvflow.cli.bench.transfer import TransferSettings, measure_transfers  # noqa: PLC0415 - as above

    settings = TransferSettings(
        backend=arguments.backend,
        shapes=arguments.shapes,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        pool_bytes=arguments.pool_megabytes * 2**20,
    )
    return lambda on_row: measure_transfers(settings, on_row)


def _handover(arguments: argparse.Namespace) -> "Measure":
    from kvflow.cli.bench.handover import HandoverSettings, measure_handovers  # noqa: PLC0415 - as above

    if len(arguments.shapes) > 1:
        raise ConfigError("one shape at a time", option="--shape", value=",".join(arguments.shapes))
    check_positive(arguments, "requests")
    settings = HandoverSettings(
        backend=arguments.backend,
        shape=arguments.shapes[0],
        tokens=arguments.tokens,
        in_flight=arguments.in_flight,
        rounds=arguments.rounds,
        requests=arguments.requests,
        has_keys=arguments.keys,
        pool_bytes=arguments.pool_megabytes * 2**20,
    )
    return lambda on_row: measure_handovers(settings, on_row)
