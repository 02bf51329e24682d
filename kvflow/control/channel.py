"""Control sockets over ZMQ, as defined in `kvflow.ports`.

Sockets are non-blocking, and callbacks run on the event loop. `zmq.asyncio` would cost several times as much, because
it creates futures for both directions. ZMQ's file descriptor is edge-triggered, so each use of a socket is followed by
a check for messages.

Sending never waits. A peer that does not read fills its queue, and further sends to it fail, so it cannot delay others.

ZMQ heartbeats detect connections that a middlebox has silently dropped, which are then re-established. libzmq's I/O
thread sends and answers them, so a process whose interpreter is busy stays connected. Only dialers send heartbeats,
because sending one may abort a listener with libzmq 4.3.5 (docs/decisions/0051). Listeners answer them, and close
silent connections (`control/intake`).
"""

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import anyio
import zmq

from kvflow.addresses import check_bind, join_address, split_address, split_bind, split_hosts
from kvflow.control.curve import ZapAuthenticator, be_server
from kvflow.control.dialer import ZmqConnection
from kvflow.control.intake import Intake
from kvflow.control.routes import LatestConnection, Routes, name_in
from kvflow.control.sockets import (
    RECONNECT_MAX_MS,
    Frames,
    Inbox,
    give_back_memory,
    ports,
    send,
    sockets,
)
from kvflow.control.tcp import Tcp, accept_connects, has_arrivals, ignore_connects
from kvflow.errors import ConfigError, RemoteProtocolError, Shortage, Unreachable
from kvflow.gate.connections import GRACE_S, MAX_PAUSE_S, MUCH_BYTES
from kvflow.gate.sizes import MAX_REQUEST_BYTES
from kvflow.hosts import host_towards
from kvflow.ports import OnKindRefused, ignore
from kvflow.resources import check_shortage, descriptors, find_shortage
from kvflow.trust import ANY, PLAIN, PRINCIPAL_DIGITS, Trust

__all__ = ["ZmqConnection", "ZmqControl", "ZmqListener"]

BACKLOG: Final = 1_024

ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
EVENTS: Final = ACCEPTED | DISCONNECTED
"""HANDSHAKE_FAILED_PROTOCOL is left out, as in `control/dialer`."""

NEXT_ARRIVAL_S: Final = 0.02
SHORTAGE_S: Final = 1.0
"""When to look again whether connections can be accepted, in seconds: after somebody has connected, and while they
cannot. libzmq would try all the time, which keeps a core busy, and queue an event for each attempt."""

GIVEN_BACK_BYTES: Final = 8 * 2**20
"""After a pause, memory is returned to the system if more bytes than this were read since the last time."""

KEEPALIVE_S: Final = 60
"""Silence after which the kernel sends TCP keepalive probes, for peers that have not even sent a heartbeat."""


