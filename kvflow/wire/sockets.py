"""ZMQ sockets on an event loop: how they are set, read and closed, and what a forked child gives up."""

import asyncio
import ctypes
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import zmq

from kvflow.errors import Unreachable
from kvflow.wire.codec import MAX_MESSAGE_BYTES

__all__ = [
    "LINGER_MS",
    "NOBLOCK",
    "POLLIN",
    "QUEUE_MESSAGES",
    "RECONNECT_MAX_MS",
    "Context",
    "Frames",
    "Inbox",
    "ZmqSocket",
    "new_context",
    "ports",
    "send",
    "sockets",
]

QUEUE_MESSAGES: Final = 10_000
"""Messages queued for one peer; at three messages for a transfer, thousands of transfers. What was received is queued
without a bound, see `kvflow.wire.intake`."""

MESSAGES_AT_ONCE: Final = 16
"""Messages taken before the event loop gets its turn."""

HEARTBEAT_MS: Final = 400
"""Between two heartbeats of a connection."""

SILENCE_MS: Final = 1_200
"""Silence after which a connection is dropped and made anew; well below the lease of a peer, which is 3 s by default.

Any whole message breaks the silence; a single one that takes longer to arrive does not get through.
"""

HANDSHAKE_MS: Final = 2_000
"""How long ZMQ's own handshake may take before a connection is made anew."""

CONNECT_MS: Final = 1_000
"""How long TCP may take to connect; a host that is off or cut off says nothing."""

RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 500

RAND_STATE_BYTES: Final = 128
_RAND_STATE: Final = ctypes.create_string_buffer(RAND_STATE_BYTES)
"""Never freed: when two threads make sockets at the same time, `rand` may be left using it."""

LINGER_MS: Final = 500
"""How long the last messages may take to leave after a socket was closed."""

# As numbers: zmq's own flags are enums, and each operation with one costs as much as looking at the socket.
NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
POLLIN: Final = int(zmq.POLLIN)

ZmqSocket = zmq.Socket[bytes]
Frames = list[bytes]
Context = zmq.Context[ZmqSocket]


def new_context() -> Context:
    """Make a context without a bound on its sockets."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


@contextmanager
def _seeded() -> Iterator[None]:
    """Make C's `rand` unpredictable meanwhile, and continue its own sequence afterwards.

    libzmq 4.3.5 numbers the connections of a ROUTER with `rand`, which it never seeds. It aborts the process when it
    comes to a number that a peer has chosen for itself (docs/decisions/0051).
    """
    libc = ctypes.CDLL(None)
    libc.initstate.restype = ctypes.c_void_p
    before = libc.initstate(secrets.randbits(32), _RAND_STATE, ctypes.c_size_t(RAND_STATE_BYTES))
    try:
        yield
    finally:
        libc.setstate(ctypes.c_void_p(before))


class Sockets:
    """Makes ZMQ sockets, in a context of kvflow's own: an engine may end the one that libraries share."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._names = itertools.count()
        os.register_at_fork(after_in_child=self._forget)

    def make(self, kind: int, context: Context | None = None) -> ZmqSocket:
        """Make a socket without any connection.

        Args:
            kind: Of ZMQ's kinds.
            context: That of all sockets by default.

        Raises:
            zmq.ZMQError: This process has no descriptors left.
        """
        if context is None:
            context = self._context = self._context or new_context()
        with _seeded():
            made = context.socket(kind)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, QUEUE_MESSAGES),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
            (zmq.HEARTBEAT_TTL, SILENCE_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.CONNECT_TIMEOUT, CONNECT_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        ):
            made.setsockopt(option, value)
        return made

    def make_monitor(self, watched: ZmqSocket, events: int, context: Context | None = None) -> ZmqSocket:
        """Make a socket that receives the connection events of another one.

        Args:
            watched: The other one.
            events: Of ZMQ's events.
            context: Of the other one.

        Raises:
            zmq.ZMQError: This process has no descriptors left.
        """
        name = f"inproc://kvflow-monitor-{next(self._names)}"
        watched.monitor(name, events)
        monitor = self.make(zmq.PAIR, context)
        try:
            monitor.connect(name)
        except zmq.ZMQError:
            monitor.close(0)
            raise
        return monitor

    def _forget(self) -> None:
        """Forget the context: a forked child has none of libzmq's threads."""
        self._context = None


