"""List the open rooms of the ranks on this host, the oldest first."""

import argparse
from collections.abc import Callable

from kvflow.cli.asking import (
    add_rank_options,
    ask_ranks,
    find_ranks,
    print_problems,
    print_table,
    show_bytes,
    show_duration,
)
from kvflow.cli.options import check_positive

__all__ = ["add_arguments", "prepare"]

HEAD = ("RANK", "ROOM", "LABEL", "AGE", "OUTCOME", "MEMORY", "PAGES", "BYTES", "PEERS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_rank_options(parser)
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="rooms of each rank, at most 1,000")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each rank")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that prints rooms; its exit code is 1 if a rank does not answer."""
    return lambda: _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    from kvflow.admin.messages import RoomsAnswer, RoomsRequest  # noqa: PLC0415 - `kvflow --help` loads little

    check_positive(arguments, "limit")
    request = RoomsRequest(limit=arguments.limit)
    answers = ask_ranks(find_ranks(arguments), request, RoomsAnswer, arguments.timeout)
    rows: list[tuple[object, ...]] = []
    for one, line, answer in answers:
        if isinstance(answer, str):
            continue
        if arguments.json:
            print(line.decode())
        for row in answer.rooms:
            peers = ", ".join(row.peers[:2]) + (f" and {row.num_peers - 2} more" if row.num_peers > 2 else "")
            age, size = show_duration(row.age_s), show_bytes(row.num_bytes)
            rows.append((one.name, row.room, row.label, age, row.outcome, row.memory, row.num_pages, size, peers))
    if not arguments.json:
        print_table(HEAD, rows)
        for one, _, answer in answers:
            if not isinstance(answer, str) and answer.total > len(answer.rooms):
                print(f"{one.name} has {answer.total - len(answer.rooms)} more")
    problems = [(one.name, answer) for one, _, answer in answers if isinstance(answer, str)]
    print_problems(problems)
    return 1 if problems else 0
