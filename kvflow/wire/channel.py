"""Control sockets: the only module that knows ZMQ.

Sockets are plain ones that never block, and callbacks are called on the event loop; `zmq.asyncio` makes futures for
both directions, which costs several times as much. ZMQ's file descriptor tells of changes, not of messages: whoever has
used a socket looks whether there are messages by now.

Sending never waits: a peer that does not take its messages fills its queue, and the send that finds it full fails, so
that it cannot hold up anybody else.

A connection that a middlebox has dropped silently is found by ZMQ heartbeats and made anew. libzmq's own thread
sends and answers them, so a process whose interpreter is busy stays connected.
"""

import asyncio
import ipaddress
import itertools
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import anyio
import zmq

from kvflow.config import check_address, check_bind, join_address, split_address
from kvflow.errors import ConfigError, Unreachable
from kvflow.wire.codec import MAX_MESSAGE_BYTES
from kvflow.wire.hosts import host_towards

__all__ = ["ZmqConnection", "ZmqControl", "ZmqListener"]

QUEUE_MESSAGES: Final = 10_000
"""Messages queued for one peer; at three messages for a transfer, thousands of transfers."""

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

LINGER_MS: Final = 500
"""How long the last messages may take to leave after a socket was closed."""

BACKLOG: Final = 1_024

# As numbers: zmq's own flags are enums, and each operation with one costs as much as looking at the socket.
NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
POLLIN: Final = int(zmq.POLLIN)
HANDSHAKE_SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)

ZmqSocket = zmq.Socket[bytes]
Frames = list[bytes]


class ZmqControl:
    """Control sockets over TCP, see `kvflow.ports.ControlChannel`."""

    def listen(
        self, bind: str, advertise: str | None, on_message: Callable[[bytes, Sequence[bytes]], None]
    ) -> "ZmqListener":
        """Bind a socket.

        Raises:
            ConfigError: The address is malformed or cannot be bound, or the host to advertise is none.
        """
        return ZmqListener(bind, advertise, on_message)

    def connect(
        self, endpoint: str, on_message: Callable[[Sequence[bytes]], None], on_lost: Callable[[], None]
    ) -> "ZmqConnection":
        """Connect to a listener.

        Raises:
            ConfigError: The address is malformed.
            Unreachable: This process has no sockets left.
        """
        return ZmqConnection(endpoint, on_message, on_lost)

    async def host_towards(self, endpoint: str) -> str | None:
        """As the port says. Sends nothing."""
        return await host_towards(endpoint)

    async def is_refused(self, endpoint: str, timeout_s: float) -> bool:
        """Say whether the host of an address says that nobody listens there.

        Silence says nothing: a host that is off or cut off looks like that, and so does a process that hangs.

        Raises:
            ConfigError: The address is malformed.
        """
        host, port = split_address("endpoint", endpoint)
        with anyio.move_on_after(timeout_s):
            try:
                stream = await anyio.connect_tcp(host, port)
            except OSError as error:
                return _is_refusal(error.__cause__)
            await stream.aclose()
        return False


def _is_refusal(cause: BaseException | None) -> bool:
    """Every address of the host refused."""
    if isinstance(cause, BaseExceptionGroup):
        return all(_is_refusal(part) for part in cause.exceptions)
    return isinstance(cause, ConnectionRefusedError)


class _Sockets:
    """Makes ZMQ sockets, in a context of kvflow's own: an engine may end the one that libraries share."""

    def __init__(self) -> None:
        self._context: zmq.Context[ZmqSocket] | None = None
        self._names = itertools.count()
        os.register_at_fork(after_in_child=self._forget)

    def make(self, kind: int) -> ZmqSocket:
        """Make a socket without any connection.

        Raises:
            zmq.ZMQError: This process has no descriptors left.
        """
        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        made = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, QUEUE_MESSAGES),
            (zmq.RCVHWM, QUEUE_MESSAGES),
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

    def make_monitor(self, watched: ZmqSocket, events: int) -> ZmqSocket:
        """Make a socket that receives the connection events of another one.

        Raises:
            zmq.ZMQError: This process has no descriptors left.
        """
        name = f"inproc://kvflow-monitor-{next(self._names)}"
        watched.monitor(name, events)
        monitor = self.make(zmq.PAIR)
        try:
            monitor.connect(name)
        except zmq.ZMQError:
            monitor.close(0)
            raise
        return monitor

    def _forget(self) -> None:
        """Forget the context: a forked child has none of libzmq's threads."""
        self._context = None


