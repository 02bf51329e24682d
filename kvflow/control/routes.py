"""Maps peers to their latest connections.

A dialer gives all of its connections the same unguessable name, so that it is recognized after it reconnects. The name
is sent as metadata of the ZMTP handshake. It is not a routing id, because a peer can choose any routing id, and libzmq
4.3.5 aborts the process or stops reading if two connections have the same one (docs/decisions/0051).
"""

import re
import secrets
from typing import Final, NamedTuple

import zmq

from kvflow.control.sockets import ZmqSocket

__all__ = ["LatestConnection", "Routes", "introduce", "name_in", "new_name", "sender_host"]

PROPERTY: Final = "X-Kvflow-Name"
NAME: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
"""A fixed length bounds the memory that names take."""

COUNTS: Final = 2**32
"""The last four bytes of a routing id count the connections of a socket."""


def new_name() -> bytes:
    """Return a new unguessable name."""
    return secrets.token_hex(16).encode()


def introduce(zmq_socket: ZmqSocket, name: bytes) -> None:
    """Set the name of all connections that a socket makes from now on."""
    zmq_socket.setsockopt(zmq.METADATA, PROPERTY.encode() + b":" + name)


def name_in(frame: zmq.Frame) -> bytes:
    """Return the name of the connection that a frame arrived on; empty if it has none."""
    try:
        name = str(frame.get(PROPERTY))
    except (zmq.ZMQError, UnicodeDecodeError):  # no such property, or not valid text
        return b""
    return name.encode() if NAME.fullmatch(name) else b""


def sender_host(frame: zmq.Frame) -> str:
    """Return the address of the host that a frame came from; empty if it is unknown."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


class LatestConnection(NamedTuple):
    """A connection, by its routing id at the ROUTER and its file descriptor."""

    routing_id: bytes
    fd: int


class Routes:
    """The latest connection of each name."""

    def __init__(self) -> None:
        self._latest: dict[bytes, LatestConnection] = {}
        self._names: dict[int, set[bytes]] = {}

    def find(self, name: bytes) -> LatestConnection | None:
        """Return the latest connection with a name; None if there is none."""
        return self._latest.get(name)

    def note(self, name: bytes, route: LatestConnection) -> None:
        """Record the connection of a received message, unless the name has a later one.

        Messages of an earlier connection may be read after it has broken.
        """
        latest = self._latest.get(name)
        if latest == route or (latest is not None and not _is_later(route.routing_id, latest.routing_id)):
            return
        self._latest[name] = route
        self._names.setdefault(route.fd, set()).add(name)

    def forget(self, fd: int) -> None:
        """Remove a connection that has ended."""
        for name in self._names.pop(fd, ()):
            if name in self._latest and self._latest[name].fd == fd:
                del self._latest[name]


def _is_later(routing_id: bytes, other: bytes) -> bool:
    count, other_count = int.from_bytes(routing_id[-4:]), int.from_bytes(other[-4:])
    return (count - other_count) % COUNTS < COUNTS // 2
