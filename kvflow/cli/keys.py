"""Make, list and show keys."""

import argparse
from collections.abc import Callable

from kvflow.cli.options import HelpFormatter

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be done."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = commands.add_parser("new", help="make a key pair, and print its public key", formatter_class=HelpFormatter)
    new.add_argument("directory", metavar="DIRECTORY", help="where to put it; made if it is not there")
    new.add_argument(
        "--capability",
        action="store_true",
        help="make only a key for capabilities, which routers and prefill ranks share",
    )
    trust = commands.add_parser("trust", help="list the public key of somebody else", formatter_class=HelpFormatter)
    trust.add_argument("directory", metavar="DIRECTORY", help="of the keys of the process that is to trust it")
    trust.add_argument("key", metavar="PUBLIC-KEY", help="as `kvflow keys new` has printed it")
    whose = trust.add_mutually_exclusive_group(required=True)
    whose.add_argument("instance", metavar="INSTANCE", nargs="?", help="whose it is; `NAME*` is all that begin so")
    whose.add_argument("--registry", action="store_true", help="it is the registry's")
    show = commands.add_parser("show", help="print the public key, and who is trusted", formatter_class=HelpFormatter)
    show.add_argument("directory", metavar="DIRECTORY", help="of the keys")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Give what makes, lists or shows keys."""
    actions = {"new": _new, "trust": _trust, "show": _show}
    return lambda: actions[arguments.action](arguments)


def _new(arguments: argparse.Namespace) -> int:
    from kvflow.keys import make_capability_key, make_keys  # noqa: PLC0415 - `kvflow --help` works without zmq

    if arguments.capability:
        make_capability_key(arguments.directory)
    else:
        print(make_keys(arguments.directory))
    return 0


def _trust(arguments: argparse.Namespace) -> int:
    from kvflow.keys import add_peer, add_registry  # noqa: PLC0415 - as above

    if arguments.registry:
        add_registry(arguments.directory, arguments.key)
    else:
        add_peer(arguments.directory, arguments.key, arguments.instance)
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
