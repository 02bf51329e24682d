"""The host address at which others reach this process, and which addresses belong to this host."""

import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from kvflow.addresses import split_hosts

__all__ = ["default_host", "host_of", "host_towards", "is_own_address", "resolve_hosts"]

ELSEWHERE: Final = ("tcp://192.0.2.1:1", "tcp://[2001:db8::1]:1")
"""Addresses reserved for documentation: no network has them, so the route to them is the default route."""


def host_of(endpoint: str) -> str:
    """Return the host of "tcp://host:port", without the brackets of an IPv6 address, or its hosts."""
    return ",".join(split_hosts(endpoint.removeprefix("tcp://").rpartition(":")[0]))


def resolve_hosts(host: str) -> list[str]:
    """Return the addresses of a host or of several, in their order; of a name those of IPv4 first. Blocks.

    A name that cannot be resolved is left out.

    Raises:
        OSError, UnicodeError: There are none.
    """
    found: list[str] = []
    unknown: OSError | UnicodeError | None = None
    for one in split_hosts(host):
        try:
            entries = socket.getaddrinfo(one, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            unknown = error
            continue
        entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
        found += [str(entry[4][0]) for entry in entries]
    if not found and unknown is not None:
        raise unknown
    return list(dict.fromkeys(found))


async def host_towards(endpoint: str) -> str | None:
    """Return this host's address on the route to "tcp://host:port", without brackets. Sends nothing.

    None if no host of it can be resolved, or there is no route.
    """
    for host in split_hosts(host_of(endpoint)):
        try:
            found = await anyio.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
            family, kind, _, _, address = found[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0]).partition("%")[0]
        except (OSError, RuntimeError):  # RuntimeError: no thread could be started to resolve the name
            continue
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
