"""ZMQ sockets on an event loop: options, reading and closing, and cleanup in forked children."""

import asyncio
import ctypes
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import zmq

from kvflow.errors import Unreachable
from kvflow.gate.connections import MAX_SILENCE_MS
from kvflow.gate.sizes import MAX_MESSAGE_BYTES
from kvflow.resources import check_threads, descriptors

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
    "give_back_memory",
    "new_context",
    "ports",
    "send",
    "sockets",
]

QUEUE_MESSAGES: Final = 10_000
"""Length limit of the send queue of a peer: at three messages per transfer, enough for thousands of transfers. Receive
queues have no limit, see `kvflow.control.intake`."""

MESSAGES_AT_ONCE: Final = 16
"""Messages read before yielding to the event loop."""

HEARTBEAT_MS: Final = 400
"""Interval between two heartbeats of a connection."""

SILENCE_MS: Final = MAX_SILENCE_MS - HEARTBEAT_MS
"""Silence after which a connection is closed and re-established; 1.2 s, well below a peer's lease, which is 3 s by
default.

Only a complete message ends the silence, so a message that takes longer to arrive never gets through.
"""

HANDSHAKE_MS: Final = 2_000
"""How long the ZMTP handshake may take before the connection is retried."""

CONNECT_MS: Final = 1_000
"""How long a TCP connect may take; a host that is down or unreachable does not answer."""

RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 500

RAND_STATE_BYTES: Final = 128

LINGER_MS: Final = 500
"""How long a closed socket may go on sending queued messages."""

# Plain integers: pyzmq's flags are enums, and an operation on one costs as much as polling the socket.
NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
POLLIN: Final = int(zmq.POLLIN)

ZmqSocket = zmq.Socket[bytes]
Frames = list[bytes]
Context = zmq.Context[ZmqSocket]


CONTEXT_DESCRIPTORS: Final = 6
"""Descriptors of a context: an event and an epoll instance for each of its two threads, its event and its socket's."""

CONTEXT_THREADS: Final = 2

ZERO_COPY_RECV: Final = 10
"""An option of contexts without a name in pyzmq. When it is on, an unread message of a few bytes keeps 8 KiB."""


def new_context() -> Context:
    """Create a context with the highest possible limit on its sockets, and start its threads.

    libzmq starts them with the first socket, and aborts the process if it cannot. So if this process lacks descriptors
    or threads, this raises a Shortage.
    """
    descriptors.draw(CONTEXT_DESCRIPTORS)
    check_threads(CONTEXT_THREADS)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    context.set(ZERO_COPY_RECV, 0)
    context.socket(zmq.PAIR).close(0)
    return context


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed C's `rand` unpredictably inside the block, and restore its previous state afterwards.

    Blocks of two threads must not overlap: the one that ended last would leave `rand` with the state of the other one.

    libzmq 4.3.5 numbers the connections of a ROUTER with `rand`, which it never seeds. It aborts the process when it
    generates a number that a peer has chosen as its routing id (docs/decisions/0051).
    """
    libc = ctypes.CDLL(None)
    libc.initstate.restype = ctypes.c_void_p
    state = ctypes.create_string_buffer(RAND_STATE_BYTES)
    before = libc.initstate(secrets.randbits(32), state, ctypes.c_size_t(len(state)))
    try:
        yield
    finally:
        libc.setstate(ctypes.c_void_p(before))


def give_back_memory() -> None:
    """Return freed memory to the system. glibc keeps what was freed below memory that is still in use.

    Takes milliseconds, or longer if the process has much memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Sockets:
    """Creates ZMQ sockets, in a context of their own, because an engine may terminate pyzmq's shared one."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._starting = threading.Lock()  # event loops of several threads may open ranks at the same time
        self._seeding = threading.Lock()
        self._names = itertools.count()
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> Context:
        """Return the shared context, with its threads running, or raise a Shortage, as `new_context`."""
        with self._starting:
            self._context = self._context or new_context()
            return self._context

    def make(self, kind: int, context: Context | None = None) -> ZmqSocket:
        """Create an unconnected socket, by default in the shared context. Without descriptors, raise zmq.ZMQError."""
        context = context or self.start()
        with self._seeding, _seeded():
            made = context.socket(kind)
        # HEARTBEAT_TTL stays 0: libzmq would keep a timer for each connection of a listener, and stopping one takes as
        # long as there are timers. With 8,192 connections its thread falls behind, and all break.
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, QUEUE_MESSAGES),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.CONNECT_TIMEOUT, CONNECT_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        ):
            made.setsockopt(option, value)
        return made

    def make_monitor(self, watched: ZmqSocket, events: int, context: Context | None = None) -> ZmqSocket:
        """Create a socket, as `make` does, that receives the connection events of another one in this context."""
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
        """Drop the context, because a forked child has none of libzmq's threads."""
        self._context = None
        self._starting = threading.Lock()
        self._seeding = threading.Lock()


