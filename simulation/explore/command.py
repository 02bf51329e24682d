"""Explore every interleaving of messages, writes and faults between a few ranks, and check every guarantee."""

import argparse
from collections.abc import Callable

from kvflow.cli.options import check_positive
from kvflow.errors import ConfigError
from simulation.explore import FAULTS, Exploration, Setup, explore

__all__ = ["add_arguments", "prepare"]

EXIT_VIOLATION = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill ranks")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode ranks")
    parser.add_argument("--rooms", type=int, default=1, metavar="N", help="rooms, each sent and received by every rank")
    parser.add_argument("--writes", type=int, default=1, metavar="N", help="writes of each prefill rank for a room")
    parser.add_argument(
        "--posts-per-peer", type=int, default=Setup().posts_per_peer, metavar="N", help="writes to one rank at a time"
    )
    parser.add_argument("--slots", type=int, default=0, metavar="N", help="staging slots of each rank; 0 packs nothing")
    parser.add_argument("--max-faults", type=int, default=1, metavar="N", help="maximum number of faults in one run")
    parser.add_argument("--faults", default=",".join(FAULTS), metavar="NAME,...", help="kinds of faults")
    parser.add_argument("--handshake", action="store_true", help="start with the handshake instead of connected ranks")
    parser.add_argument("--seconds", type=float, metavar="S", help="time limit in seconds")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that explores and prints the result; its exit code is 1 for a violation.

    Raises:
        ConfigError: An option is invalid.
    """
    check_positive(arguments, "prefill", "decode", "rooms", "writes", "posts_per_peer")
    if arguments.seconds is not None:
        check_positive(arguments, "seconds")
    for option, value in (("--max-faults", arguments.max_faults), ("--slots", arguments.slots)):
        if value < 0:
            raise ConfigError("option must not be negative", option=option, value=value)
    kinds = arguments.faults.split(",")
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        raise ConfigError("unknown fault", unknown=unknown, known=list(FAULTS))
    setup = Setup(
        num_prefill=arguments.prefill,
        num_decode=arguments.decode,
        rooms=tuple(range(1, arguments.rooms + 1)),
        num_writes=arguments.writes,
        max_faults=arguments.max_faults,
        faults=tuple(kind for kind in FAULTS if kind in kinds),
        is_connected=not arguments.handshake,
        posts_per_peer=arguments.posts_per_peer,
        slots=arguments.slots,
    )
    return lambda: _explore(setup, arguments.seconds)


def _explore(setup: Setup, seconds: float | None) -> int:
    found = explore(setup, seconds=seconds)
    print("\n".join(_lines(found)))
    return EXIT_VIOLATION if found.violation is not None else 0


def _lines(found: Exploration) -> list[str]:
    counts = f"{found.num_states} states, {found.num_steps} steps, {found.num_ends} ends"
    if found.violation is not None:
        steps = [f"  {number:3} {label}" for number, label in enumerate(found.violation.steps, 1)]
        return [f"{counts}: stopped at a violation", found.violation.error, "after", *(steps or ["  nothing"])]
    return [f"{counts}: {'complete' if found.is_complete else 'not complete'}, no violation"]
