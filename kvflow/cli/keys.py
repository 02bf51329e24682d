"""Create, trust and show keys."""

import argparse
from collections.abc import Callable

from kvflow.cli.options import add_action, add_actions
from kvflow.trust import Trust

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = add_actions(parser)
    new = add_action(actions, "new", "create a key pair, and print its public key")
    new.add_argument("directory", metavar="DIRECTORY", help="key directory; created if it does not exist")
    kind = new.add_mutually_exclusive_group()
    capability = "create only a capability key, which routers and prefill ranks share"
    kind.add_argument("--capability", action="store_true", help=capability)
    ticket = "create only a ticket key, which prefill and decode ranks share"
    kind.add_argument("--ticket", action="store_true", help=ticket)
    trust = add_action(actions, "trust", "add another process's public key to the list")
    trust.add_argument("directory", metavar="DIRECTORY", help="key directory of the process that is to trust it")
    trust.add_argument("key", metavar="PUBLIC-KEY", help="as printed by `kvflow keys new`")
    whose = trust.add_mutually_exclusive_group(required=True)
    instance = "the instance it belongs to; `NAME*` matches every name that begins with NAME"
    whose.add_argument("instance", metavar="INSTANCE", nargs="?", help=instance)
    whose.add_argument("--registry", action="store_true", help="the key belongs to the registry")
    show = add_action(actions, "show", "print the public key, and the trusted keys")
    show.add_argument("directory", metavar="DIRECTORY", help="key directory")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the action."""
    from kvflow import keys  # noqa: PLC0415 - `kvflow --help` works without zmq

    directory = arguments.directory

    def run() -> int:
        if arguments.action == "show":
            print("\n".join(_shown(keys.load_trust(directory))))
        elif arguments.action == "trust" and arguments.registry:
            keys.add_registry(directory, arguments.key)
        elif arguments.action == "trust":
            keys.add_peer(directory, arguments.key, arguments.instance)
        elif arguments.capability:
            keys.make_capability_key(directory)
        elif arguments.ticket:
            keys.make_ticket_key(directory)
        else:
            print(keys.make_keys(directory))
        return 0

    return run


def _shown(trust: Trust) -> list[str]:
    peers = [f"{peer.key} {peer.instance}" for peer in trust.peers]
    return [f"{trust.public} (own)", *peers, *(f"{key} (registry)" for key in trust.registry)]
