"""Run a router that asks prefill and decode servers at the same time, until interrupted."""

import argparse
from collections.abc import Callable

from kvflow.cli.options import check_installed
from kvflow.cli.tasks import serving
from kvflow.errors import ConfigError

__all__ = ["add_arguments", "prepare"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for side in ("prefill", "decode"):
        text = f"a {side} server, such as http://10.0.0.1:8000; can be repeated"
        parser.add_argument(
            f"--{side}", action="append", default=[], type=lambda url: url.rstrip("/"), metavar="URL", help=text
        )
    parser.add_argument("--host", default="127.0.0.1", help="host to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks a free one")
    text = "port on loopback at which decode servers are drained; streams can move to other servers then"
    parser.add_argument("--control-port", type=int, default=None, help=text)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that serves until SIGINT or SIGTERM, and prints its URL as the first line of standard output.

    Raises:
        ConfigError: An option is invalid, or a package is missing.
    """
    check_installed("aiohttp")
    for side in ("prefill", "decode"):
        urls = getattr(arguments, side)
        if not urls:
            raise ConfigError(f"--{side} is missing: name at least one {side} server, such as --{side} http://a:1")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError("option must be a server's URL, such as http://a:1", option=f"--{side}", value=url)
    from kvflow.cli.proxy.application import serve_proxy  # noqa: PLC0415 - the library may be missing

    opened = serve_proxy(arguments.prefill, arguments.decode, arguments.host, arguments.port, arguments.control_port)
    return serving("kvflow proxy", opened)
