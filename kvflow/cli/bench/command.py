"""Measure kvflow on this machine."""

import argparse

import anyio
import msgspec

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the measurements and their options."""
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    idle = cases.add_parser("idle", help="CPU of connected ranks with nothing to do")
    idle.add_argument("--backend", default="nixl", metavar="NAME", help="transport (default: %(default)s)")
    idle.add_argument("--pairs", type=int, default=1, metavar="N", help="prefill and decode ranks (default: 1 each)")
    idle.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long (default: %(default)s)")
    idle.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    idle.set_defaults(measure=_idle)


def run(arguments: argparse.Namespace) -> int:
    """Run one measurement and print it."""
    text: str = arguments.measure(arguments)
    print(text)
    return 0


def _idle(arguments: argparse.Namespace) -> str:
    from kvflow.cli.bench.idle import measure_idle  # noqa: PLC0415 - `kvflow --help` works without torch

    result = anyio.run(measure_idle, arguments.backend, arguments.pairs, arguments.seconds)
    if arguments.json:
        return msgspec.json.encode(result).decode()
    return (
        f"{result.ranks} connected ranks over {result.backend}, nothing to do for {result.seconds:.1f} s: "
        f"{result.cpu_percent_per_rank:.2f} % of a core per rank"
    )
