"""`kvflow bench hetero`: its options, and what it prints."""

import argparse

import anyio

from kvflow.cli.bench.comparisons import add_common_arguments, cases_of, shown
from kvflow.cli.transport import add_backend_option, check_backend
from kvflow.errors import ConfigError

__all__ = ["add_arguments"]

PAGE_SIZE = 64
"""The largest page of all cases."""


def add_arguments(cases: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the measurement and its options."""
    hetero = cases.add_parser(
        "hetero", help="sides that keep the cache differently: direct, packed, and what is chosen"
    )
    hetero.add_argument("--cases", default="all", metavar="NAME,...", help="some of them (default: %(default)s)")
    hetero.add_argument("--tokens", type=int, default=512, metavar="N", help="of a request (default: %(default)s)")
    hetero.add_argument("--layers", type=int, default=32, metavar="N", help="of the model (default: %(default)s)")
    add_backend_option(hetero)
    add_common_arguments(hetero)
    hetero.set_defaults(measure=_hetero)


def _hetero(arguments: argparse.Namespace) -> str:
    from kvflow.cli.bench.hetero.measure import measure_hetero  # noqa: PLC0415 - `kvflow --help` works without numpy
    from kvflow.cli.bench.hetero.options import CASES, HeteroOptions, HeteroShape  # noqa: PLC0415 - as above

    cases = cases_of(arguments.cases, CASES)
    if min(arguments.tokens, arguments.layers, arguments.rounds) < 1 or arguments.tokens % PAGE_SIZE:
        raise ConfigError("options must be positive, and tokens fill whole pages", page_size=PAGE_SIZE)
    backend = check_backend(arguments.backend, between_processes=True)
    options = HeteroOptions(backend=backend, tokens=arguments.tokens, shape=HeteroShape(layers=arguments.layers))
    return shown(arguments, lambda report: anyio.run(measure_hetero, options, cases, arguments.rounds, report))