sockets: Final = Sockets()


class BoundPorts:
    """The bound file descriptors of this process, which a forked child closes.

    A host refuses connections to a port once the last descriptor of the port is closed. Peers take that as proof that
    no process is left that could write. So each listener has a second descriptor besides the one that libzmq closes,
    and may keep it open until the process ends. A forked child, such as a `multiprocessing` worker, must hold neither.
    """

    def __init__(self) -> None:
        self._bound: dict[int, int] = {}
        os.register_at_fork(after_in_child=self._close)

    def add(self, fd: int) -> None:
        """Record a descriptor."""
        self._bound[fd] = os.fstat(fd).st_ino

    def remove(self, fd: int) -> None:
        """Forget a descriptor, before libzmq closes it."""
        self._bound.pop(fd, None)

    def close(self, fd: int) -> None:
        """Close a descriptor that libzmq does not own, unless this is a forked child that has already closed it."""
        if self._bound.pop(fd, None) is not None:
            os.close(fd)

    def _close(self) -> None:
        for fd, inode in self._bound.items():
            try:
                if os.fstat(fd).st_ino == inode:
                    os.close(fd)
            except OSError:  # already closed
                continue
        self._bound.clear()


ports: Final = BoundPorts()


class Inbox:
    """Reads the messages of a ZMQ socket on the event loop, in order.

    Args:
        zmq_socket: The socket; the inbox closes it.
        on_frames: Called with the frames of a message. It may close the inbox.
        on_empty: Called when no messages are left.
        receive: Reads the next message from the socket, or raises zmq.Again. By default `recv_multipart`.
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
        self._loop.add_reader(self._socket, self.read_messages)
        self.schedule_read()

    def schedule_read(self) -> None:
        """Schedule a read if there are messages. Call it after each use of the socket."""
        if self.has_messages():
            self.take_soon()

    def read_messages(self) -> None:
        """Read up to `MESSAGES_AT_ONCE` messages now, and schedule another read if more are left."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._is_taking = True
        try:
            self._take_some()
        finally:  # even if a callback has raised; the event loop reports that
            self._is_taking = False
            if self.has_messages():
                self._soon = self._loop.call_soon(self.read_messages)
            elif self._on_empty is not None and not self.is_closed:
                self._on_empty()

    def take_soon(self) -> None:
        """Schedule a read, or a call of `on_empty` if there are no messages."""
        if self._soon is None and not self._is_taking:
            self._soon = self._loop.call_soon(self.read_messages)

    def take_all(self) -> None:
        """Read all messages now."""
        while self.has_messages():
            self.read_messages()

    def has_messages(self) -> bool:
        """Return whether there are messages to read."""
        return not self.is_closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN)

    def _take_some(self) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            if self.is_closed:
                return
            try:
                frames = self._receive()
            except zmq.Again:
                return
            self._on_frames(frames)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Stop reading, and close the socket. May be called twice, and from a callback.

        The descriptor is removed from the event loop first. Otherwise a new socket with the same number would count as
        already registered, and would never be polled.
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
    """Queue a message; raise Unreachable, with these values, if the queue is full or the peer is not connected."""
    try:
        for frame in frames[:-1]:
            zmq_socket.send(frame, NOBLOCK_MORE)
        zmq_socket.send(frames[-1], NOBLOCK)
    except zmq.Again as error:
        raise Unreachable("queue to the peer is full", **values) from error
    except zmq.ZMQError as error:
        raise Unreachable("peer is not connected", **values) from error