class ZmqListener:
    """A bound ROUTER socket, see `kvflow.ports.Listener` and `kvflow.ports.ControlChannel.listen`.

    With keys, the name of a connection begins with the principal of the peer. So peers that choose the same name still
    have different connections.

    Attributes:
        endpoint: Address at which others reach it.
    """

    def __init__(
        self,
        bind: str,
        advertise: str | None,
        on_message: Callable[[bytes, Sequence[bytes]], None],
        *,
        trust: Trust = PLAIN,
        on_refused: OnKindRefused = ignore,
    ) -> None:
        check_bind(bind, advertise)
        try:
            self._fd, self._port_fd, host, port = _bind_first(bind)
        except OSError as error:
            check_shortage(error.errno)
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        self.endpoint = join_address(advertise or host, port)
        self._address = join_address(host, port)
        self._trust = trust
        self._on_message = on_message
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._authenticator: ZapAuthenticator | None = None
        self._port = port
        self._pause: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._is_short = False
        self._read_before = 0
        try:
            if not trust.is_plain:
                self._authenticator = ZapAuthenticator(trust, partial(on_refused, "key_refused"))
            self._open()
            descriptors.refill()
        except (zmq.ZMQError, Shortage) as error:
            if self._authenticator is not None:
                self._authenticator.close()
            os.close(self._fd)
            os.close(self._port_fd)
            if isinstance(error, Shortage):
                raise
            check_shortage(error.errno)
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        ports.add(self._port_fd)

    def _open(self) -> None:
        """Create the socket and start to accept connections. If this raises, only the port's descriptors are open."""
        context = None if self._authenticator is None else self._authenticator.context
        with ExitStack() as stack:
            self._socket = sockets.make(zmq.ROUTER, context)
            stack.callback(self._socket.close, 0)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            if self._authenticator is not None:
                be_server(self._socket, self._trust)
            self._events = Inbox(sockets.make_monitor(self._socket, EVENTS, context), self._take_event)
            stack.callback(self._events.close, 0)
            stack.callback(self._socket.monitor, None, 0)
            self._socket.setsockopt(zmq.USE_FD, self._fd)
            self._socket.bind(self._address)
            stack.pop_all()
        ports.add(self._fd)
        self._tcp = Tcp(self._socket, self._port, is_encrypted=self._authenticator is not None)
        self._intake = Intake(self._socket, self._tcp, self._on_refused, self._events.take_all)
        self._routes = Routes()
        self._inbox = Inbox(self._socket, self._deliver, self._go_on_accepting, receive=self._receive)
        self._await_arrival()

    def _await_arrival(self) -> None:
        self._arrival_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._port_fd, self._check_descriptors)

    def _check_descriptors(self) -> None:
        """When somebody connects, find out whether there is a descriptor; if not, say so, and let nobody connect."""
        self._loop.remove_reader(self._port_fd)
        shortage = find_shortage()
        if shortage and not self._is_short and not has_arrivals(self._port_fd):
            shortage = ""  # it was accepted, with the last descriptor
        if shortage:
            self._arrival_timer = self._loop.call_later(SHORTAGE_S, self._check_descriptors)
        else:
            self._arrival_timer = self._loop.call_later(NEXT_ARRIVAL_S, self._await_arrival)
        if shortage:
            if not self._is_short:
                self._on_refused("descriptor_shortage", f"connections are not accepted: {shortage}")
            ignore_connects(self._port_fd)
            self._drop_waiting()
        elif self._is_short and not self._is_paused:
            accept_connects(self._port_fd)
        self._is_short = bool(shortage)

    def _drop_waiting(self) -> None:
        """Close the connections that libzmq cannot accept, with a descriptor from the reserve."""
        port = socket.socket(fileno=self._port_fd)
        with suppress(Shortage, OSError):  # BlockingIOError: there are no more
            descriptors.draw(1)
            while True:
                port.accept()[0].close()
        port.detach()
        descriptors.refill()

    def _look_for_leftovers(self, num_bytes: int) -> None:
        """After a connection has ended, find out whether what it has left, at least `num_bytes`, is read soon."""
        if not self._is_paused and self._inbox.has_messages():
            if num_bytes > MUCH_BYTES:
                self._stop_accepting()
            elif self._pause is None:
                self._pause = self._loop.call_later(GRACE_S, self._stop_accepting)
        self._inbox.schedule_read()

    def _stop_accepting(self) -> None:
        """Let nobody connect until everything received so far has been read.

        What a connection leaves behind when it ends cannot be counted any more, so nobody may leave something behind
        again and again faster than it is read.
        """
        if self._pause is not None:
            self._pause.cancel()
        self._is_paused = ignore_connects(self._port_fd)
        self._pause = self._loop.call_later(MAX_PAUSE_S, self._go_on_accepting)

    def _go_on_accepting(self) -> None:
        if self._pause is None:
            return
        self._pause.cancel()
        self._pause = None
        if self._is_paused and not self._is_short:
            accept_connects(self._port_fd)
        self._is_paused = False
        if self._intake.num_bytes - self._read_before > GIVEN_BACK_BYTES:
            self._read_before = self._intake.num_bytes
            self._loop.run_in_executor(None, give_back_memory)

    def _close_socket(self) -> None:
        if self._arrival_timer is not None:
            self._arrival_timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._port_fd)
        self._go_on_accepting()
        ports.remove(self._fd)  # libzmq closes it
        self._intake.close()
        self._socket.monitor(None, 0)
        self._events.close(0)
        self._inbox.close()

    def send(self, connection: bytes, payload: bytes) -> None:
        """Queue a message for one connection, see `kvflow.ports.Listener.send`."""
        route = self._routes.find(connection)
        if route is None:
            raise Unreachable("peer is not connected")
        if not self._intake.may_send(route.fd):
            raise Unreachable("queue to the peer is full")
        try:
            send(self._socket, [route.routing_id, payload])
        finally:
            self._inbox.schedule_read()
        self._intake.note_sent(route.fd, len(payload))

    def names_of(self, connection: bytes) -> tuple[str, ...]:
        """Return the instances that the peer of a connection may act for, see `kvflow.ports.Listener.names_of`."""
        return (ANY,) if self._authenticator is None else self._trust.names_of(connection[:PRINCIPAL_DIGITS].decode())

    def host_of(self, connection: bytes) -> str:
        """Return the address of the host at the other end, see `kvflow.ports.Listener.host_of`."""
        route = self._routes.find(connection)
        return "" if route is None else self._tcp.peer_host(route.fd)

    def renew(self, trust: Trust) -> None:
        """Use these keys from now on, see `kvflow.ports.Listener.renew`."""
        if self._authenticator is None or trust.is_plain:
            if trust.is_plain is not self._trust.is_plain:
                raise ConfigError("listener cannot switch between plain transport and keys while it is open")
            return
        is_same = trust.keeps(self._trust)
        self._trust = self._authenticator.gate.trust = trust
        if not is_same and not self._is_closed:
            self._loop.call_soon(self._open_anew)  # messages sent until then still leave

    def _open_anew(self) -> None:
        """Replace the socket, which breaks all connections. A bound socket keeps its key and its accepted peers."""
        if self._is_closed:
            return
        self._close_socket()
        try:
            self._fd = os.dup(self._port_fd)
            try:
                self._open()
            except zmq.ZMQError:
                os.close(self._fd)
                raise
        except (zmq.ZMQError, OSError) as error:
            self._on_refused("key_refused", f"all connections, because no socket can be created: {error}")
            self._loop.call_later(RECONNECT_MAX_MS / 1e3, self._open_anew)

    def _receive(self) -> Frames:
        """Read the next message, with the name of its connection in place of the routing id, or raise zmq.Again."""
        frames = self._intake.receive()
        self._sender = frames[0]
        routing_id, *parts = [frame.bytes for frame in frames]
        name = name_in(frames[0]) or routing_id
        if self._authenticator is not None:
            name = self._trust.principal(str(frames[0].get("User-Id"))).encode() + name
        if self._intake.fd in self._intake.unread.num_read:
            self._routes.note(name, LatestConnection(routing_id, self._intake.fd))
        return [name, *parts]

    def _deliver(self, frames: Frames) -> None:
        sender = self._sender
        try:
            self._on_message(frames[0], frames[1:])
        except RemoteProtocolError as error:
            if self._authenticator is not None:
                self._authenticator.keep_out(str(sender.get("User-Id")))
            self._intake.cut_sender(str(error))

    def _take_event(self, frames: Frames) -> None:
        event, fd = struct.unpack("=Hi", frames[0])
        if event == ACCEPTED:
            self._intake.watch(fd)
            return
        is_refusal = self._authenticator is not None and self._intake.unread.is_unheard(fd)
        num_left = self._intake.forget(fd)
        self._routes.forget(fd)
        self._look_for_leftovers(num_left)
        if is_refusal:
            self._on_refused("key_refused", "a connection ended before its first message: no key, or another one")

    def close(self, *, keep_port: bool = False) -> None:
        """Close the listener, see `kvflow.ports.Listener.close`.

        The host goes on completing connections to a port that is kept, which nobody accepts.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._close_socket()
        if self._authenticator is not None:
            self._authenticator.close()
        if not keep_port:
            ports.close(self._port_fd)


class ZmqControl:
    """Control sockets over TCP, see `kvflow.ports.ControlChannel`."""

    listen = ZmqListener
    connect = ZmqConnection
    host_towards = staticmethod(host_towards)

    def reserve(self) -> None:
        """Start libzmq's threads, and fill the reserve of descriptors, or raise a Shortage."""
        sockets.start()
        descriptors.fill()

    async def is_refused(self, endpoint: str, timeout_s: float) -> bool:
        """Return whether the host refuses connections to an address; of several, whether all do.

        No answer counts as False: the host may be down or unreachable, or the process may hang.
        """
        hosts, port = split_address("endpoint", endpoint)
        with anyio.move_on_after(timeout_s):
            for host in split_hosts(hosts):
                if not await _refuses(host, port):
                    return False
            return True
        return False


