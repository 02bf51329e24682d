"""Control connections to listeners: the side that connects and reconnects.

Each attempt has its own socket, so events of one attempt are never mistaken for those of another. libzmq retries by
itself until a connection is established. When the connection breaks, or either end rejects the other, a new socket
takes over. Messages that libzmq has not sent by then are dropped with the old socket.
"""

import asyncio
import errno
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from enum import Enum, auto
from typing import Final, NamedTuple

import zmq

from kvflow.addresses import is_number, join_address, split_address
from kvflow.control.curve import be_client
from kvflow.control.diagnosis import Diagnosis, diagnose
from kvflow.control.intake import Intake
from kvflow.control.routes import introduce, new_name, sender_host
from kvflow.control.sockets import (
    LINGER_MS,
    QUEUE_MESSAGES,
    RECONNECT_MAX_MS,
    RECONNECT_MS,
    Frames,
    Inbox,
    ZmqSocket,
    send,
    sockets,
)
from kvflow.control.tcp import Tcp
from kvflow.errors import ConfigError, Shortage, Unreachable
from kvflow.gate.connections import MAX_WAITING_BYTES
from kvflow.hosts import resolve_hosts
from kvflow.ports import OnKindRefused, OnObstacle, OnRefused, ignore
from kvflow.resources import check_shortage, descriptors
from kvflow.trust import ClientKeys, short

__all__ = ["ZmqConnection"]

CONNECTED: Final = int(zmq.EVENT_CONNECTED)
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
HANDSHAKE_SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
HANDSHAKE_FAILED_AUTH: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
HANDSHAKE_FAILED_NO_DETAIL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
CONNECT_RETRIED: Final = int(zmq.EVENT_CONNECT_RETRIED)
EVENTS: Final = CONNECTED | DISCONNECTED | HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED_AUTH | HANDSHAKE_FAILED_NO_DETAIL
"""HANDSHAKE_FAILED_PROTOCOL is left out: if it is monitored, libzmq 4.3.5 does not treat a message that cannot be
decrypted as an error, and aborts the process at the next heartbeat (docs/decisions/0051). A handshake that ends without
any other event counts as a protocol failure."""

PEER_HUNG_UP: Final = (errno.EPIPE, errno.ECONNRESET)
"""Error numbers with HANDSHAKE_FAILED_NO_DETAIL that mean that the peer hung up, rather than that time ran out."""

DESCRIPTORS: Final = 5
"""Descriptors of a connection: two for each attempt's sockets, one for its monitor, and one to look at it."""

DIAGNOSE_AFTER_S: Final = 0.4
DIAGNOSE_AGAIN_S: Final = 5.0
"""When to find out why there is no connection: soon after the first attempt, then periodically."""

TRIES_OF_A_KEY: Final = 2
MAX_KEYS_SHOWN: Final = 4


class _Failure(Enum):
    """Why a handshake failed.

    Attributes:
        NOT_LISTED: The listener refused this process's key.
        HUNG_UP: The other end closed the connection. libzmq retries.
        LATE: The other end was too slow. libzmq retries.
        MISFIT: The other end did not follow the expected handshake.
    """

    NOT_LISTED = auto()
    HUNG_UP = auto()
    LATE = auto()
    MISFIT = auto()


class _Callbacks(NamedTuple):
    """The callbacks of a line.

    Attributes:
        on_message: Called with the frames of a message.
        on_made: Called when the connection is established.
        on_failed: Called with the reason when a handshake has failed.
        on_broken: Called when an established connection has broken and all received messages have been handled.
        on_dropped: Called with the kind and the reason when the line closes the connection, or drops a message.
    """

    on_message: Callable[[Sequence[bytes]], None]
    on_made: Callable[[], None]
    on_failed: Callable[[_Failure], None]
    on_unreached: Callable[[], None]
    on_broken: Callable[[], None]
    on_dropped: OnKindRefused


