"""Make and show keys."""

import argparse
from collections.abc import Callable

from kvflow.cli.options import HelpFormatter

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be done."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = commands.add_parser("new", help="make a key pair, and print its public key", formatter_class=HelpFormatter)
    new.add_argument("directory", metavar="DIRECTORY", help="where to put it; made if it is not there")
    new.add_argument("--capability", action="store_true", help="make a key for capabilities as well")
    show = commands.add_parser("show", help="print the public key, and who is trusted", formatter_class=HelpFormatter)
    show.add_argument("directory", metavar="DIRECTORY", help="of the keys")


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
