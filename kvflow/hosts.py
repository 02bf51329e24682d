"""The host address at which others reach this process, and which addresses belong to this host."""

import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

__all__ = ["default_host", "host_of", "host_towards", "is_own_address"]

ELSEWHERE: Final = ("tcp://192.0.2.1:1", "tcp://[2001:db8::1]:1")
"""Addresses reserved for documentation: no network has them, so the route to them is the default route."""


def host_of(endpoint: str) -> str:
    """Return the host of "tcp://host:port", without the brackets of an IPv6 address."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


async def host_towards(endpoint: str) -> str | None:
    """Return this host's address on the route to "tcp://host:port", without brackets. Sends nothing.

    None if the host cannot be resolved or there is no route.
    """
    try:
        found = await anyio.getaddrinfo(host_of(endpoint), 1, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, RuntimeError):  # RuntimeError: no thread could be started to resolve the name
        return None


def is_own_address(address: bytes) -> bool:
    """Return whether an address of 4 or 16 bytes belongs to this host, in its network namespace. True if unknown."""
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.inet_ntop(family, address), 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


async def default_host(towards: Callable[[str], Awaitable[str | None]]) -> str | None:
    """Return this host's address on the default route, by `host_towards` or a replacement; None if there is none."""
    for endpoint in ELSEWHERE:
        if (host := await towards(endpoint)) is not None:
            return host
    return None