class _DialedSocket:
    """A DEALER socket that makes one connection.

    Args:
        zmq_socket: An unconnected DEALER. The line owns and closes it, even if the constructor fails.
        monitor: Receives the socket's events. The line owns and closes it, too.
        endpoint: Address to connect to; libzmq may reject it, or have no resources left.
        callbacks: Called when something happens.

    Attributes:
        is_made: Whether the connection is established.
        peer_host: Number of the host at the other end, once a message has come from it.
    """

    def __init__(
        self, zmq_socket: ZmqSocket, monitor: ZmqSocket, endpoint: str, callbacks: _Callbacks, *, is_encrypted: bool
    ) -> None:
        self.is_made = False
        self.peer_host = ""
        self._socket = zmq_socket
        self._callbacks = callbacks
        self._endpoint = endpoint
        self._fd = -1
        self._is_broken = False
        self._failure = _Failure.MISFIT
        _, port = split_address("endpoint", endpoint)
        self._tcp = Tcp(zmq_socket, port, is_encrypted=is_encrypted)
        self._intake = Intake(zmq_socket, self._tcp, callbacks.on_dropped)
        self._inbox = Inbox(zmq_socket, callbacks.on_message, self._tell_if_broken, self._receive)
        self._events = Inbox(monitor, self._take_event)
        try:
            zmq_socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, payload: bytes) -> None:
        """Queue a message, or raise Unreachable if the queue is full or the connection has broken."""
        if not self._intake.may_send(self._fd):
            raise Unreachable("queue to the peer is full", endpoint=self._endpoint)
        try:
            send(self._socket, [payload], endpoint=self._endpoint)
        finally:
            self._inbox.schedule_read()
        self._intake.note_sent(self._fd, len(payload))

    def close(self) -> None:
        """Close the line. Queued messages are still sent within a time limit, unless the other end has stopped reading.

        In that case they are dropped, because libzmq 4.3.5 aborts the process if a connection breaks while a closed
        socket still has messages to send and another message has arrived (docs/decisions/0051).
        """
        may_linger = self.is_made and self._tcp.is_writable(self._fd)
        self._socket.monitor(None, 0)
        self._intake.close()
        self._events.close(0)
        self._inbox.close(LINGER_MS if may_linger else 0)

    def _receive(self) -> Frames:
        frames = self._intake.receive()
        self.peer_host = self.peer_host or sender_host(frames[0])
        return [frame.bytes for frame in frames]

    def _take_event(self, frames: Frames) -> None:
        event, value = struct.unpack("=Hi", frames[0])
        if self._is_broken:
            if event == CONNECTED:  # libzmq has reconnected before all received messages were read
                self._tcp.shut(value)
        elif event == CONNECTED:
            self._fd = value
            self._intake.watch(value)
            self._failure = _Failure.MISFIT
        elif event == HANDSHAKE_SUCCEEDED:
            self.is_made = True
            self._callbacks.on_made()
        elif event == HANDSHAKE_FAILED_AUTH:
            self._failure = _Failure.NOT_LISTED
        elif event == HANDSHAKE_FAILED_NO_DETAIL:
            self._failure = _Failure.HUNG_UP if value in PEER_HUNG_UP else _Failure.LATE
        elif event == DISCONNECTED:
            self._ended()
        elif event == CONNECT_RETRIED and not self.is_made:
            self._callbacks.on_unreached()

    def _ended(self) -> None:
        self._intake.forget(self._fd)
        if self.is_made:
            self.is_made = False
            self._is_broken = True
            self._inbox.take_soon()  # deliver messages received before the break first
        else:
            self._callbacks.on_failed(self._failure)

    def _tell_if_broken(self) -> None:
        if self._is_broken:
            self._callbacks.on_broken()


