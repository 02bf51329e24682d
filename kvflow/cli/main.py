"""The `kvflow` command."""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

__all__ = ["main", "run_program", "run_quietly"]

EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""As a shell tells of SIGPIPE, which ends most programs whose output nobody reads any more."""

COMMANDS = {
    "demo": "kvflow.cli.demo.command",
    "registry": "kvflow.cli.registry",
    "keys": "kvflow.cli.keys",
    "serve": "kvflow.cli.serve.command",
    "proxy": "kvflow.cli.proxy.command",
    "status": "kvflow.cli.status",
    "rooms": "kvflow.cli.rooms",
    "quarantine": "kvflow.cli.quarantine",
    "drain": "kvflow.cli.drain",
    "health": "kvflow.cli.health",
    "doctor": "kvflow.cli.doctor",
    "incident": "kvflow.cli.incident.command",
    "report": "kvflow.cli.report",
}
"""Modules, each with `add_arguments(parser)` and `prepare(arguments)`; the latter returns the function to run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: that of the command, 2 if it could not do its work, 130 if it was interrupted, or 141 if nobody
        reads its output any more.
    """
    return run_program("kvflow", "Moves KV caches from prefill to decode servers.", COMMANDS, argv)


def run_program(program: str, description: str, commands: Mapping[str, str], argv: Sequence[str] | None = None) -> int:
    """Run one of the commands of a program, and return the exit code, as `main`.

    Args:
        program: Name of the program, as a person types it.
        description: Begins its help.
        commands: Modules by name of the command, as in `COMMANDS`.
        argv: Arguments of the program; those of this process by default.
    """
    words = sys.argv[1:] if argv is None else argv
    name = " ".join([program, *words[:1]])
    return run_quietly(name, lambda: _prepare(program, description, commands, words))


def _prepare(program: str, description: str, places: Mapping[str, str], words: Sequence[str]) -> Callable[[], int]:
    import argparse  # noqa: PLC0415 - from here on, an interrupt prints no traceback
    from importlib import import_module  # noqa: PLC0415

    from kvflow import __version__  # noqa: PLC0415
    from kvflow.cli.options import add_action, add_actions  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"kvflow {__version__}")
    commands = add_actions(parser, "COMMAND")
    # The modules of some commands load libraries, which would take a probe longer than its work.
    chosen = [name for name in words[:1] if name in places] or places
    for name in chosen:
        module = import_module(places[name])
        about = module.__doc__ or ""
        command = add_action(commands, name, about)
        module.add_arguments(command)
        command.set_defaults(prepare=module.prepare)
    arguments = parser.parse_args(words)
    if arguments.incomplete is not None:
        arguments.incomplete.print_help(sys.stderr)
        return lambda: EXIT_UNUSABLE
    work: Callable[[], int] = arguments.prepare(arguments)
    return work


def run_quietly(name: str, prepare: Callable[[], Callable[[], int]]) -> int:
    """Load and run a command, and return the exit code; tell of an interrupt or a kvflow error in one line on stderr.

    Args:
        name: Prefix of that line.
        prepare: Imports what is needed, and returns the function to run. An interrupt meanwhile requires no cleanup.
    """
    try:
        try:
            return _run(name, prepare)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_output_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more as it ends
        return EXIT_UNREAD


def _is_output_unread() -> bool:
    """Return whether standard output is a pipe without a reader, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


def _run(name: str, prepare: Callable[[], Callable[[], int]]) -> int:
    from kvflow.errors import KvflowError  # noqa: PLC0415 - as above

    try:
        with _ended_by_interrupt(name):
            work = prepare()
        return work()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the interpreter's own cleanup
        print(_interrupted(name), file=sys.stderr)
        return EXIT_INTERRUPTED
    except KvflowError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_UNUSABLE


@contextmanager
def _ended_by_interrupt(name: str) -> Iterator[None]:
    """End the process at once when it is interrupted: an exception would pass through imports, which may swallow it."""

    def end(_number: int, _frame: FrameType | None) -> None:
        os.write(2, f"{_interrupted(name)}\n".encode())
        os._exit(EXIT_INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(name: str) -> str:
    return f"{name}: interrupted"
