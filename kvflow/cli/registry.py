"""Run a registry on its own, until it is interrupted."""

import argparse
import signal
import sys
from collections.abc import Callable

import anyio

from kvflow import Registry, configure_logging

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--bind", default="tcp://127.0.0.1:7100", metavar="ADDRESS", help="address to serve at")
    parser.add_argument(
        "--advertise",
        metavar="HOST",
        help="host to print, if not the one bound; a wildcard such as tcp://*:7100 needs it",
    )
    parser.add_argument("--log", default="console", choices=["console", "json"], help="format of the log")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Give what serves until SIGINT or SIGTERM, and prints the endpoint as its first line.

    It raises ConfigError if the address cannot be bound.
    """

    def serve() -> int:
        configure_logging(arguments.log)
        anyio.run(_serve, arguments.bind, arguments.advertise)
        return 0

    return serve


async def _serve(bind: str, advertise: str | None) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with Registry(bind, advertise) as registry:
            print(registry.endpoint, flush=True)
            async for received in signals:
                print(f"kvflow registry: stopped by {received.name}", file=sys.stderr)
                return