class ZmqConnection:
    """A connection to one listener, see `kvflow.ports.Connection` and `kvflow.ports.ControlChannel.connect`.

    A worker thread resolves a host name, again for each attempt, because it may lead to another host by now. If it has
    several addresses, or the endpoint several hosts, they are tried in turn, until one is reached. libzmq would try
    only one.

    If the listener may have any of several keys, each is tried in turn. Messages sent while disconnected are queued in
    this object.
    """

    def __init__(
        self,
        endpoint: str,
        on_message: Callable[[Sequence[bytes]], None],
        on_lost: Callable[[], None],
        *,
        keys: ClientKeys | None = None,
        on_refused: OnRefused = ignore,
        on_obstacle: OnObstacle = ignore,
    ) -> None:
        self._host, self._port = split_address("endpoint", endpoint)
        self._endpoint = endpoint
        self._name = new_name()
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._callbacks = _Callbacks(
            on_message,
            self._made,
            self._failed,
            self._unreached,
            self._broken,
            self._dropped,
        )
        self._keys = keys
        self._server = ""
        self._num_misfits = 0
        self._line: _DialedSocket | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._resolving: asyncio.Future[list[str]] | None = None
        self._num_addresses = 1
        self._num_unreached = 0
        self._timer: asyncio.TimerHandle | None = None
        self._on_obstacle = on_obstacle
        self._found: Diagnosis | None = None
        self._diagnosing: asyncio.Task[None] | None = None
        self._diagnosis_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._diagnose_later(DIAGNOSE_AFTER_S)
        try:
            self._begin()
        except zmq.ZMQError as error:
            self._stop_diagnosing()
            check_shortage(error.errno)
            raise ConfigError("address cannot be used", endpoint=endpoint, detail=str(error)) from error

    def send(self, payload: bytes) -> None:
        """Queue a message, even while disconnected, see `kvflow.ports.Connection.send`."""
        if self._is_closed:
            raise Unreachable("connection is closed", endpoint=self._endpoint)
        if self._line is not None and self._line.is_made:
            self._line.send(payload)
            return
        if len(self._early) >= QUEUE_MESSAGES or self._early_bytes > MAX_WAITING_BYTES:
            raise Unreachable("queue to the peer is full", endpoint=self._endpoint)
        self._early.append(payload)
        self._early_bytes += len(payload)

    @property
    def peer_host(self) -> str:
        """The host that the latest message has come from, see `kvflow.ports.Connection.peer_host`."""
        return "" if self._line is None else self._line.peer_host

    def renew(self, keys: ClientKeys) -> None:
        """Use these keys from now on, see `kvflow.ports.Connection.renew`."""
        if self._keys is None or self._is_closed:
            return
        is_good = keys.trust.secret == self._keys.trust.secret and self._server in keys.servers
        self._keys = keys
        if is_good:
            return
        was_made = self._line is not None and self._line.is_made
        self._server = ""
        self._redial()
        if was_made:
            self._on_lost()

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        self._stop_diagnosing()
        self._hang_up()

    # Callbacks of the line -------------------------------------------------------------------------------------------

    def _made(self) -> None:
        self._num_misfits = 0
        self._stop_diagnosing()
        self._tell_obstacle(Diagnosis(""))
        early, self._early, self._early_bytes = self._early, [], 0
        with suppress(Unreachable):  # it is broken again, or full; the rest is lost, as after any break
            for payload in early:
                self.send(payload)

    def _failed(self, failure: _Failure) -> None:
        if failure is _Failure.NOT_LISTED:
            own = "" if self._keys is None else short(self._keys.trust.public)
            self._refuse(f"key {own} of this process is not listed in `peers` there")
        elif failure is _Failure.MISFIT:
            self._redial_later(RECONNECT_MAX_MS)
            if self._found is not None and self._found.is_refusal:
                self._on_refused(self._found.detail)
            elif self._found is None or not self._found.detail:
                self._diagnose_later(0.0)
        elif failure is _Failure.HUNG_UP and self._keys is not None:
            self._try_next_key(self._keys)

    def _unreached(self) -> None:
        """Try the next address of the name; look it up again after a pause when all were tried."""
        self._num_unreached += 1
        if self._timer is None:
            self._redial_later(RECONNECT_MAX_MS if self._num_unreached % self._num_addresses == 0 else 0.0)

    def _broken(self) -> None:
        self._hang_up()
        self._diagnose_later(DIAGNOSE_AFTER_S)
        self._redial_later(RECONNECT_MS)
        self._on_lost()

    def _dropped(self, kind: str, why: str) -> None:
        if kind == "message_rejected":
            self._loop.call_soon(self._mistaken)  # the line is still reading
        else:
            self._on_refused(f"connection was dropped: {why}")

    def _mistaken(self) -> None:
        """Find out what answers there: libzmq takes the answer of an HTTP server for a message of an old ZMTP."""
        if self._is_closed:
            return
        if self._line is not None:
            self._broken()
        self._diagnose_later(0.0)
        self._redial_later(RECONNECT_MAX_MS)

    # Obstacles -------------------------------------------------------------------------------------------------------

    def _diagnose_later(self, delay_s: float) -> None:
        if self._diagnosis_timer is not None:
            self._diagnosis_timer.cancel()
        self._diagnosis_timer = self._loop.call_later(delay_s, self._start_diagnosing)

    def _start_diagnosing(self) -> None:
        self._diagnose_later(DIAGNOSE_AGAIN_S)
        if self._diagnosing is None and (self._keys is None or self._keys.servers):
            self._diagnosing = self._loop.create_task(self._diagnose())

    async def _diagnose(self) -> None:
        found = await diagnose(self._endpoint, is_encrypted=self._keys is not None)
        descriptors.refill()
        self._diagnosing = None
        if self._line is not None and self._line.is_made:
            return
        self._tell_obstacle(found)

    def _stop_diagnosing(self) -> None:
        descriptors.refill()
        if self._diagnosis_timer is not None:
            self._diagnosis_timer.cancel()
        if self._diagnosing is not None:
            self._diagnosing.cancel()
            self._diagnosing = None

    def _tell_obstacle(self, found: Diagnosis) -> None:
        is_news, self._found = found != self._found, found
        if is_news and found.is_refusal:
            self._on_refused(found.detail)
        elif is_news:
            self._on_obstacle(found.detail, found.is_short)

    # Attempts --------------------------------------------------------------------------------------------------------

    def _try_next_key(self, keys: ClientKeys) -> None:
        """Try the next key. A listener hangs up if its key is not the one that was tried.

        A listener that is shutting down hangs up, too, so each key is tried twice.
        """
        self._num_misfits += 1
        if self._num_misfits >= TRIES_OF_A_KEY * len(keys.servers):
            self._num_misfits = 0
            listed = ", ".join(map(short, keys.servers[:MAX_KEYS_SHOWN]))
            self._refuse(f"its key is not one of those that are listed for it here: {listed}")
        elif len(keys.servers) > 1:  # otherwise libzmq retries
            self._redial()

    def _refuse(self, detail: str) -> None:
        """Report that the connection was rejected, and retry later, because lists of keys change."""
        self._redial_later(RECONNECT_MAX_MS)
        self._on_refused(detail)

    def _refuse_unlisted(self) -> None:
        if not self._is_closed and self._keys is not None and not self._keys.servers:
            self._refuse("no key is listed for it here")

    def _hang_up(self) -> None:
        """Close the connection, or cancel the attempt in progress."""
        self._resolving = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def _redial_later(self, delay_ms: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_ms / 1e3, self._redial)

    def _redial(self) -> None:
        """Start a new attempt, with the next key if there are several."""
        self._hang_up()
        try:
            self._begin()
        except (zmq.ZMQError, Shortage):
            self._redial_later(RECONNECT_MAX_MS)

    def _begin(self) -> None:
        """Start to connect, or to resolve the host name. Raises as `_dial`."""
        descriptors.draw(DESCRIPTORS)
        if self._keys is not None and not self._keys.servers:
            self._loop.call_soon(self._refuse_unlisted)
        elif is_number(self._host):
            self._dial(self._host)
        else:
            self._resolve()

    def _resolve(self) -> None:
        """Look up the addresses of the hosts in a thread. If there are none, retry later."""
        try:
            found = self._loop.run_in_executor(None, resolve_hosts, self._host)
        except RuntimeError:  # no thread could be started
            self._redial_later(RECONNECT_MAX_MS)
            return
        self._resolving = found
        found.add_done_callback(self._take_addresses)

    def _take_addresses(self, found: "asyncio.Future[list[str]]") -> None:
        is_unknown = found.cancelled() or found.exception() is not None
        if found is not self._resolving:  # the attempt was replaced, or the connection closed
            return
        if is_unknown:
            self._redial_later(RECONNECT_MAX_MS)
            return
        self._num_addresses = len(found.result())
        try:
            self._dial(found.result()[self._num_unreached % self._num_addresses])
        except (zmq.ZMQError, Shortage):
            self._redial_later(RECONNECT_MAX_MS)

    def _dial(self, host: str) -> None:
        """Start to connect.

        Raises:
            Shortage: This process has no descriptors left.
            zmq.ZMQError: libzmq rejects the address, or has no resources left.
        """
        made, monitor = self._make_sockets()
        made.setsockopt(zmq.IPV6, int(":" in host))
        introduce(made, self._name)
        if self._keys is not None:
            self._server = self._keys.after(self._server)
            be_client(made, self._keys.trust, self._server)
        endpoint = join_address(host, self._port)
        self._line = _DialedSocket(made, monitor, endpoint, self._callbacks, is_encrypted=self._keys is not None)

    def _make_sockets(self) -> tuple[ZmqSocket, ZmqSocket]:
        with ExitStack() as stack:
            try:
                made = sockets.make(zmq.DEALER)
                stack.callback(made.close, 0)
                stack.callback(made.monitor, None, 0)
                monitor = sockets.make_monitor(made, EVENTS | (0 if is_number(self._host) else CONNECT_RETRIED))
            except zmq.ZMQError as error:
                check_shortage(error.errno)
                raise
            stack.pop_all()
        return made, monitor