async def _refuses(host: str, port: int) -> bool:
    try:
        stream = await anyio.connect_tcp(host, port)
    except OSError as error:
        return _is_refusal(error.__cause__)
    except Exception:  # noqa: BLE001 - any other error is not a refusal; the address comes from a peer
        return False
    await stream.aclose()
    return False


def _is_refusal(cause: BaseException | None) -> bool:
    """Return whether every address of the host refused the connection."""
    if isinstance(cause, BaseExceptionGroup):
        return all(_is_refusal(part) for part in cause.exceptions)
    return isinstance(cause, ConnectionRefusedError)


def _bind_first(bind: str) -> tuple[int, int, str, int]:
    """Do as `_bind` with the first free port; raise ConfigError, with the range, if none is free."""
    host, ports_allowed = split_bind(bind)
    for port in ports_allowed:
        try:
            return _bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or len(ports_allowed) == 1:
                raise
    first, last = ports_allowed[0], ports_allowed[-1]
    raise ConfigError("no port of the range is free", bind=bind, first=first, last=last)


def _bind(host: str, port: int) -> tuple[int, int, str, int]:
    """Bind and listen. Return the descriptor for libzmq, and one that keeps the port; the host as a number; the port.

    Both descriptors are closed on exec.
    """
    if host == "*":
        is_dual = socket.has_dualstack_ipv6()
        family, address = (socket.AF_INET6, ("::", port)) if is_dual else (socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - the caller asked for it
    else:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name may have addresses of both families. Peers prefer IPv4, too.
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
