"""Show the ranks that run on this host, and how they are."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from kvflow.cli.asking import AskedRank, add_rank_options, find_ranks, print_problems, print_table, show_duration

__all__ = ["add_arguments", "prepare"]

WATCH_S = 1.0
CLEAR = "\033[H\033[2J"

HEAD = (
    *("RANK", "ROLE", "PID", "UP", "BACKEND", "TRANSFER"),
    *("ROOMS", "OLDEST", "QUEUED", "POSTED", "PEERS", "QUARANTINE", "MAX LAG"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_rank_options(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each rank")
    parser.add_argument("--watch", action="store_true", help="ask again every second, until interrupted")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that prints the status of ranks; its exit code is 1 if one does not answer."""
    return lambda: _watch(arguments) if arguments.watch else _show(arguments)


def _watch(arguments: argparse.Namespace) -> int:
    while True:
        if sys.stdout.isatty() and not arguments.json:
            print(CLEAR, end="")
        _show(arguments)
        sys.stdout.flush()
        time.sleep(WATCH_S)


def _show(arguments: argparse.Namespace) -> int:
    found = find_ranks(arguments)
    if arguments.json:
        for one in found:
            print(one.reply.line.decode() if one.reply.line else json.dumps(_silent(one)))
    else:
        print_table(HEAD, [_row(one) for one in found])
        for one in found:
            if not isinstance(one.status, str) and one.status.health.reason:
                print(f"{one.name} is {one.status.health.transfer}: {one.status.health.reason}")
            if not isinstance(one.status, str) and (num_grants := one.status.statistics.get("waiting_grants")):
                print(f"{one.name} has not opened rooms that decode has asked for: {num_grants}")
        print_problems([(one.name, one.status) for one in found if isinstance(one.status, str)])
    return 1 if any(isinstance(one.status, str) for one in found) else 0


def _show_peers(by_state: dict[str, int]) -> str:
    """Return how many peers there are in each state, or 0."""
    return ", ".join(f"{count} {state}" for state, count in by_state.items() if count) or "0"


def _silent(one: AskedRank) -> dict[str, str]:
    return {"socket": str(one.path), "error": str(one.status)}


def _row(one: AskedRank) -> tuple[Any, ...]:
    status = one.status
    if isinstance(status, str):
        return (one.name, None, one.reply.pid, *[None] * (len(HEAD) - 3))
    counts = status.statistics
    return (
        one.name,
        status.role,
        status.pid,
        show_duration(status.uptime_s),
        status.backend,
        status.health.transfer,
        counts.get("rooms"),
        show_duration(status.oldest_room_s),
        counts.get("queued_chunks"),
        counts.get("posted"),
        _show_peers(counts.get("peers_by_state", {})),
        counts.get("quarantined"),
        show_duration(counts.get("loop_lag", {}).get("maximum")),
    )
