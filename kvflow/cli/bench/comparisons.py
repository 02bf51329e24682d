"""The measurements that give rows: kvflow next to something else, in turn, within one run."""

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import anyio

from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.cli.bench.rows import Row

__all__ = ["add_arguments", "add_common_arguments", "add_output_arguments", "cases_of", "counts", "shown"]

PAGE_SIZE = 16


def add_arguments(cases: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the measurements and their options."""
    transfer = cases.add_parser("transfer", help="goodput of one transfer at a time, next to the bare transport")
    transfer.add_argument(
        "--shapes", default="llama3-8b,mla", metavar="NAME,...", help="of a model's cache (default: %(default)s)"
    )
    transfer.add_argument(
        "--tokens",
        type=counts,
        default=(16, 256, 512, 2048, 8192, 32768),
        metavar="N,...",
        help="default: 16 to 32768, for which each side takes 4.3 GB",
    )
    _add_pair_arguments(transfer)
    transfer.set_defaults(measure=_transfer)
    handover = cases.add_parser("handover", help="small requests: latency, rate and CPU, next to the bare transport")
    handover.add_argument(
        "--shape", default="llama3-8b", metavar="NAME", help="of a model's cache (default: %(default)s)"
    )
    handover.add_argument("--tokens", type=counts, default=(16, 256), metavar="N,...", help="default: 16,256")
    handover.add_argument("--in-flight", type=counts, default=(1, 16, 64), metavar="N,...", help="default: 1,16,64")
    handover.add_argument(
        "--requests", type=int, default=256, metavar="N", help="small ones in a round (default: %(default)s)"
    )
    _add_pair_arguments(handover)
    handover.set_defaults(measure=_handover)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what all measurements in rounds have."""
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="of each way (default: %(default)s)")
    add_output_arguments(parser)


def _add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what measurements next to a bare transport have; only these two are known bare."""
    parser.add_argument("--backend", default="nixl", choices=["nixl", "mooncake"], help="transport between processes")
    add_common_arguments(parser)
    parser.add_argument(
        "--pool-megabytes", type=int, default=256, metavar="N", help="of each side at least (default: %(default)s)"
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what all measurements that give rows have."""
    parser.add_argument("--json", action="store_true", help="print one JSON object a row and nothing else")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the rows as well; needs kvflow[bench]")


def counts(text: str) -> tuple[int, ...]:
    """Read an option with several positive numbers."""
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def cases_of(text: str, known: Collection[str]) -> tuple[str, ...]:
    """Read an option with the names of several cases, or with "all".

    Raises:
        ConfigError: There is no such case.
    """
    cases = tuple(known) if text == "all" else tuple(text.split(","))
    unknown = [case for case in cases if case not in known]
    if unknown:
        raise ConfigError("no such case", unknown=unknown, cases=list(known))
    return cases


def shown(arguments: argparse.Namespace, measure: Callable[[Callable[["Row"], None]], Sequence["Row"]]) -> str:
    """Measure, and give what is to be printed; draw it if that is wanted.

    Args:
        arguments: With what `add_output_arguments` declares.
        measure: Gives rows, and tells its argument of each.
    """
    from kvflow.cli.bench.rows import rows_as_json, rows_as_table  # noqa: PLC0415 - `kvflow --help` works without numpy

    def report(row: "Row") -> None:
        if not arguments.json:
            print(f"{row.group}: {row.case}, {row.quantity}", file=sys.stderr, flush=True)

    rows = measure(report)
    if arguments.plot:
        from kvflow.cli.bench.plot import draw  # noqa: PLC0415 - matplotlib is an extra

        draw(rows, arguments.plot)
    return rows_as_json(rows) if arguments.json else rows_as_table(rows)


def _transfer(arguments: argparse.Namespace) -> str:
    from kvflow.cli.bench.transfer import TransferSettings, measure_transfers  # noqa: PLC0415 - as above

    settings = TransferSettings(
        backend=arguments.backend,
        shapes=_shapes(arguments.shapes),
        tokens=_tokens(arguments),
        rounds=_positive("--rounds", arguments.rounds),
        pool_bytes=_positive("--pool-megabytes", arguments.pool_megabytes) * 2**20,
    )
    return shown(arguments, lambda report: anyio.run(measure_transfers, settings, report))


def _handover(arguments: argparse.Namespace) -> str:
    from kvflow.cli.bench.handover import HandoverSettings, measure_handovers  # noqa: PLC0415 - as above

    shapes = _shapes(arguments.shape)
    if len(shapes) > 1:
        raise ConfigError("one shape at a time", option="--shape", value=arguments.shape)
    settings = HandoverSettings(
        backend=arguments.backend,
        shape=shapes[0],
        tokens=_tokens(arguments),
        in_flight=arguments.in_flight,
        rounds=_positive("--rounds", arguments.rounds),
        requests=_positive("--requests", arguments.requests),
        pool_bytes=_positive("--pool-megabytes", arguments.pool_megabytes) * 2**20,
    )
    return shown(arguments, lambda report: anyio.run(measure_handovers, settings, report))


def _shapes(text: str) -> tuple[str, ...]:
    from kvflow.cli.bench.pair.options import SHAPES  # noqa: PLC0415 - as above

    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise ConfigError("no such shape", unknown=unknown, shapes=list(SHAPES))
    return names


def _tokens(arguments: argparse.Namespace) -> tuple[int, ...]:
    tokens: tuple[int, ...] = arguments.tokens
    odd = [number for number in tokens if number % PAGE_SIZE]
    if odd:
        raise ConfigError("tokens must fill whole pages", tokens=odd, page_size=PAGE_SIZE)
    return tokens


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise ConfigError("option must be positive", option=option, value=value)
    return value
