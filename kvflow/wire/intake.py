"""Takes messages from sockets, and breaks connections that send more than is taken, or nothing any more.

The queues have no bound: libzmq 4.3.5 ends the process when a connection breaks whose queue is full. Nor has a message
that never ends, of which libzmq keeps all parts and shows none. What a connection has sent is known to the kernel,
though (`wire/tcp`), and what was taken of it is counted here; the rest waits. Where the kernel does not say it, nothing
is found.

A dialer sends heartbeats, so a listener hears of it all the time. When it does not, the kernel knows that as well.
libzmq 4.3.5 measures the silence after a heartbeat only, and no longer once a message has come after it.
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

MAX_SILENCE_MS: Final = HEARTBEAT_MS + SILENCE_MS
"""Of a connection to a listener over which a message has come: its handshake is done, and heartbeats follow."""

SRCFD: Final = int(zmq.SRCFD)


class Intake:
    """Takes the messages of a socket, each of one part; watches its connections.

    A connection is broken if, at two checks in a row, more than its share waits; and if it sends more parts. What waits
    of it is dropped. One to a listener is closed if nothing comes over it. While the event loop stands still nothing is
    checked.

    Args:
        zmq_socket: A DEALER with one connection, or a ROUTER.
        tcp: Looks at its connections.
        on_refused: Told of each connection that is broken, and of each message that is dropped: which, and why.
        take_news: Called before a message is taken, to handle what has happened to connections before it was sent.

    Attributes:
        fd: Descriptor of the connection that the latest message came over.
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
        fd = self._fd_of(frame)
        if fd is None:
            self._is_in_rest = frame.more
            self._on_refused("message_rejected", "it was sent with ZMTP 2 or older")
            return []
        self._take_news()  # the descriptor may be that of another connection by now
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
        """Return whether a connection is there, and was not broken."""
        return fd in self._taken

    def is_unheard(self, fd: int) -> bool:
        """Return whether a connection is there, and no message has come over it."""
        return fd in self._unheard

    def forget(self, fd: int) -> None:
        """Watch it no longer."""
        self._taken.pop(fd, None)
        self._unheard.discard(fd)
        self._suspects.discard(fd)

    def cut(self, fd: int, why: str) -> None:
        """Break a connection, and drop what waits of it."""
        if fd not in self._broken and self._tcp.shut(fd):
            self.forget(fd)
            self._broken.add(fd)
            self._on_refused("connection_cut", why)

    def close(self) -> None:
        """Watch nothing any more."""
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
                self._tcp.shut(fd)  # libzmq tells of its end

    def _waiting(self, fd: int) -> int:
        """Return the bytes of a connection that were received and not taken, but for those that no message has."""
        received = self._tcp.received(fd)
        if received is None:
            return 0
        self._taken[fd] = min(self._taken[fd] + COMMAND_BYTES, received)
        return received - self._taken[fd]

    @staticmethod
    def _fd_of(frame: zmq.Frame) -> int | None:
        """Return the descriptor of the connection that a frame came over; None with ZMTP 2, which does not tell."""
        try:
            return int(frame.get(SRCFD))
        except zmq.ZMQError:
            return None
