"""What the kernel knows of the TCP connections of libzmq: bytes each way, silence, and whether more can be written.

libzmq shows neither how much waits to be taken from a connection nor how much waits to be sent over it. The kernel has
counted what has come and what was acknowledged. Where it has not (not Linux), nothing is known.
"""

import os
import select
import socket
import struct
from contextlib import suppress
from typing import Final, Literal

import zmq

from kvflow.wire.sockets import ZmqSocket

__all__ = ["CURVE_BYTES", "Tcp", "is_listener"]

CURVE_BYTES: Final = 33
"""What encryption adds to a part: a name, a number, an authenticator and flags."""

LONG: Final = 255
"""Bytes from which on a length takes eight bytes instead of one."""

LAST_DATA_RECEIVED: Final = struct.Struct("=52xI")
"""Where Linux says in its `tcp_info` how many milliseconds ago data has come."""

BYTES_ACKED: Final = struct.Struct("=120xQ")
"""How many bytes the other end has acknowledged."""

BYTES_RECEIVED: Final = struct.Struct("=128xQ")
"""How many bytes have come."""


def is_listener(zmq_socket: ZmqSocket) -> bool:
    """Return whether a socket is a ROUTER, which many connect to, or a DEALER, which has one connection."""
    return int(zmq_socket.getsockopt(zmq.TYPE)) == zmq.ROUTER


class Tcp:
    """Looks at the connections of a socket, by their descriptors.

    Args:
        zmq_socket: A DEALER or a ROUTER.
        port: Of the listener. Descriptors of other connections are not touched: libzmq may have closed one by now.
        is_encrypted: Whether there are keys.
    """

    def __init__(self, zmq_socket: ZmqSocket, port: int, *, is_encrypted: bool) -> None:
        self._port = port
        self._end_with_port: Literal["getsockname", "getpeername"] = (
            "getsockname" if is_listener(zmq_socket) else "getpeername"
        )
        self._bytes_around = CURVE_BYTES if is_encrypted else 0

    def bytes_on_wire(self, length: int) -> int:
        """Return the bytes that a part of a message takes."""
        body = length + self._bytes_around
        return body + (9 if body > LONG else 2)

    def received(self, fd: int) -> int | None:
        """Return the bytes that have come; None if that is not known."""
        return self._number(fd, BYTES_RECEIVED)

    def silence_ms(self, fd: int) -> int | None:
        """Return the time for which nothing has come; None if that is not known."""
        return self._number(fd, LAST_DATA_RECEIVED)

    def acked(self, fd: int) -> int | None:
        """Return the bytes that have arrived at the other end; None if that is not known."""
        return self._number(fd, BYTES_ACKED)

    def is_writable(self, fd: int) -> bool:
        """Return whether the kernel takes more bytes now, so that none can be waiting in libzmq for long."""
        own = self._open(fd)
        if own is None:
            return False
        with own:
            poll = select.poll()
            poll.register(own, select.POLLOUT)
            return any(event == select.POLLOUT for _, event in poll.poll(0))

    def shut(self, fd: int) -> bool:
        """Break a connection; say whether it was there."""
        own = self._open(fd)
        if own is None:
            return False
        with own, suppress(OSError):  # its other end may be gone by now
            own.shutdown(socket.SHUT_RDWR)
        return True

    def _number(self, fd: int, place: struct.Struct) -> int | None:
        own = self._open(fd)
        if own is None:
            return None
        with own:
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, place.size)
        if len(info) < place.size:
            return None
        number: int = place.unpack(info)[0]
        return number

    def _open(self, fd: int) -> socket.socket | None:
        """Open a connection by its descriptor once more; None if it is none of the socket any more."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            own = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        try:
            own.getpeername()
            if getattr(own, self._end_with_port)()[1] == self._port:
                return own
        except (OSError, IndexError):
            pass
        own.close()
        return None
