"""Control sockets: the ports over ZMQ.

Sockets are plain ones that never block, and callbacks are called on the event loop; `zmq.asyncio` makes futures for
both directions, which costs several times as much. ZMQ's file descriptor tells of changes, not of messages: whoever has
used a socket looks whether there are messages by now.

Sending never waits: a peer that does not take its messages fills its queue, and the send that finds it full fails, so
that it cannot hold up anybody else.

A connection that a middlebox has dropped silently is found by ZMQ heartbeats and made anew. libzmq's own thread
sends and answers them, so a process whose interpreter is busy stays connected.
"""

import asyncio
import errno
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import anyio
import zmq

from kvflow.config import check_address, check_bind, join_address, split_address
from kvflow.errors import ConfigError, RemoteProtocolError, Unreachable
from kvflow.ports import OnKindRefused, OnRefused, ignore_kind_refused, ignore_refusal
from kvflow.trust import ANY, PLAIN, PRINCIPAL_DIGITS, ClientKeys, Trust, short
from kvflow.wire.codec import MAX_REQUEST_BYTES
from kvflow.wire.curve import Doorman, be_client, be_server
from kvflow.wire.hosts import host_towards
from kvflow.wire.intake import SRCFD, Intake
from kvflow.wire.sockets import (
    LINGER_MS,
    QUEUE_MESSAGES,
    RECONNECT_MAX_MS,
    Frames,
    Inbox,
    ports,
    send,
    sockets,
)

__all__ = ["ZmqConnection", "ZmqControl", "ZmqListener"]

BACKLOG: Final = 1_024

HANDSHAKE_SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
HANDSHAKE_FAILED_AUTH: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
HANDSHAKE_FAILED_PROTOCOL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
HANDSHAKE_FAILED_NO_DETAIL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
HANDSHAKE_FAILED: Final = HANDSHAKE_FAILED_AUTH | HANDSHAKE_FAILED_PROTOCOL | HANDSHAKE_FAILED_NO_DETAIL
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
CONNECTED: Final = int(zmq.EVENT_CONNECTED)
LISTENER_EVENTS: Final = HANDSHAKE_FAILED_PROTOCOL | HANDSHAKE_FAILED_NO_DETAIL | ACCEPTED | DISCONNECTED
CONNECTION_EVENTS: Final = CONNECTED | HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED | DISCONNECTED

PEER_HUNG_UP: Final = (errno.EPIPE, errno.ECONNRESET)
"""Why a handshake has failed of which libzmq says no more: not for want of time."""

TRIES_OF_A_KEY: Final = 2
MAX_KEYS_SHOWN: Final = 4


class ZmqControl:
    """Control sockets over TCP, see `kvflow.ports.ControlChannel`."""

    def listen(
        self,
        bind: str,
        advertise: str | None,
        on_message: Callable[[bytes, Sequence[bytes]], None],
        *,
        trust: Trust = PLAIN,
        on_refused: OnKindRefused = ignore_kind_refused,
    ) -> "ZmqListener":
        """Bind a socket.

        Raises:
            ConfigError: The address is malformed or cannot be bound, or the host to advertise is none.
        """
        return ZmqListener(bind, advertise, on_message, trust, on_refused)

    def connect(
        self,
        endpoint: str,
        on_message: Callable[[Sequence[bytes]], None],
        on_lost: Callable[[], None],
        *,
        keys: ClientKeys | None = None,
        on_refused: OnRefused = ignore_refusal,
    ) -> "ZmqConnection":
        """Connect to a listener.

        Raises:
            ConfigError: The address is malformed.
            Unreachable: This process has no sockets left.
        """
        return ZmqConnection(endpoint, on_message, on_lost, keys, on_refused)

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