_sockets: Final = _Sockets()


class _Ports:
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


_ports: Final = _Ports()


class _Inbox:
    """Takes the messages of a ZMQ socket on the event loop, in order.

    Args:
        zmq_socket: Is closed with it.
        on_frames: Takes the frames of a message; it may close the inbox.
        on_empty: Called when all messages were taken.
    """

    def __init__(
        self, zmq_socket: ZmqSocket, on_frames: Callable[[Frames], None], on_empty: Callable[[], None] | None = None
    ) -> None:
        self._socket = zmq_socket
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
        if self._soon is None and not self._is_taking and self._has_messages():
            self._soon = self._loop.call_soon(self.take)

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

    def _has_messages(self) -> bool:
        return not self.is_closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN)

    def _take_some(self) -> None:
        """Take up to as many as one turn allows."""
        for _ in range(MESSAGES_AT_ONCE):
            if self.is_closed:
                return
            try:
                frames = self._socket.recv_multipart(NOBLOCK)
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


def _send(zmq_socket: ZmqSocket, frames: Frames, **values: object) -> None:
    try:
        for frame in frames[:-1]:
            zmq_socket.send(frame, NOBLOCK_MORE)
        zmq_socket.send(frames[-1], NOBLOCK)
    except zmq.Again as error:
        raise Unreachable("peer does not take its messages", **values) from error
    except zmq.ZMQError as error:
        raise Unreachable("peer is not connected", **values) from error


class ZmqListener:
    """A bound socket, see `kvflow.ports.Listener`.

    Attributes:
        endpoint: Address under which others reach it.
    """

    def __init__(self, bind: str, advertise: str | None, on_message: Callable[[bytes, Sequence[bytes]], None]) -> None:
        check_bind(bind, advertise)
        try:
            self._fd, self._port_fd, host, port = _bind(*split_address("bind", bind))
        except OSError as error:
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        self.endpoint = join_address(advertise or host, port)
        try:
            self._socket = _sockets.make(zmq.ROUTER)
        except zmq.ZMQError as error:
            os.close(self._fd)
            os.close(self._port_fd)
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.USE_FD, self._fd)
        try:
            self._socket.bind(join_address(host, port))
        except zmq.ZMQError as error:
            self._socket.close(0)
            os.close(self._fd)
            os.close(self._port_fd)
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        _ports.add(self._fd)
        _ports.add(self._port_fd)
        self._inbox = _Inbox(self._socket, lambda frames: on_message(frames[0], frames[1:]))

    def send(self, connection: bytes, payload: bytes) -> None:
        """Queue a message for one connection.

        Raises:
            Unreachable: That connection is gone, or its queue is full, or the listener is closed.
        """
        try:
            _send(self._socket, [connection, payload], connection=connection.hex())
        finally:
            self._inbox.look()

    def close(self, *, keep_port: bool = False) -> None:
        """Close it.

        Args:
            keep_port: The host goes on to take connections for the port, and to let nobody else bind it, until this
                process has ended. Nobody accepts them.
        """
        if self._inbox.is_closed:
            return
        _ports.remove(self._fd)
        self._inbox.close()
        if not keep_port:
            _ports.close(self._port_fd)


def _bind(host: str, port: int) -> tuple[int, int, str, int]:
    """Bind and listen.

    Returns:
        Two descriptors, one for libzmq and one to keep the port with, which are closed on exec; the host that was
        bound, as a number; the port.
    """
    if host == "*":
        is_dual = socket.has_dualstack_ipv6()
        family, address = (socket.AF_INET6, ("::", port)) if is_dual else (socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - asked for
    else:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name may stand for addresses of both kinds; peers try the older one first, too.
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)  # type: ignore[assignment]
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
        name = bound.getsockname()
        port_fd = os.dup(bound.fileno())
        return bound.detach(), port_fd, name[0], name[1]


