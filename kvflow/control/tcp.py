"""The kernel's view of libzmq's TCP connections: bytes received and acknowledged, silence, and writability.

libzmq does not report how many bytes of a connection are waiting to be read or sent, but the kernel counts received and
acknowledged bytes. On systems other than Linux these counters are unknown.
"""

import ctypes
import os
import select
import socket
import struct
from contextlib import suppress
from typing import Final, Literal, NamedTuple

import zmq

from kvflow.control.sockets import ZmqSocket

__all__ = ["CURVE_BYTES", "Tcp", "TcpCounts", "accept_connects", "has_arrivals", "ignore_connects", "is_listener"]

CURVE_BYTES: Final = 33
"""Bytes that encryption adds to a message part: command name, nonce, authenticator and flags."""

LONG: Final = 255
"""Longest body whose length ZMTP encodes in one byte; longer ones take eight."""

COUNTS: Final = struct.Struct("=52xI64xQQ")
"""Where Linux's `tcp_info` has the fields of `TcpCounts`."""

SO_ATTACH_FILTER: Final = 26
SO_DETACH_FILTER: Final = 27
DROP_ALL: Final = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
"""A packet filter of one instruction, "return 0", which drops every packet of a socket."""


class TcpCounts(NamedTuple):
    """What the kernel knows of a connection.

    Attributes:
        silence_ms: Milliseconds since data was last received.
        acked: Number of bytes that the peer has acknowledged.
        received: Number of bytes received.
    """

    silence_ms: int
    acked: int
    received: int


def ignore_connects(port_fd: int) -> bool:
    """Drop all attempts to connect to a listening socket; return whether the system can do that.

    The other end tries again after a second. Connections that exist are not affected. libzmq cannot stop accepting:
    `unbind` also ends the connections that were accepted.
    """
    program = struct.pack("HL", 1, ctypes.addressof(DROP_ALL))
    return _set_option(port_fd, SO_ATTACH_FILTER, program)


def accept_connects(port_fd: int) -> None:
    """Accept connections again."""
    _set_option(port_fd, SO_DETACH_FILTER, bytes(4))


def has_arrivals(port_fd: int) -> bool:
    """Return whether connections to a listening socket have not been accepted yet."""
    poll = select.poll()
    poll.register(port_fd, select.POLLIN)
    return bool(poll.poll(0))


def _set_option(fd: int, option: int, value: bytes) -> bool:
    if not hasattr(socket, "TCP_INFO"):
        return False
    own = socket.socket(fileno=fd)
    try:
        own.setsockopt(socket.SOL_SOCKET, option, value)
    except OSError:
        return False
    finally:
        own.detach()  # a duplicate would need a descriptor, and there may be none
    return True


def is_listener(zmq_socket: ZmqSocket) -> bool:
    """Return whether a socket is a ROUTER, which accepts many connections, rather than a DEALER, which has one."""
    return int(zmq_socket.getsockopt(zmq.TYPE)) == zmq.ROUTER


class Tcp:
    """Inspects and closes the TCP connections of a ZMQ socket, by their file descriptors.

    Args:
        zmq_socket: A DEALER or a ROUTER.
        port: Port of the listener. A descriptor with another port is not touched, because libzmq may have closed the
            connection, and the descriptor may have been reused.
    """

    def __init__(self, zmq_socket: ZmqSocket, port: int, *, is_encrypted: bool) -> None:
        self._port = port
        self._end_with_port: Literal["getsockname", "getpeername"] = (
            "getsockname" if is_listener(zmq_socket) else "getpeername"
        )
        self._bytes_around = CURVE_BYTES if is_encrypted else 0

    def bytes_on_wire(self, length: int) -> int:
        """Return the number of bytes that a message part of a given length takes on the wire."""
        body = length + self._bytes_around
        return body + (9 if body > LONG else 2)

    def counts(self, fd: int) -> TcpCounts | None:
        """Return the counts of a connection; None if they are unknown.

        Asks often, so it does without a duplicate of the descriptor: a count of another connection does no harm.
        """
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            own = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, fd)
        except OSError:
            return None
        try:
            if getattr(own, self._end_with_port)()[1] != self._port:
                return None
            return TcpCounts._make(COUNTS.unpack(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, COUNTS.size)))
        except (OSError, IndexError, struct.error):  # not a connection, or an old kernel
            return None
        finally:
            own.detach()

    def peer_host(self, fd: int) -> str:
        """Return the address of the host at the other end; empty if the connection is gone."""
        own = self._open(fd)
        if own is None:
            return ""
        with own, suppress(OSError):
            return str(own.getpeername()[0])
        return ""

    def is_writable(self, fd: int) -> bool:
        """Return whether the kernel accepts more bytes now, in which case none wait in libzmq for long."""
        own = self._open(fd)
        if own is None:
            return False
        with own:
            poll = select.poll()
            poll.register(own, select.POLLOUT)
            return any(event == select.POLLOUT for _, event in poll.poll(0))

    def shut(self, fd: int) -> bool:
        """Shut a connection down; return whether it existed."""
        own = self._open(fd)
        if own is None:
            return False
        with own, suppress(OSError):  # the peer may have disconnected
            own.shutdown(socket.SHUT_RDWR)
        return True

    def _open(self, fd: int) -> socket.socket | None:
        """Return a connection as a socket with a duplicate descriptor; None if the descriptor is no longer its own."""
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