class ZmqListener:
    """A bound socket, see `kvflow.ports.Listener`.

    Where there are keys, the name of a connection begins with the principal of its other end. So a routing id that
    somebody else takes over is another connection.

    Attributes:
        endpoint: Address under which others reach it.
    """

    def __init__(
        self,
        bind: str,
        advertise: str | None,
        on_message: Callable[[bytes, Sequence[bytes]], None],
        trust: Trust,
        on_refused: OnKindRefused,
    ) -> None:
        check_bind(bind, advertise)
        try:
            self._fd, self._port_fd, host, port = _bind(*split_address("bind", bind))
        except OSError as error:
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        self.endpoint = join_address(advertise or host, port)
        self._address = join_address(host, port)
        self._trust = trust
        self._on_message = on_message
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._doorman: Doorman | None = None
        self._port = port
        try:
            if not trust.is_plain:
                self._doorman = Doorman(trust, partial(on_refused, "key_refused"))
            self._open()
        except zmq.ZMQError as error:
            if self._doorman is not None:
                self._doorman.close()
            os.close(self._fd)
            os.close(self._port_fd)
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        ports.add(self._port_fd)

    def _open(self) -> None:
        """Make the socket and let it take connections.

        Raises:
            zmq.ZMQError: It cannot; nothing is left open but the descriptors of the port.
        """
        context = None if self._doorman is None else self._doorman.context
        with ExitStack() as stack:
            self._socket = sockets.make(zmq.ROUTER, context)
            stack.callback(self._socket.close, 0)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            if self._doorman is not None:
                be_server(self._socket, self._trust)
            self._events = Inbox(sockets.make_monitor(self._socket, LISTENER_EVENTS, context), self._take_event)
            stack.callback(self._events.close, 0)
            stack.callback(self._socket.monitor, None, 0)
            self._socket.setsockopt(zmq.USE_FD, self._fd)
            self._socket.bind(self._address)
            stack.pop_all()
        ports.add(self._fd)
        is_encrypted = self._doorman is not None
        self._intake = Intake(self._socket, self._port, self._tell_of_cut, is_encrypted=is_encrypted)
        self._inbox = Inbox(self._socket, self._deliver, receive=self._receive)

    def _close_socket(self) -> None:
        ports.remove(self._fd)  # which libzmq closes
        self._intake.close()
        self._socket.monitor(None, 0)
        self._events.close(0)
        self._inbox.close()

    def send(self, connection: bytes, payload: bytes) -> None:
        """Queue a message for one connection.

        Raises:
            Unreachable: That connection is gone, or its queue is full, or the listener is closed.
        """
        routing_id = connection if self._doorman is None else connection[PRINCIPAL_DIGITS:]
        try:
            send(self._socket, [routing_id, payload])
        finally:
            self._inbox.look()

    def names_of(self, connection: bytes) -> tuple[str, ...]:
        """Give the instances that the other end of a connection may speak for, as the port says."""
        return (ANY,) if self._doorman is None else self._trust.names_of(connection[:PRINCIPAL_DIGITS].decode())

    def renew(self, trust: Trust) -> None:
        """Go by other keys from now on, as the port says.

        Raises:
            ConfigError: Keys cannot be given up, or asked for, while it is open.
        """
        if self._doorman is None or trust.is_plain:
            if trust.is_plain is not self._trust.is_plain:
                raise ConfigError("listener cannot switch between plain transport and keys while it is open")
            return
        is_same = trust.keeps(self._trust)
        self._trust = self._doorman.trust = trust
        if not is_same and not self._is_closed:
            self._loop.call_soon(self._open_anew)  # what is sent until then still leaves

    def _open_anew(self) -> None:
        """Break all connections, since a bound socket keeps its key and whom it has let in; they are made anew."""
        if self._is_closed:
            return
        self._close_socket()
        self._fd = os.dup(self._port_fd)
        try:
            self._open()
        except zmq.ZMQError as error:
            os.close(self._fd)
            self._on_refused("key_refused", f"all connections, because no socket can be created: {error}")
            self._loop.call_later(RECONNECT_MAX_MS / 1e3, self._open_anew)

    def _receive(self) -> Frames:
        """Take the next message, under a name that has the key of its sender in it.

        Raises:
            zmq.Again: There is none.
        """
        if self._intake.has_broken:
            self._events.take()
        frames = self._intake.receive()
        self._sender = frames[0]
        routing_id, *others = [frame.bytes for frame in frames]
        if self._doorman is not None:
            routing_id = self._trust.principal(str(frames[0].get("User-Id"))).encode() + routing_id
        return [routing_id, *others]

    def _deliver(self, frames: Frames) -> None:
        sender = self._sender
        try:
            self._on_message(frames[0], frames[1:])
        except RemoteProtocolError as error:
            if self._doorman is not None:
                self._doorman.keep_out(str(sender.get("User-Id")))
            self._intake.cut(int(sender.get(SRCFD)), str(error))

    def _take_event(self, frames: Frames) -> None:
        event, value = struct.unpack("=Hi", frames[0])
        if event == ACCEPTED:
            self._intake.watch(value)
        elif event == DISCONNECTED:
            self._intake.forget(value)
        elif self._doorman is not None and (event == HANDSHAKE_FAILED_PROTOCOL or value in PEER_HUNG_UP):
            self._on_refused("key_refused", "handshake without a key, or with a different key of this process")

    def _tell_of_cut(self, why: str) -> None:
        self._on_refused("connection_cut", why)

    def close(self, *, keep_port: bool = False) -> None:
        """Close it.

        Args:
            keep_port: The host goes on to take connections for the port, and to let nobody else bind it, until this
                process has ended. Nobody accepts them.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._close_socket()
        if self._doorman is not None:
            self._doorman.close()
        if not keep_port:
            ports.close(self._port_fd)


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

    Where a listener may have one of several keys, each is tried in turn. What is sent until one fits waits here, since
    trying another one would lose it.
    """

    def __init__(
        self,
        endpoint: str,
        on_message: Callable[[Sequence[bytes]], None],
        on_lost: Callable[[], None],
        keys: ClientKeys | None,
        on_refused: OnRefused,
    ) -> None:
        check_address("endpoint", endpoint)
        self._endpoint = endpoint
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._keys = keys
        self._server = ""
        self._num_misfits = 0
        self._is_made = False
        self._is_lost = False
        self._early: list[bytes] | None = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._socket = sockets.make(zmq.DEALER)
        except zmq.ZMQError as error:
            raise Unreachable("cannot create a socket", endpoint=endpoint, detail=str(error)) from error
        try:
            monitor = sockets.make_monitor(self._socket, CONNECTION_EVENTS)
        except zmq.ZMQError as error:
            self._socket.monitor(None, 0)
            self._socket.close(0)
            raise Unreachable("cannot create a socket", endpoint=endpoint, detail=str(error)) from error
        # An unguessable name of our own keeps the connection's identity over a break of the network.
        self._socket.setsockopt(zmq.ROUTING_ID, b"k" + secrets.token_bytes(16))
        _, port = split_address("endpoint", endpoint)
        self._intake = Intake(self._socket, port, self._tell_of_cut, is_encrypted=keys is not None)
        self._inbox = Inbox(self._socket, on_message, self._tell_if_lost, self._receive)
        self._events = Inbox(monitor, self._take_event)
        try:
            self._begin()
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
                raise Unreachable("queue to the peer is full", endpoint=self._endpoint)
            self._early.append(payload)
            return
        try:
            send(self._socket, [payload], endpoint=self._endpoint)
        finally:
            self._inbox.look()

    def renew(self, keys: ClientKeys) -> None:
        """Connect with other keys from now on, as the port says."""
        if self._keys is None or self._inbox.is_closed:
            return
        is_good = keys.trust.secret == self._keys.trust.secret and self._server in keys.servers
        self._keys = keys
        if not is_good:
            self._server = ""
            self._redial()

    def close(self) -> None:
        """Close it."""
        if self._inbox.is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._socket.monitor(None, 0)
        self._intake.close()
        self._events.close(0)
        self._inbox.close()

    def _receive(self) -> Frames:
        return [frame.bytes for frame in self._intake.receive()]

    def _tell_of_cut(self, why: str) -> None:
        self._on_refused(f"connection was dropped: {why}")

    def _take_event(self, frames: Frames) -> None:
        event, value = struct.unpack("=Hi", frames[0])
        if event == CONNECTED:
            self._intake.watch(value)
        elif event == HANDSHAKE_SUCCEEDED:
            self._is_made = True
            self._num_misfits = 0
            self._send_early()
        elif event == DISCONNECTED:
            self._intake.forget(value)
            self._note_break()
        elif event == HANDSHAKE_FAILED_AUTH:
            own = "" if self._keys is None else short(self._keys.trust.public)
            self._refuse(f"key {own} of this process is not listed in `peers` there")
        elif event == HANDSHAKE_FAILED_PROTOCOL:
            is_plain = self._keys is None
            self._refuse(
                "it requires a key, and this process has none" if is_plain else "it has no keys, but this process does"
            )
        elif self._keys is not None and value in PEER_HUNG_UP:
            self._try_next_key(self._keys)

    def _note_break(self) -> None:
        if self._is_made:
            self._is_made = False
            self._is_lost = True
            if self._keys is not None:
                self._early = []
            self._inbox.take()  # what came before the break comes before the news of it

    def _tell_if_lost(self) -> None:
        if self._is_lost:
            self._is_lost = False
            self._on_lost()

    def _try_next_key(self, keys: ClientKeys) -> None:
        """Go on with another key: the listener has hung up, as one does whose key is not the one that was tried.

        One that is about to end does so, too, which is why each key is tried twice.
        """
        self._num_misfits += 1
        if self._num_misfits >= TRIES_OF_A_KEY * len(keys.servers):
            self._num_misfits = 0
            listed = ", ".join(map(short, keys.servers[:MAX_KEYS_SHOWN]))
            self._refuse(f"its key is not one of those that are listed for it here: {listed}")
        elif len(keys.servers) > 1:  # else libzmq tries again
            self._redial()

    def _refuse(self, detail: str) -> None:
        """Say that no connection can be made for now, and try again later: lists of keys change."""
        self._try_again_later(self._redial)
        self._on_refused(detail)

    def _redial(self) -> None:
        """Connect anew, with the next key if there are several. What libzmq has not sent yet is lost."""
        if self._inbox.is_closed:
            return
        self._socket.setsockopt(zmq.LINGER, 0)  # else it goes on to be tried with the former keys for so long
        with suppress(zmq.ZMQError):  # libzmq gives up by itself after some errors
            self._socket.disconnect(self._endpoint)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._note_break()
        try:
            self._begin()
        except zmq.ZMQError:
            self._try_again_later(self._redial)

    def _try_again_later(self, again: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(RECONNECT_MAX_MS / 1e3, again)

    def _begin(self) -> None:
        """Connect, or find out how.

        Raises:
            zmq.ZMQError: As in `_dial`.
        """
        host, _ = split_address("endpoint", self._endpoint)
        if self._keys is not None and not self._keys.servers:
            self._loop.call_soon(self._refuse_unlisted)
        elif _is_number(host):
            self._dial(is_ipv6=":" in host)
        else:
            self._resolve(host)

    def _refuse_unlisted(self) -> None:
        if not self._inbox.is_closed:
            self._refuse("no key is listed for it here")

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
        self._try_again_later(partial(self._resolve, host))

    def _dial(self, *, is_ipv6: bool) -> None:
        """Begin to connect, and send what was queued before.

        Raises:
            zmq.ZMQError: libzmq does not take the address, or has no resources left.
        """
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        if self._keys is not None:
            self._server = self._keys.after(self._server)
            be_client(self._socket, self._keys.trust, self._server)
        self._socket.connect(self._endpoint)
        if self._keys is None:
            self._send_early()

    def _send_early(self) -> None:
        early, self._early = self._early or [], None
        for payload in early:
            self.send(payload)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
