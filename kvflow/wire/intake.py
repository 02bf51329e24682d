"""Reads messages from sockets, and closes connections that send faster than they are read, or that have gone silent.

Receive queues have no limit, because libzmq 4.3.5 aborts the process when a connection with a full queue breaks. A
multipart message has no limit either: libzmq buffers its parts until the last one. So this module compares the bytes
that it has read from each connection with the bytes that the kernel has received (`wire/tcp`). Without the kernel's
counters nothing is detected.

Dialers send heartbeats, so a live connection to a listener is never silent for long. The kernel measures the silence,
because libzmq 4.3.5 measures it only after a heartbeat, and stops when a message arrives.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from kvflow.ports import OnKindRefused
from kvflow.wire.codec import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from kvflow.wire.sockets import HEARTBEAT_MS, NOBLOCK, SILENCE_MS, ZmqSocket
from kvflow.wire.tcp import Tcp, is_listener

__all__ = ["MAX_ANSWERS_BYTES", "MAX_WAITING_BYTES", "MAX_WAITING_IN_ALL_BYTES", "Intake"]

MAX_WAITING_BYTES: Final = 2 * MAX_REQUEST_BYTES
"""Limit of unread bytes of one connection to a listener."""

MAX_WAITING_IN_ALL_BYTES: Final = 8 * MAX_REQUEST_BYTES
"""Limit of unread bytes of all connections to a listener."""

MAX_ANSWERS_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Limit of unread bytes of a connection that this process has opened."""

LISTENER_CHECK_S: Final = 0.25
CONNECTION_CHECK_S: Final = 1.0
"""Longer than for listeners, because there is one such socket per peer, and this process has chosen those peers."""

COMMAND_BYTES: Final = 256
"""Allowance for heartbeats and the end of a handshake between two checks."""

DROPPED_AT_ONCE: Final = 256
"""Messages of closed connections, and message parts, that are dropped before yielding to the event loop."""

MAX_SILENCE_MS: Final = HEARTBEAT_MS + SILENCE_MS
"""Maximum silence of a connection to a listener after its first message, when its handshake is done and heartbeats
follow."""

SRCFD: Final = int(zmq.SRCFD)


class Intake:
    """Reads the single-part messages of a socket, and watches its connections.

    A connection is closed, and its unread messages are dropped, if it exceeds the limits of unread bytes at two checks
    in a row, or sends a multipart message. A listener also closes silent connections. Nothing is checked while the
    event loop is blocked.

    Args:
        zmq_socket: A DEALER with one connection, or a ROUTER.
        tcp: The socket's connections, as the kernel sees them.
        on_refused: Called with the kind and the reason when a connection is cut, or a message rejected.
        take_news: Called before a message is delivered, to handle connection events that precede it.

    Attributes:
        fd: Descriptor of the connection that the latest message arrived on.
    """

    def __init__(
        self,
        zmq_socket: ZmqSocket,
        tcp: Tcp,
        on_refused: OnKindRefused,
        take_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.fd = -1
        self._socket = zmq_socket
        self._tcp = tcp
        self._on_refused = on_refused
        self._take_news = take_news
        has_ids = is_listener(zmq_socket)
        self._num_ids = int(has_ids)
        self._max_bytes = MAX_WAITING_BYTES if has_ids else MAX_ANSWERS_BYTES
        self._max_in_all = MAX_WAITING_IN_ALL_BYTES if has_ids else MAX_ANSWERS_BYTES
        self._check_s = LISTENER_CHECK_S if has_ids else CONNECTION_CHECK_S
        self._loop = asyncio.get_running_loop()
        self._taken: dict[int, int] = {}
        self._unheard: set[int] = set()
        self._suspects: set[int] = set()
        self._broken: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_rest = False

    def receive(self) -> list[zmq.Frame]:
        """Read the next message: one part, preceded by a routing id if the socket is a ROUTER.

        If the message has further parts, the second one is included and the others are dropped.

        Raises:
            zmq.Again: There is no message, or `DROPPED_AT_ONCE` messages were dropped.
        """
        for _ in range(DROPPED_AT_ONCE):
            frames = self._take()
            if frames:
                return frames
        raise zmq.Again

    def _take(self) -> list[zmq.Frame]:
        """Read a message; empty if a message or a part of one was dropped.

        Raises:
            zmq.Again: There is no message.
        """
        frame = self._socket.recv(NOBLOCK, copy=False)
        if self._is_in_rest:
            self._is_in_rest = frame.more
            return []
        fd = self._fd_of(frame)
        if fd is None:
            self._is_in_rest = frame.more
            self._on_refused("message_rejected", "it was sent with ZMTP 2 or older")
            return []
        self._take_news()  # the descriptor may belong to a new connection by now
        frames = [frame]
        is_broken = fd in self._broken
        while frames[-1].more:
            frames.append(self._socket.recv(NOBLOCK, copy=False))
            if len(frames) > self._num_ids + 1:
                self._is_in_rest = frames[-1].more
                self.cut(fd, "it sent a multipart message")
                break
        if is_broken:
            return []
        self.fd = fd
        if fd in self._taken:
            self._unheard.discard(fd)
            self._taken[fd] += sum(self._tcp.bytes_on_wire(len(part)) for part in frames[self._num_ids :])
        return frames

    def watch(self, fd: int) -> None:
        """Watch a new connection, by its descriptor."""
        self._taken[fd] = 0
        self._unheard.add(fd)
        self._broken.discard(fd)
        if self._timer is None:
            self._timer = self._loop.call_later(self._check_s, self._check)

    def is_watched(self, fd: int) -> bool:
        """Return whether a connection exists and has not been closed from this side."""
        return fd in self._taken

    def is_unheard(self, fd: int) -> bool:
        """Return whether a connection exists and has not delivered a message."""
        return fd in self._unheard

    def forget(self, fd: int) -> None:
        """Stop watching a connection."""
        self._taken.pop(fd, None)
        self._unheard.discard(fd)
        self._suspects.discard(fd)

    def cut(self, fd: int, why: str) -> None:
        """Close a connection, and drop its unread messages."""
        if fd not in self._broken and self._tcp.shut(fd):
            self.forget(fd)
            self._broken.add(fd)
            self._on_refused("connection_cut", why)

    def close(self) -> None:
        """Stop watching all connections."""
        if self._timer is not None:
            self._timer.cancel()
        self._taken.clear()

    def _check(self) -> None:
        if self._num_ids:
            self._close_silent()
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

    def _close_silent(self) -> None:
        for fd in self._taken.keys() - self._unheard:
            silence_ms = self._tcp.silence_ms(fd)
            if silence_ms is not None and silence_ms > MAX_SILENCE_MS:
                self._tcp.shut(fd)  # libzmq then reports its end

    def _waiting(self, fd: int) -> int:
        """Return the number of received but unread bytes of a connection, less an allowance for heartbeats."""
        received = self._tcp.received(fd)
        if received is None:
            return 0
        self._taken[fd] = min(self._taken[fd] + COMMAND_BYTES, received)
        return received - self._taken[fd]

    @staticmethod
    def _fd_of(frame: zmq.Frame) -> int | None:
        """Return the descriptor of a frame's connection; None with ZMTP 2, for which libzmq does not report it."""
        try:
            return int(frame.get(SRCFD))
        except zmq.ZMQError:
            return None
