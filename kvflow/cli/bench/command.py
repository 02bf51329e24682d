"""Benchmark kvflow against the bare transport on this machine."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvflow.cli.options import HelpFormatter, check_positive, counts, names, sentence
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.cli.bench.rows import Measure

__all__ = ["add_arguments", "prepare"]

PAGE_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the measurements and their options."""
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    text = "throughput of one transfer at a time"
    transfer = cases.add_parser("transfer", help=text, description=sentence(text), formatter_class=HelpFormatter)
    transfer.add_argument(
        "--shapes",
        type=names,
        default="llama3-8b,mla",
        metavar="NAME,...",
        help="cache shapes",
    )
    _add_common(transfer, "16,256,512,2048,8192,32768")
    transfer.set_defaults(load=_transfer)
    text = "latency, rate and CPU time of small requests"
    handover = cases.add_parser("handover", help=text, description=sentence(text), formatter_class=HelpFormatter)
    handover.add_argument(
        "--shape",
        dest="shapes",
        type=names,
        default="llama3-8b",
        metavar="NAME",
        help="cache shape",
    )
    _add_common(handover, "16,256")
    handover.add_argument(
        "--in-flight",
        type=counts,
        default="1,16,64",
        metavar="N,...",
        help="numbers of requests in flight",
    )
    handover.add_argument("--requests", type=int, default=256, metavar="N", help="requests in each round")
    handover.add_argument("--keys", action="store_true", help="encrypt the control channel")
    handover.set_defaults(load=_handover)


def _add_common(parser: argparse.ArgumentParser, tokens: str) -> None:
    parser.add_argument("--backend", default="nixl", choices=["nixl", "mooncake"], help="transport between processes")
    parser.add_argument("--tokens", type=counts, default=tokens, metavar="N,...", help="tokens of each request")
    parser.add_argument(
        "--rounds",
        type=int,
        default=11,
        metavar="N",
        help="rounds with kvflow and with the bare transport",
    )
    parser.add_argument(
        "--pool-megabytes",
        type=int,
        default=256,
        metavar="N",
        help="minimum pool size on each side, in MB",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each row and nothing else")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Load a measurement, check its options, and return a function that runs it.

    Raises:
        ConfigError: An option is invalid.
    """
    from kvflow.cli.bench.loads import SHAPES  # noqa: PLC0415 - `kvflow --help` works without numpy
    from kvflow.cli.bench.rows import print_rows  # noqa: PLC0415 - as above

    unknown = [name for name in arguments.shapes if name not in SHAPES]
    if unknown:
        raise ConfigError("unknown shape", unknown=unknown, shapes=list(SHAPES))
    odd = [number for number in arguments.tokens if number % PAGE_SIZE]
    if odd:
        raise ConfigError("tokens must be a multiple of the page size", tokens=odd, page_size=PAGE_SIZE)
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
        raise ConfigError("only one shape is allowed", option="--shape", value=",".join(arguments.shapes))
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
