"""`kvflow bench scale`: its options, and what it prints."""

import argparse

import anyio

from kvflow.cli.bench.comparisons import add_output_arguments, cases_of, counts, shown
from kvflow.errors import ConfigError

__all__ = ["add_arguments"]


def add_arguments(cases: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the measurement and its options."""
    scale = cases.add_parser("scale", help="cost and memory of a transfer among many, and with many peers")
    scale.add_argument("--cases", default="all", metavar="NAME,...", help="some of them (default: %(default)s)")
    scale.add_argument(
        "--in-flight", type=counts, default=(10, 100, 1_000, 10_000), metavar="N,...", help="default: 10 to 10000"
    )
    scale.add_argument("--peers", type=counts, default=(1, 4, 16, 64), metavar="N,...", help="default: 1 to 64")
    scale.add_argument("--waiting", type=int, default=5_000, metavar="N", help="for memory (default: %(default)s)")
    scale.add_argument("--rounds", type=int, default=3, metavar="N", help="of each case (default: %(default)s)")
    scale.add_argument("--transfers", type=int, default=1_000, metavar="N", help="of a round (default: %(default)s)")
    scale.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="for what waiting costs (default: %(default)s)"
    )
    add_output_arguments(scale)
    scale.set_defaults(measure=_scale)


def _scale(arguments: argparse.Namespace) -> str:
    from kvflow.cli.bench.scale.cost import CostSettings  # noqa: PLC0415 - `kvflow --help` works without numpy
    from kvflow.cli.bench.scale.measure import CASES, measure_scale  # noqa: PLC0415 - as above

    options = (arguments.waiting, arguments.rounds, arguments.transfers, arguments.seconds)
    if min(options) <= 0:
        raise ConfigError("options must be positive", options=options)
    settings = CostSettings(
        in_flight=arguments.in_flight,
        peers=arguments.peers,
        rounds=arguments.rounds,
        transfers=arguments.transfers,
        standing_s=arguments.seconds,
    )
    cases = cases_of(arguments.cases, CASES)
    return shown(arguments, lambda report: anyio.run(measure_scale, settings, arguments.waiting, cases, report))