class ZmqConnection:
    """A connection to one listener, see `kvflow.ports.Connection`.

    libzmq resolves a host name again at each attempt, but to addresses of one kind only. Of a name with both, the older
    kind is taken, as listeners do; which kinds there are is found out beside the event loop.
    """

    def __init__(
        self, endpoint: str, on_message: Callable[[Sequence[bytes]], None], on_lost: Callable[[], None]
    ) -> None:
        check_address("endpoint", endpoint)
        self._endpoint = endpoint
        self._on_lost = on_lost
        self._is_made = False
        self._is_lost = False
        self._early: list[bytes] | None = []
        self._loop = asyncio.get_running_loop()
        try:
            self._socket = _sockets.make(zmq.DEALER)
        except zmq.ZMQError as error:
            raise Unreachable("no socket could be made", endpoint=endpoint, detail=str(error)) from error
        try:
            monitor = _sockets.make_monitor(self._socket, HANDSHAKE_SUCCEEDED | DISCONNECTED)
        except zmq.ZMQError as error:
            self._socket.monitor(None, 0)
            self._socket.close(0)
            raise Unreachable("no socket could be made", endpoint=endpoint, detail=str(error)) from error
        # An unguessable name of our own keeps the connection's identity over a break of the network.
        self._socket.setsockopt(zmq.ROUTING_ID, b"k" + secrets.token_bytes(16))
        self._inbox = _Inbox(self._socket, on_message, self._tell_if_lost)
        self._events = _Inbox(monitor, self._take_event)
        host, _ = split_address("endpoint", endpoint)
        if not _is_number(host):
            self._resolve(host)
            return
        try:
            self._dial(is_ipv6=":" in host)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("address cannot be used", endpoint=endpoint, detail=str(error)) from error

    def send(self, payload: bytes) -> None:
        """Queue a message, also while there is no connection.

        Raises:
            Unreachable: The queue is full, or the connection is closed.
        """
        if self._early is not None and not self._inbox.is_closed:
            if len(self._early) >= QUEUE_MESSAGES:
                raise Unreachable("peer does not take its messages", endpoint=self._endpoint)
            self._early.append(payload)
            return
        try:
            _send(self._socket, [payload], endpoint=self._endpoint)
        finally:
            self._inbox.look()

    def close(self) -> None:
        """Close it."""
        if self._inbox.is_closed:
            return
        self._socket.monitor(None, 0)
        self._events.close(0)
        self._inbox.close()

    def _take_event(self, frames: Frames) -> None:
        event, _ = struct.unpack("=HI", frames[0])
        if event == HANDSHAKE_SUCCEEDED:
            self._is_made = True
        elif event == DISCONNECTED and self._is_made:
            self._is_made = False
            self._is_lost = True
            self._inbox.take()  # what came before the break comes before the news of it

    def _tell_if_lost(self) -> None:
        if self._is_lost:
            self._is_lost = False
            self._on_lost()

    def _resolve(self, host: str) -> None:
        """Find out which kinds of addresses a name has, again and again until it has any and can be dialled.

        Meanwhile the peer cannot be reached, as if it were off.
        """
        if self._inbox.is_closed:
            return
        try:
            found = self._loop.run_in_executor(None, partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM))
        except RuntimeError:  # no thread could be started
            self._resolve_later(host)
            return
        found.add_done_callback(partial(self._take_addresses, host))

    def _take_addresses(self, host: str, found: "asyncio.Future[list[tuple[int, int, int, str, object]]]") -> None:
        if found.cancelled():
            return
        error = found.exception()
        if self._inbox.is_closed:
            return
        if error is not None:
            self._resolve_later(host)
            return
        try:
            self._dial(is_ipv6=socket.AF_INET not in {entry[0] for entry in found.result()})
        except zmq.ZMQError:
            self._resolve_later(host)

    def _resolve_later(self, host: str) -> None:
        self._loop.call_later(RECONNECT_MAX_MS / 1e3, self._resolve, host)

    def _dial(self, *, is_ipv6: bool) -> None:
        """Begin to connect, and send what was queued before.

        Raises:
            zmq.ZMQError: libzmq does not take the address, or has no resources left.
        """
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        self._socket.connect(self._endpoint)
        early, self._early = self._early or [], None
        for payload in early:
            self.send(payload)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
