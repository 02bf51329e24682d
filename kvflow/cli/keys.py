"""Create and show keys."""

import argparse
from collections.abc import Callable

from kvflow.cli.options import HelpFormatter, sentence

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be done."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "create a key pair, and print its public key"
    new = commands.add_parser("new", help=text, description=sentence(text), formatter_class=HelpFormatter)
    new.add_argument("directory", metavar="DIRECTORY", help="key directory; created if it does not exist")
    new.add_argument("--capability", action="store_true", help="also create a capability key")
    text = "print the public key, and the keys of those who are trusted"
    show = commands.add_parser("show", help=text, description=sentence(text), formatter_class=HelpFormatter)
    show.add_argument("directory", metavar="DIRECTORY", help="key directory")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Give what makes or shows keys."""
    return lambda: _new(arguments) if arguments.action == "new" else _show(arguments)


def _new(arguments: argparse.Namespace) -> int:
    from kvflow.keys import make_capability_key, make_keys  # noqa: PLC0415 - `kvflow --help` works without zmq

    print(make_keys(arguments.directory))
    if arguments.capability:
        make_capability_key(arguments.directory)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from kvflow.keys import load_trust  # noqa: PLC0415 - as above

    trust = load_trust(arguments.directory)
    print(f"{trust.public} (own)")
    for peer in trust.peers:
        print(f"{peer.key} {peer.instance}")
    for key in trust.registry:
        print(f"{key} (registry)")
    return 0
