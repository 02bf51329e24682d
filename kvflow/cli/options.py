"""Options that several commands have, and how they are read."""

import argparse
from collections.abc import Collection

import kvflow

__all__ = [
    "HelpFormatter",
    "add_backend_option",
    "cases_of",
    "check_backend",
    "check_positive",
    "counts",
    "names",
    "sentence",
]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", []):
            return action.help
        return super()._get_help_string(action)


def sentence(text: str) -> str:
    """Turn the short help of a command into the description that its own help begins with."""
    return f"{text[0].upper()}{text[1:]}."


def add_backend_option(parser: argparse.ArgumentParser, default: str = "nixl") -> None:
    """Declare `--backend`, which takes whatever is installed."""
    parser.add_argument("--backend", default=default, metavar="NAME", help="transport, including plugins")


def check_backend(name: str, *, between_processes: bool = False) -> str:
    """Make sure that there is such a transport, before anything is started with it.

    Args:
        name: As the user gave it.
        between_processes: It has to reach other processes, so `memory` will not do.

    Raises:
        ConfigError: Naming those that there are.
    """
    known = [backend for backend in kvflow.known_backends() if backend != "memory" or not between_processes]
    if name not in known:
        raise kvflow.ConfigError("unknown backend, or not usable with this command", backend=name, known=known)
    return name


def check_positive(arguments: argparse.Namespace, *options: str) -> None:
    """Make sure that some options are above 0.

    Raises:
        ConfigError: Naming the first that is not.
    """
    for name in options:
        value = getattr(arguments, name)
        if not 0 < value < float("inf"):
            raise kvflow.ConfigError("option must be positive", option=f"--{name.replace('_', '-')}", value=value)


def counts(text: str) -> tuple[int, ...]:
    """Read an option with several positive numbers.

    Raises:
        ArgumentTypeError: It is something else.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected positive numbers separated by commas, not {text!r}")
    return tuple(map(int, parts))


def names(text: str) -> tuple[str, ...]:
    """Read an option with several names."""
    return tuple(text.split(","))


def cases_of(chosen: tuple[str, ...], known: Collection[str], *, kind: str = "case") -> tuple[str, ...]:
    """Return the cases that were chosen by name, or all.

    Args:
        chosen: As the user gave them.
        known: All of them.
        kind: What they are called, for the error.

    Raises:
        ConfigError: There is no such case.
    """
    unknown = [case for case in chosen if case not in known and case != "all"]
    if unknown:
        raise kvflow.ConfigError(f"unknown {kind}", unknown=unknown, known=list(known))
    return tuple(known) if "all" in chosen else chosen
