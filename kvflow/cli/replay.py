"""Replay the recording of a rank on a fresh core, and report the first difference."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from kvflow.errors import ConfigError
from kvflow.state.replay import Replay, ReplayDifference, read_recording, replay

__all__ = ["add_arguments", "prepare"]

EXIT_DIFFERENCE = 1
MAX_CHARACTERS = 400
"""Maximum length of a displayed event or effect; page tables can be long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="recording of a rank whose settings had `record`")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that replays a file and prints the result; its exit code is 1 for a difference.

    It raises ConfigError if the file cannot be read, or is not a recording.
    """
    return lambda: _replay(arguments.file)


def _replay(path: Path) -> int:
    try:
        with path.open("rb") as file:
            result = replay(read_recording(file))
    except OSError as error:
        raise ConfigError("recording cannot be read", path=str(path), detail=error.strerror) from error
    print(_head(result))
    if result.difference is None:
        print("no difference")
        return 0
    print("\n".join(_told(result.difference)))
    return EXIT_DIFFERENCE


def _head(result: Replay) -> str:
    rank, incarnation = result.me.rank, result.me.incarnation
    return (
        f"{result.role} rank {rank}, incarnation {incarnation:016x}: "
        f"{result.num_events} events, {result.num_effects} effects"
    )


def _told(difference: ReplayDifference) -> list[str]:
    """Return lines about the first event whose effects differ."""
    replayed = [effect if isinstance(effect, str) else _short(effect) for effect in difference.replayed]
    return [
        f"difference at event {difference.number}, at {difference.now:.6f} s: {_short(difference.event)}",
        *_listed("recorded", [item if isinstance(item, str) else _short(item) for item in difference.recorded]),
        *_listed("replayed", replayed),
    ]


def _listed(title: str, items: Sequence[str]) -> list[str]:
    return [f"  {title}:", *(f"    {item}" for item in items or ["nothing"])]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)"
