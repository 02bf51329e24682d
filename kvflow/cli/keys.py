"""Create, trust and show keys."""

import argparse
from collections.abc import Callable

from kvflow.cli.options import HelpFormatter, sentence

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "create a key pair, and print its public key"
    new = commands.add_parser("new", help=text, description=sentence(text), formatter_class=HelpFormatter)
    new.add_argument("directory", metavar="DIRECTORY", help="key directory; created if it does not exist")
    kind = new.add_mutually_exclusive_group()
    kind.add_argument(
        "--capability",
        action="store_true",
        help="create only a capability key, which routers and prefill ranks share",
    )
    kind.add_argument(
        "--ticket",
        action="store_true",
        help="create only a ticket key, which prefill and decode ranks share",
    )
    text = "add another process's public key to the list"
    trust = commands.add_parser("trust", help=text, description=sentence(text), formatter_class=HelpFormatter)
    trust.add_argument("directory", metavar="DIRECTORY", help="key directory of the process that is to trust it")
    trust.add_argument("key", metavar="PUBLIC-KEY", help="as printed by `kvflow keys new`")
    whose = trust.add_mutually_exclusive_group(required=True)
    whose.add_argument(
        "instance",
        metavar="INSTANCE",
        nargs="?",
        help="the instance it belongs to; `NAME*` matches every name that begins with NAME",
    )
    whose.add_argument("--registry", action="store_true", help="the key belongs to the registry")
    text = "print the public key, and the trusted keys"
    show = commands.add_parser("show", help=text, description=sentence(text), formatter_class=HelpFormatter)
    show.add_argument("directory", metavar="DIRECTORY", help="key directory")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the action."""
    actions = {"new": _new, "trust": _trust, "show": _show}
    return lambda: actions[arguments.action](arguments)


def _new(arguments: argparse.Namespace) -> int:
    from kvflow.keys import (  # noqa: PLC0415 - `kvflow --help` works without zmq
        make_capability_key,
        make_keys,
        make_ticket_key,
    )

    if arguments.capability:
        make_capability_key(arguments.directory)
    elif arguments.ticket:
        make_ticket_key(arguments.directory)
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
