"""Run a registry until interrupted, or list the ranks of one."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvflow import ConfigError, Endpoint, Registry, Trust, configure_logging, load_trust
from kvflow.cli.asking import print_table
from kvflow.cli.options import check_positive
from kvflow.cli.tasks import serving

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    listed = "print the ranks that are registered with --registry, instead of running one"
    parser.add_argument("action", nargs="?", choices=["list"], help=listed)
    parser.add_argument("--registry", metavar="ADDRESS", help="with list: the registry to ask")
    parser.add_argument("--json", action="store_true", help="with list: print one line of JSON for each rank")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="with list: time to wait")
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
    if arguments.action == "list":
        return lambda: _list(arguments)
    return serving("kvflow registry", _opened(arguments))


def _list(arguments: argparse.Namespace) -> int:
    from kvflow.doctor.peer import MAX_LISTED, list_ranks  # noqa: PLC0415 - `kvflow --help` loads little

    check_positive(arguments, "timeout")
    if arguments.registry is None:
        raise ConfigError("list needs the address of a registry: --registry tcp://HOST:PORT")
    Endpoint.parse(arguments.registry)
    trust = load_trust(arguments.keys) if arguments.keys else Trust.none()
    records = asyncio.run(list_ranks(arguments.registry, trust, arguments.timeout))
    rows = [
        {
            "rank": str(record.peer.rank),
            "incarnation": f"{record.peer.incarnation:016x}",
            "num_ranks": record.num_ranks,
            "endpoint": record.endpoint,
            "backend": record.backend,
        }
        for record in sorted(records, key=lambda record: record.peer.rank)
    ]
    if arguments.json:
        print("\n".join(map(json.dumps, rows)), end="\n" if rows else "")
    else:
        print_table(("RANK", "INCARNATION", "RANKS", "ADDRESS", "BACKEND"), [tuple(row.values()) for row in rows])
    if len(records) == MAX_LISTED:
        print(f"a registry tells {MAX_LISTED} ranks at most", file=sys.stderr)
    return 0


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
