"""Let ranks on this host refuse new rooms and finish those that are open."""

import argparse
import time
from collections.abc import Callable, Sequence

from kvflow.cli.asking import AskedRank, add_rank_options, ask_ranks, find_ranks, print_problems
from kvflow.errors import ConfigError

__all__ = ["add_arguments", "prepare"]

EXIT_NOT_DRAINED = 1
POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_rank_options(parser)
    parser.add_argument("--all", action="store_true", help="all ranks of this host; needed if none are selected")
    notice = "not be ready for this long before, so that routers notice; new rooms are accepted until then"
    parser.add_argument("--notice", type=float, default=0.0, metavar="SECONDS", help=notice)
    wait = "wait up to this long until everything has finished"
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help=wait)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that drains ranks; its exit code is 1 if one does not answer or, with --wait, finish in time.

    It raises ConfigError if nothing says which ranks.
    """
    return lambda: _drain(arguments)


def _drain(arguments: argparse.Namespace) -> int:
    from kvflow.admin.messages import DrainAnswer, DrainRequest  # noqa: PLC0415 - `kvflow --help` loads little

    chosen = (arguments.instance, arguments.rank, arguments.pid, arguments.socket)
    if not arguments.all and all(which is None for which in chosen):
        raise ConfigError("select ranks with --instance, --rank, --pid or --socket, or say --all")
    found = find_ranks(arguments)
    unannounced = _announce(found, arguments) if arguments.notice > 0 else []
    ends_at = time.monotonic() + arguments.wait
    while True:
        asked = ask_ranks(found, DrainRequest(), DrainAnswer, arguments.timeout)
        answers = [(one.name, answer) for one, _, answer in asked]
        is_over = all(isinstance(answer, str) or answer.is_drained for _, answer in answers)
        if is_over or time.monotonic() >= ends_at:
            break
        time.sleep(POLL_S)  # asking again changes nothing
    for name, answer in answers:
        if not isinstance(answer, str):
            left = "has finished" if answer.is_drained else f"is draining; open transfers: {answer.num_unsettled}"
            print(f"{name} {left}")
    problems = [*unannounced, *((name, answer) for name, answer in answers if isinstance(answer, str))]
    print_problems(problems)
    return EXIT_NOT_DRAINED if problems or (arguments.wait and not is_over) else 0


def _announce(found: Sequence[AskedRank], arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Announce the drain, and wait; return the ranks that have not announced it, as older ones cannot, and why."""
    from kvflow.admin.messages import AnnounceDrainRequest, DrainAnswer  # noqa: PLC0415 - as above

    answers = [
        (one.name, answer)
        for one, _, answer in ask_ranks(found, AnnounceDrainRequest(), DrainAnswer, arguments.timeout)
    ]
    refusals = [(name, f"the drain was not announced: {answer}") for name, answer in answers if isinstance(answer, str)]
    if len(refusals) < len(answers):
        time.sleep(arguments.notice)
    return refusals
