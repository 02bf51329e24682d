"""List transfers in quarantine on this host, or release their pages."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvflow.cli.asking import (
    AskedRank,
    add_rank_options,
    ask_ranks,
    find_ranks,
    print_problems,
    print_table,
    show_bytes,
    show_duration,
)
from kvflow.cli.options import add_action, add_actions
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.admin.messages import QuarantineAnswer

__all__ = ["add_arguments", "prepare"]

EXIT_REFUSED = 1
HEAD = ("RANK", "ID", "ROOM", "LABEL", "FOR", "PAGES", "BYTES", "FAILURE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = add_actions(parser)
    listed = _add_action(actions, "list", "list transfers in quarantine, with the proofs that are missing")
    listed.add_argument("--json", action="store_true", help="print one line of JSON for each rank")
    release = _add_action(actions, "release", "release the pages of a transfer without proof")
    release.add_argument("id", metavar="ID", help="as listed")
    because = "how you know that nothing can write to the pages, or read them, any more; it is logged"
    release.add_argument("--because", required=True, metavar="TEXT", help=because)


def _add_action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    added = add_action(actions, name, text)
    add_rank_options(added)
    return added


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the action; its exit code is 1 if a rank refuses, or does not answer."""
    return lambda: _list(arguments) if arguments.action == "list" else _release(arguments)


def _list(arguments: argparse.Namespace) -> int:
    rows: list[tuple[object, ...]] = []
    missing: list[str] = []
    problems: list[tuple[str, str]] = []
    for one, line, answer in _ask_for_quarantine(find_ranks(arguments), arguments.timeout):
        if isinstance(answer, str):
            problems.append((one.name, answer))
            continue
        if arguments.json:
            print(line.decode())
        for row in answer.quarantine:
            pages = ", ".join(f"{count} of {name}" for name, count in row.pages.items())
            since, size = show_duration(row.since_s), show_bytes(row.num_bytes)
            rows.append((one.name, row.id, row.room, row.label, since, pages, size, row.failure))
            missing += [f"{one.name} {row.id}: {proof.detail}" for proof in row.missing]
            if row.num_missing > len(row.missing):
                missing.append(f"{one.name} {row.id}: and {row.num_missing - len(row.missing)} more")
        if answer.total > len(answer.quarantine):
            missing.append(f"{one.name} has {answer.total - len(answer.quarantine)} more")
    if not arguments.json:
        print_table(HEAD, rows)
        print("\n".join(missing), end="\n" if missing else "")
    print_problems(problems)
    return EXIT_REFUSED if problems else 0


def _ask_for_quarantine(
    found: list[AskedRank], timeout_s: float
) -> "list[tuple[AskedRank, bytes, QuarantineAnswer | str]]":
    from kvflow.admin.messages import MAX_ROWS, QuarantineAnswer, QuarantineRequest  # noqa: PLC0415 - `--help` loads little

    return ask_ranks(found, QuarantineRequest(limit=MAX_ROWS), QuarantineAnswer, timeout_s)


def _release(arguments: argparse.Namespace) -> int:
    from kvflow.admin.messages import ReleaseAnswer, ReleaseRequest  # noqa: PLC0415 - `kvflow --help` loads little

    found = find_ranks(arguments)
    if len(found) > 1:
        answers = _ask_for_quarantine(found, arguments.timeout)
        ids = [
            (one, {row.id for row in answer.quarantine}) for one, _, answer in answers if not isinstance(answer, str)
        ]
        found = [one for one, known in ids if arguments.id in known]
    if len(found) != 1:
        detail = "several ranks have it: choose with --instance, --rank or --pid" if found else "no rank has it"
        raise ConfigError("transfer in quarantine cannot be chosen", id=arguments.id, detail=detail)
    request = ReleaseRequest(id=arguments.id, because=arguments.because)
    ((one, _, answer),) = ask_ranks(found, request, ReleaseAnswer, arguments.timeout)
    if isinstance(answer, str):
        print_problems([(one.name, answer)])
        return EXIT_REFUSED
    print(f"{one.name} has released the pages of room {answer.room}")
    return 0
