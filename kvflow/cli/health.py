"""Tell whether the ranks on this host can transfer, for probes."""

import argparse
from collections.abc import Callable

from kvflow.cli.asking import AskedRank, add_rank_options, find_ranks

__all__ = ["add_arguments", "prepare"]

EXIT_UNHEALTHY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_rank_options(parser)
    kind = parser.add_mutually_exclusive_group()
    live = "fail only if a rank is broken or does not answer, so that its process must be restarted"
    kind.add_argument("--live", action="store_true", help=live)
    ready = "fail only if a rank refuses new rooms, is broken or does not answer"
    kind.add_argument("--ready", action="store_true", help=ready)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that prints the health of ranks.

    Its exit code is 0 if all are well: not degraded, live with --live, ready with --ready; and else 1.
    """
    return lambda: _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    is_well = True
    for one in find_ranks(arguments):
        text, passes = _judge(one, arguments)
        print(f"{one.name} {text}")
        is_well = is_well and passes
    return 0 if is_well else EXIT_UNHEALTHY


def _judge(one: AskedRank, arguments: argparse.Namespace) -> tuple[str, bool]:
    if isinstance(one.status, str):
        return f"does not answer: {one.status}", False
    health = one.status.health
    text = f"transfer: {health.transfer}" + (f" ({health.reason})" if health.reason else "")
    if arguments.live:
        return text, health.live
    return text, health.ready if arguments.ready else health.transfer == "ok"