sockets: Final = Sockets()


class Ports:
    """Bound descriptors of this process, which a forked child gives up.

    A port is refused once its last descriptor is closed, and that is what peers take as the proof that nobody is left
    who could write. So each listener has a second descriptor, besides the one that libzmq closes, and may leave it
    open until the process ends. A child that was only forked, such as a worker of `multiprocessing`, must hold neither.
    """

    def __init__(self) -> None:
        self._bound: dict[int, int] = {}
        os.register_at_fork(after_in_child=self._close)

    def add(self, fd: int) -> None:
        """Note a descriptor."""
        self._bound[fd] = os.fstat(fd).st_ino

    def remove(self, fd: int) -> None:
        """Forget a descriptor, before libzmq closes it."""
        self._bound.pop(fd, None)

    def close(self, fd: int) -> None:
        """Close a descriptor that libzmq does not have, unless this is a forked child, which has closed it."""
        if self._bound.pop(fd, None) is not None:
            os.close(fd)

    def _close(self) -> None:
        for fd, inode in self._bound.items():
            try:
                if os.fstat(fd).st_ino == inode:
                    os.close(fd)
            except OSError:  # it is closed already
                continue
        self._bound.clear()


ports: Final = Ports()


class Inbox:
    """Takes the messages of a ZMQ socket on the event loop, in order.

    Args:
        zmq_socket: Is closed with it.
        on_frames: Takes the frames of a message; it may close the inbox.
        on_empty: Called when all messages were taken.
        receive: Takes the next message from the socket, or raises zmq.Again.
    """

    def __init__(
        self,
        zmq_socket: ZmqSocket,
        on_frames: Callable[[Frames], None],
        on_empty: Callable[[], None] | None = None,
        receive: Callable[[], Frames] | None = None,
    ) -> None:
        self._socket = zmq_socket
        self._receive = receive or (lambda: zmq_socket.recv_multipart(NOBLOCK))
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self._on_empty = on_empty
        self._soon: asyncio.Handle | None = None
        self._is_taking = False
        self.is_closed = False
        self._loop.add_reader(self._socket, self.take)
        self.look()

    def look(self) -> None:
        """Take messages soon if there are any. Call it after the socket was used."""
        if self._has_messages():
            self.take_soon()

    def take(self) -> None:
        """Take some messages now, and the others soon."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._is_taking = True
        try:
            self._take_some()
        finally:  # also if a callback has failed, which is the event loop's to report
            self._is_taking = False
            if self._has_messages():
                self._soon = self._loop.call_soon(self.take)
            elif self._on_empty is not None and not self.is_closed:
                self._on_empty()

    def take_soon(self) -> None:
        """Take messages soon, or tell that there are none."""
        if self._soon is None and not self._is_taking:
            self._soon = self._loop.call_soon(self.take)

    def take_all(self) -> None:
        """Take all messages now."""
        while self._has_messages():
            self.take()

    def _has_messages(self) -> bool:
        return not self.is_closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN)

    def _take_some(self) -> None:
        """Take up to as many as one turn allows."""
        for _ in range(MESSAGES_AT_ONCE):
            if self.is_closed:
                return
            try:
                frames = self._receive()
            except zmq.Again:
                return
            self._on_frames(frames)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Take nothing any more, and close the socket. May be called twice, and by a callback.

        The event loop has to forget the descriptor before its number is given to another socket: it would take that one
        for known, and never look at it.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if self._soon is not None:
            self._soon.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
        self._socket.close(linger_ms)


def send(zmq_socket: ZmqSocket, frames: Frames, **values: object) -> None:
    """Queue a message.

    Raises:
        Unreachable: It cannot be sent; with these values.
    """
    try:
        for frame in frames[:-1]:
            zmq_socket.send(frame, NOBLOCK_MORE)
        zmq_socket.send(frames[-1], NOBLOCK)
    except zmq.Again as error:
        raise Unreachable("queue to the peer is full", **values) from error
    except zmq.ZMQError as error:
        raise Unreachable("peer is not connected", **values) from error
