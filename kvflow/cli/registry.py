"""Run a registry until interrupted."""

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvflow import ConfigError, Registry, Trust, configure_logging, load_trust
from kvflow.cli.tasks import serving

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--bind", default="tcp://127.0.0.1:7100", metavar="ADDRESS", help="address to listen on")
    parser.add_argument(
        "--advertise",
        metavar="HOST",
        help="host that other machines use, if different from --bind; required for a wildcard such as tcp://*:7100",
    )
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument("--keys", metavar="DIRECTORY", help="key directory, see `kvflow keys`; reloaded on SIGHUP")
    trust.add_argument("--plain", action="store_true", help="accept connections from other hosts without keys")
    parser.add_argument("--log", default="console", choices=["console", "json"], help="format of the log")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that serves until SIGINT or SIGTERM, and first prints the endpoint to standard output.

    It raises ConfigError if the address cannot be bound, or the keys cannot be read.
    """
    return serving("kvflow registry", _opened(arguments))


@asynccontextmanager
async def _opened(arguments: argparse.Namespace) -> AsyncIterator[str]:
    configure_logging(arguments.log)
    trust = Trust.none() if arguments.plain else load_trust(arguments.keys) if arguments.keys else None
    async with Registry(arguments.bind, arguments.advertise, trust=trust) as registry:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, registry)
        yield registry.endpoint


def _reload(registry: Registry) -> None:
    try:
        registry.reload_trust()
    except ConfigError as error:  # the registry continues with its present keys
        print(f"kvflow registry: {error}", file=sys.stderr)
