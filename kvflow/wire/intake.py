"""Takes messages from sockets, and breaks connections that send more than is taken.

The queues have no bound: libzmq 4.3.5 ends the process when a connection breaks whose queue is full. Nor has a message
that never ends, of which libzmq keeps all parts and shows none. What a connection has sent is known to the kernel,
though, and what was taken of it is counted here; the rest waits. Where the kernel does not say it, nothing is found.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal

import zmq

from kvflow.wire.codec import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from kvflow.wire.sockets import NOBLOCK, ZmqSocket

__all__ = ["MAX_ANSWERS_BYTES", "MAX_WAITING_BYTES", "MAX_WAITING_IN_ALL_BYTES", "SRCFD", "Intake"]

MAX_WAITING_BYTES: Final = 2 * MAX_REQUEST_BYTES
"""Of one connection to a listener."""

MAX_WAITING_IN_ALL_BYTES: Final = 8 * MAX_REQUEST_BYTES
"""Of all connections to a listener."""

MAX_ANSWERS_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Of a connection that this process has made."""

LISTENER_CHECK_S: Final = 0.25
CONNECTION_CHECK_S: Final = 1.0
"""Seldom, since there is one such socket for each peer, and peers of that kind were chosen."""

COMMAND_BYTES: Final = 256
"""What heartbeats and the rest of a handshake may take between two checks."""

DROPPED_AT_ONCE: Final = 256
"""Messages of broken connections, and parts, that are dropped before the event loop gets its turn."""

LONG: Final = 255
"""Bytes from which on a length takes eight bytes instead of one."""

CURVE_BYTES: Final = 33
"""What encryption adds to a part: a name, a number, an authenticator and flags."""

BYTES_RECEIVED: Final = 128
"""Where Linux says in its `tcp_info` how many bytes have come, as a uint64."""

SRCFD: Final = int(zmq.SRCFD)


class Intake:
    """Takes the messages of a socket, each of one part; watches its connections.

    A connection is broken if, at two checks in a row, more than its share waits; and if it sends more parts. What waits
    of it is dropped. While the event loop stands still nothing is checked.

    Args:
        zmq_socket: A DEALER with one connection, or a ROUTER.
        port: Of the listener. Descriptors of other connections are not touched: libzmq may have closed one by now.
        is_encrypted: Whether there are keys.
        on_cut: Told of each connection that is broken, and why.
    """

    def __init__(self, zmq_socket: ZmqSocket, port: int, on_cut: Callable[[str], None], *, is_encrypted: bool) -> None:
        self._socket = zmq_socket
        self._port = port
        self._on_cut = on_cut
        is_listener = int(zmq_socket.getsockopt(zmq.TYPE)) == zmq.ROUTER
        self._num_ids = int(is_listener)
        self._end_with_port: Literal["getsockname", "getpeername"] = "getsockname" if is_listener else "getpeername"
        self._max_bytes = MAX_WAITING_BYTES if is_listener else MAX_ANSWERS_BYTES
        self._max_in_all = MAX_WAITING_IN_ALL_BYTES if is_listener else MAX_ANSWERS_BYTES
        self._check_s = LISTENER_CHECK_S if is_listener else CONNECTION_CHECK_S
        self._bytes_around = CURVE_BYTES if is_encrypted else 0
        self._loop = asyncio.get_running_loop()
        self._taken: dict[int, int] = {}
        self._suspects: set[int] = set()
        self._broken: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_rest = False

    @property
    def has_broken(self) -> bool:
        """Some connection was broken. Its descriptor may be that of a new one by now, so `watch` before `receive`."""
        return bool(self._broken)

    def receive(self) -> list[zmq.Frame]:
        """Take the next message: a routing id, if it is a ROUTER, and one part; a second one if there are more.

        Raises:
            zmq.Again: There is none, or there is more to be dropped.
        """
        for _ in range(DROPPED_AT_ONCE):
            frames = self._take()
            if frames:
                return frames
        raise zmq.Again

    def _take(self) -> list[zmq.Frame]:
        """Take a message, or drop something.

        Raises:
            zmq.Again: There is none.
        """
        frame = self._socket.recv(NOBLOCK, copy=False)
        if self._is_in_rest:
            self._is_in_rest = frame.more
            return []
        frames = [frame]
        fd = int(frame.get(SRCFD))
        is_broken = fd in self._broken
        while frames[-1].more:
            frames.append(self._socket.recv(NOBLOCK, copy=False))
            if len(frames) > self._num_ids + 1:
                self._is_in_rest = frames[-1].more
                self.cut(fd, "it sent a multipart message")
                break
        if is_broken:
            return []
        if fd in self._taken:
            self._taken[fd] += self._bytes_on_wire(frames[self._num_ids :])
        return frames

    def watch(self, fd: int) -> None:
        """Watch a new connection, by its descriptor."""
        self._taken[fd] = 0
        self._broken.discard(fd)
        if self._timer is None:
            self._timer = self._loop.call_later(self._check_s, self._check)

    def forget(self, fd: int) -> None:
        """Watch it no longer."""
        self._taken.pop(fd, None)
        self._suspects.discard(fd)

    def cut(self, fd: int, why: str) -> None:
        """Break a connection, and drop what waits of it."""
        own = None if fd in self._broken else self._open(fd)
        if own is not None:
            with own, suppress(OSError):  # its other end may be gone by now
                own.shutdown(socket.SHUT_RDWR)
            self.forget(fd)
            self._broken.add(fd)
            self._on_cut(why)

    def close(self) -> None:
        """Watch nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._taken.clear()

    def _bytes_on_wire(self, parts: Sequence[zmq.Frame]) -> int:
        num_bytes = 0
        for part in parts:
            body = len(part) + self._bytes_around
            num_bytes += body + (9 if body > LONG else 2)
        return num_bytes

    def _check(self) -> None:
        waiting = {fd: self._waiting(fd) for fd in self._taken}
        in_all = sum(waiting.values())
        suspects = set()
        for fd in sorted(waiting, key=waiting.__getitem__, reverse=True):
            if waiting[fd] <= self._max_bytes and in_all <= self._max_in_all:
                break
            suspects.add(fd)
            in_all -= waiting[fd]
        for fd in suspects & self._suspects:
            self.cut(fd, f"{waiting[fd]} of its bytes were waiting to be read")
        self._suspects = suspects & self._taken.keys()
        self._timer = self._loop.call_later(self._check_s, self._check) if self._taken else None

    def _waiting(self, fd: int) -> int:
        """Give the bytes of a connection that were received and not taken, but for those that no message has."""
        own = self._open(fd)
        if own is None:
            return 0
        with own:
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
        if len(info) < BYTES_RECEIVED + 8:
            return 0
        received: int = struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]
        self._taken[fd] = min(self._taken[fd] + COMMAND_BYTES, received)
        return received - self._taken[fd]

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
