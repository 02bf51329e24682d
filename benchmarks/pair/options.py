"""Options that the measurements with a pair of processes share."""

import argparse
from typing import Final

from benchmarks.options import counts
from benchmarks.pair.loads import SHAPES
from benchmarks.pool_memory import MEMORIES
from kvflow.cli.options import check_positive
from kvflow.errors import ConfigError

__all__ = ["add_pair_options", "check_pair_options"]

PAGE_SIZE: Final = 16


def add_pair_options(parser: argparse.ArgumentParser, *, tokens: str, rounds: int = 11) -> None:
    """Declare the options, with defaults for the tokens of requests and for the number of rounds."""
    parser.add_argument("--backend", default="nixl", choices=["nixl", "mooncake"], help="transport between processes")
    parser.add_argument("--memory", default="host", choices=list(MEMORIES), help="where the pools are")
    parser.add_argument("--tokens", type=counts, default=tokens, metavar="N,...", help="tokens of each request")
    ways = "rounds with kvflow and with the bare transport"
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help=ways)
    size = "minimum pool size on each side, in MB"
    parser.add_argument("--pool-megabytes", type=int, default=256, metavar="N", help=size)


def check_pair_options(arguments: argparse.Namespace, *shapes: str) -> None:
    """Check the shared options, and the names of shapes.

    Raises:
        ConfigError: An option is invalid.
    """
    unknown = [name for name in shapes if name not in SHAPES]
    if unknown:
        raise ConfigError("unknown shape", unknown=unknown, shapes=list(SHAPES))
    odd = [number for number in arguments.tokens if number % PAGE_SIZE]
    if odd:
        raise ConfigError("tokens must be a multiple of the page size", tokens=odd, page_size=PAGE_SIZE)
    check_positive(arguments, "rounds", "pool_megabytes")
