"""Under which host others reach this process, and which addresses are its own."""

import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

__all__ = ["default_host", "host_of", "host_towards", "is_own_address"]

ELSEWHERE: Final = ("tcp://192.0.2.1:1", "tcp://[2001:db8::1]:1")
"""Addresses that are kept for documentation: they are on no network but behind the default route."""


def host_of(endpoint: str) -> str:
    """Return the host of "tcp://host:port", without the brackets of an IPv6 address."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


async def host_towards(endpoint: str) -> str | None:
    """Return the address of this host on the network that leads to an endpoint. Sends nothing.

    Args:
        endpoint: "tcp://host:port".

    Returns:
        An IPv4 or IPv6 address without brackets; None if the host cannot be resolved, or no network leads there.
    """
    try:
        found = await anyio.getaddrinfo(host_of(endpoint), 1, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, RuntimeError):  # the latter if the system allows no thread to resolve the name in
        return None


def is_own_address(address: bytes) -> bool:
    """Return whether this host has an IPv4 or IPv6 address, in its network namespace. True if that cannot be found out.

    Args:
        address: In the order of the network, 4 or 16 bytes.
    """
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.inet_ntop(family, address), 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


async def default_host(towards: Callable[[str], Awaitable[str | None]]) -> str | None:
    """Return the address of this host on the network of the default route; None if there is none.

    Args:
        towards: What `host_towards` does.
    """
    for endpoint in ELSEWHERE:
        if (host := await towards(endpoint)) is not None:
            return host
    return None
