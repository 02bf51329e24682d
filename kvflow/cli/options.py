"""Options that several commands share, and functions to parse and check them."""

import argparse
import importlib.util
from collections.abc import Collection

import kvflow
from kvflow.errors import ConfigError

__all__ = [
    "HelpFormatter",
    "add_backend_option",
    "cases_of",
    "check_backend",
    "check_installed",
    "check_positive",
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
    """Turn the short help of a command into the description at the start of its own help."""
    return f"{text[0].upper()}{text[1:]}."


def add_backend_option(parser: argparse.ArgumentParser, default: str = "nixl") -> None:
    """Add `--backend`, which accepts every installed transport."""
    parser.add_argument("--backend", default=default, metavar="NAME", help="transport, including plugins")


def check_backend(name: str, *, between_processes: bool = False) -> str:
    """Check that a transport exists, before anything is started with it.

    Args:
        name: Name from the user.
        between_processes: It must reach other processes, which excludes `memory`.

    Raises:
        ConfigError: It does not exist; the error lists the known ones.
    """
    known = [backend for backend in kvflow.known_backends() if backend != "memory" or not between_processes]
    if name not in known:
        raise kvflow.ConfigError("unknown backend, or not usable with this command", backend=name, known=known)
    return name


def check_positive(arguments: argparse.Namespace, *options: str) -> None:
    """Check that some options are above 0.

    Raises:
        ConfigError: One is not; the error names the first.
    """
    for name in options:
        value = getattr(arguments, name)
        if not 0 < value < float("inf"):
            raise kvflow.ConfigError("option must be positive", option=f"--{name.replace('_', '-')}", value=value)


def names(text: str) -> tuple[str, ...]:
    """Parse an option with several names."""
    return tuple(text.split(","))


def cases_of(chosen: tuple[str, ...], known: Collection[str], *, kind: str = "case") -> tuple[str, ...]:
    """Return the cases that were chosen by name, or all.

    Args:
        chosen: Names from the user.
        known: All names.
        kind: What they are called in the error.

    Raises:
        ConfigError: There is no such case.
    """
    unknown = [case for case in chosen if case not in known and case != "all"]
    if unknown:
        raise kvflow.ConfigError(f"unknown {kind}", unknown=unknown, known=list(known))
    return tuple(known) if "all" in chosen else chosen


def check_installed(*packages: str) -> None:
    """Check that packages are installed.

    Raises:
        ConfigError: Some are not; the error names them.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            "command requires packages that are not installed",
            missing=missing,
            install=f"pip install {' '.join(missing)}",
        )
