"""Which connection leads to whom.

A dialer gives each of its connections the same name, an unguessable one, so that it stays who it is over a break of the
network. The name travels as metadata of ZMQ's handshake, and is not a routing id: libzmq 4.3.5 ends the process, or
reads a connection no more, when two connections have one routing id, and anybody may choose his own
(docs/decisions/0051).
"""

import re
import secrets
from contextlib import suppress
from typing import Final, NamedTuple

import zmq

from kvflow.wire.sockets import ZmqSocket

__all__ = ["Route", "Routes", "introduce", "name_in", "new_name"]

PROPERTY: Final = "X-Kvflow-Name"
NAME: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
"""Of fixed length, so that nobody fills memory with names."""

COUNTS: Final = 2**32
"""The last four bytes of a routing id count the connections of a socket."""


def new_name() -> bytes:
    """Make a name that nobody can guess."""
    return secrets.token_hex(16).encode()


def introduce(zmq_socket: ZmqSocket, name: bytes) -> None:
    """Give this name to each connection that a socket makes from now on."""
    zmq_socket.setsockopt(zmq.METADATA, PROPERTY.encode() + b":" + name)


def name_in(frame: zmq.Frame) -> bytes:
    """Return the name of the connection that a frame came over; empty if it has none."""
    with suppress(zmq.ZMQError, UnicodeDecodeError):  # it has no such property, or not text
        name = str(frame.get(PROPERTY))
        if NAME.fullmatch(name):
            return name.encode()
    return b""


class Route(NamedTuple):
    """One connection.

    Attributes:
        routing_id: What the socket calls it.
        fd: Its descriptor.
    """

    routing_id: bytes
    fd: int


class Routes:
    """The latest connection of each name."""

    def __init__(self) -> None:
        self._latest: dict[bytes, Route] = {}
        self._names: dict[int, set[bytes]] = {}

    def find(self, name: bytes) -> Route | None:
        """Return the connection that leads to a name; None if there is none."""
        return self._latest.get(name)

    def note(self, name: bytes, route: Route) -> None:
        """Note that a message came in this name. Messages of an earlier connection may be taken after it has broken."""
        latest = self._latest.get(name)
        if latest == route or (latest is not None and not _is_later(route.routing_id, latest.routing_id)):
            return
        self._latest[name] = route
        self._names.setdefault(route.fd, set()).add(name)

    def forget(self, fd: int) -> None:
        """Note that a connection is gone."""
        for name in self._names.pop(fd, ()):
            if name in self._latest and self._latest[name].fd == fd:
                del self._latest[name]


def _is_later(routing_id: bytes, other: bytes) -> bool:
    count, other_count = int.from_bytes(routing_id[-4:]), int.from_bytes(other[-4:])
    return (count - other_count) % COUNTS < COUNTS // 2
