"""Options that several commands share, and functions to check them."""

import argparse
import importlib.util
import json
from typing import Any

import kvflow
from kvflow.errors import ConfigError

__all__ = [
    "HelpFormatter",
    "add_action",
    "add_actions",
    "add_backend_option",
    "check_backend",
    "check_installed",
    "check_positive",
    "read_json",
]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", []):
            return action.help
        return super()._get_help_string(action)


def add_actions(parser: argparse.ArgumentParser, metavar: str = "ACTION") -> Any:
    """Let a parser have actions, for `add_action`; without one, the program prints the help of this parser."""
    parser.set_defaults(incomplete=parser)
    return parser.add_subparsers(dest="action", metavar=metavar)


def add_action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add an action, and return its parser."""
    description = f"{text[0].upper()}{text[1:].removesuffix('.')}."
    added: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=description, formatter_class=HelpFormatter
    )
    added.set_defaults(incomplete=None)
    return added


def add_backend_option(parser: argparse.ArgumentParser, default: str = "nixl") -> None:
    """Add `--backend`, which accepts every installed transport."""
    parser.add_argument("--backend", default=default, metavar="NAME", help="transport, including plugins")


def check_backend(name: str, *, between_processes: bool = False) -> str:
    """Return the name of a transport that exists, and reaches other processes if it must; ConfigError lists those."""
    known = [backend for backend in kvflow.known_backends() if backend != "memory" or not between_processes]
    if name not in known:
        raise kvflow.ConfigError("unknown backend, or not usable with this command", backend=name, known=known)
    return name


def read_json(text: str) -> dict[str, Any]:
    """Return the JSON object that an option has as its value."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def check_positive(arguments: argparse.Namespace, *options: str) -> None:
    """Raise ConfigError if an option is not above 0; the error names the first."""
    for name in options:
        value = getattr(arguments, name)
        if not 0 < value < float("inf"):
            raise kvflow.ConfigError("option must be positive", option=f"--{name.replace('_', '-')}", value=value)


def check_installed(*packages: str) -> None:
    """Raise ConfigError if packages, each with or without a version as pip takes it, are not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package.partition("==")[0]) is None]
    if missing:
        install = f"pip install {' '.join(missing)}"
        raise ConfigError("command requires packages that are not installed", missing=missing, install=install)
