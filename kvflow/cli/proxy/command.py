"""Run a router that asks prefill and decode servers at the same time, until interrupted."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence

import anyio

from kvflow.cli.options import check_installed
from kvflow.errors import ConfigError
from kvflow.resources import report_accept_shortages

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for side in ("prefill", "decode"):
        text = f"a {side} server, such as http://10.0.0.1:8000; can be repeated"
        parser.add_argument(f"--{side}", action="append", default=[], metavar="URL", help=text)
    parser.add_argument("--host", default="127.0.0.1", help="host to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks a free one")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that serves until SIGINT or SIGTERM, and prints its URL as the first line of standard output.

    Raises:
        ConfigError: An option is invalid, or a package is missing.
    """
    check_installed("aiohttp")
    prefill = [_checked("--prefill", url) for url in arguments.prefill]
    decode = [_checked("--decode", url) for url in arguments.decode]
    if not prefill or not decode:
        raise ConfigError("proxy needs at least one prefill and one decode server", prefill=prefill, decode=decode)

    def serve() -> int:
        anyio.run(_serve, prefill, decode, arguments)
        return 0

    return serve


def _checked(option: str, url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "option must be the URL of a server", option=option, value=url, example="http://127.0.0.1:8000"
        )
    return url.rstrip("/")


async def _serve(prefill: Sequence[str], decode: Sequence[str], arguments: argparse.Namespace) -> None:
    from kvflow.cli.proxy.application import serve_proxy  # noqa: PLC0415 - the library may be missing

    report_accept_shortages(asyncio.get_running_loop(), lambda text: print(f"kvflow proxy: {text}", file=sys.stderr))
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with serve_proxy(prefill, decode, arguments.host, arguments.port) as url:
            print(url, flush=True)
            async for received in signals:
                print(f"kvflow proxy: stopped by {received.name}", file=sys.stderr)
                return
