"""The control channel in virtual time: its connections behave, and break, like those of ZMQ over TCP.

A dialer connects in the background, and reconnects after a break; messages that it sends meanwhile wait. A listener
identifies a connection by the name that its dialer chose, and refuses to send over a connection that is gone. A cut
link delays messages, as TCP does, until the heartbeats of both ends time out. When a process ends, its operating system
closes its connections, unless its host is gone too.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import anyio

from kvflow.addresses import join_address, split_address, split_bind
from kvflow.errors import ConfigError, RemoteProtocolError, Shortage, Unreachable
from kvflow.ports import OnKindRefused, OnObstacle, OnRefused, ignore
from kvflow.trust import PLAIN, ClientKeys, Trust
from kvflow.wire.codec import decode
from kvflow.wire.messages import Hello, Welcome
from simulation.loop import Process
from simulation.story import tell_message

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["HEARTBEAT_S", "Network", "SimulatedChannel"]

QUICK_S: Final = 0.001
SLOW_S: Final = 0.5
LATE_S: Final = 0.2
RECONNECT_S: Final = 0.1
HEARTBEAT_S: Final = 1.5
"""Silence after which an end gives a connection up."""

QUEUE_MESSAGES: Final = 10_000
LINGER: Final = 0.5
"""Chance that messages sent by a process before it died still arrive."""

FIRST_PORT: Final = 20_000
HANDSHAKE_TAGS: Final = (b"\xa5hello", b"\xa7welcome")
"""Tags with which the messages of a handshake begin, after the header and the name of the tag field."""

DIRECTORY_TAGS: Final = (b"\xa8register", b"\xaaunregister", b"\xa6lookup")
"""The same for messages to a directory."""

GRANT_TAG: Final = b"\xa5grant"
TAG_END: Final = 32

Hold = Callable[[Process, Process, bytes, Callable[[], None]], bool]


class Session:
    """One established connection between a dialer and a listener.

    Attributes:
        is_up: It is not broken.
        is_ending: One end has closed it; messages that this end had sent still arrive, even if its process ends.
        swallows: Whether messages are lost, towards the listener and towards the dialer.
        is_ordered: It goes to a directory, and never loses, repeats or reorders messages, whatever the faults.
        latest: When the last message arrives, each way.
        stuck: Messages held up by a cut link, each way.
    """

    __slots__ = ("dialer", "is_ending", "is_ordered", "is_up", "latest", "lingers", "listener", "stuck", "swallows")

    def __init__(self, dialer: "Dialer", listener: "SimulatedListener") -> None:
        self.dialer = dialer
        self.listener = listener
        self.is_up = True
        self.is_ending = False
        self.is_ordered = False
        self.lingers = False
        self.swallows = [False, False]
        self.latest = [0.0, 0.0]
        self.stuck: tuple[deque[bytes], deque[bytes]] = (deque(), deque())

    def ends(self, way: int) -> tuple[Process, Process]:
        """Return source and target of messages towards the listener (0) or the dialer (1)."""
        if way == 0:
            return self.dialer.process, self.listener.process
        return self.listener.process, self.dialer.process


class Dialer:
    """The connecting end; keeps the contract of `kvflow.ports.Connection`."""

    def __init__(
        self,
        network: "Network",
        process: Process,
        endpoint: str,
        callbacks: tuple[Callable[[Sequence[bytes]], None], Callable[[], None]],
        name: bytes,
    ) -> None:
        self.process = process
        self.endpoint = endpoint
        self.on_message, self.on_lost = callbacks
        self.name = name
        self.session: Session | None = None
        self.is_closed = False
        self.waiting: deque[bytes] = deque()
        self._network = network

    @property
    def peer_host(self) -> str:
        """Nothing: endpoints have no names here."""
        return ""

    def send(self, payload: bytes) -> None:
        """Send a message, as the port specifies."""
        if self.is_closed or not self.process.is_alive:
            return
        if self._network.is_queue_full() or len(self.waiting) >= QUEUE_MESSAGES:
            raise Unreachable("queue to the peer is full", endpoint=self.endpoint)
        if self.session is None:
            self.waiting.append(payload)
        else:
            self._network.transmit(self.session, 0, payload)

    def renew(self, keys: ClientKeys) -> None:
        """Do nothing: there are no keys here."""

    def close(self) -> None:
        """Close the connection, as the port specifies."""
        if not self.is_closed:
            self.is_closed = True
            self._network.dialer_closed(self)

    def deliver(self, payload: bytes) -> None:
        """Receive a message, in the process."""
        if not self.is_closed:
            self.on_message([payload])

    def lost(self) -> None:
        """Receive the news of a break, in the process."""
        if not self.is_closed:
            self.on_lost()


class SimulatedListener:
    """The bound end; keeps the contract of `kvflow.ports.Listener`."""

    def __init__(
        self,
        network: "Network",
        process: Process,
        endpoint: str,
        on_message: Callable[[bytes, Sequence[bytes]], None],
    ) -> None:
        self.process = process
        self.endpoint = endpoint
        self.on_message = on_message
        self.sessions: dict[bytes, Session] = {}
        self.is_closed = False
        self._network = network

    def send(self, connection: bytes, payload: bytes) -> None:
        """Send a message, as the port specifies."""
        if self.is_closed or not self.process.is_alive:
            return
        session = self.sessions.get(connection)
        if session is None:
            raise Unreachable("peer is not connected", connection=connection.hex())
        if self._network.is_queue_full():
            raise Unreachable("queue to the peer is full", connection=connection.hex())
        self._network.transmit(session, 1, payload)

    def names_of(self, connection: bytes) -> tuple[str, ...]:
        """Return the wildcard: there are no keys here."""
        return ("*",)

    def host_of(self, connection: bytes) -> str:
        """Return nothing: hosts have no addresses here."""
        return ""

    def renew(self, trust: Trust) -> None:
        """Do nothing: there are no keys here."""

    def close(self, *, keep_port: bool = False) -> None:
        """Close the listener, as the port specifies."""
        if not self.is_closed:
            self.is_closed = True
            self._network.listener_closed(self, keep_port=keep_port)

    def deliver(self, name: bytes, payload: bytes) -> None:
        """Receive a message, in the process."""
        if self.is_closed:
            return
        try:
            self.on_message(name, [payload])
        except RemoteProtocolError:
            self._network.break_session(self.sessions[name])


class Network:
    """Carries messages between processes.

    Args:
        world: Source of time, chance and faults.

    Attributes:
        hold: If set, called with each message's source, target, payload and delivery callback; returns whether to hold
            it.
        on_hello: If set, called with each hello that is sent.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._loop = world.loop
        self._rng: random.Random = world.rng
        self._listeners: dict[str, SimulatedListener] = {}
        self._kept_ports: dict[str, Process] = {}
        self._hosts: dict[str, str] = {}
        self._absent_hosts: dict[str, None] = {}
        self._dialers: list[Dialer] = []
        self._sessions: list[Session] = []
        self._cut: dict[tuple[str, str], float] = {}
        self._num_names = 0
        self._next_port = FIRST_PORT
        self.hold: Hold | None = None
        self.on_hello: Callable[[Hello], None] | None = None

    # What a channel calls ----------------------------------------------------------------------------------------

    def listen(
        self, process: Process, bind: str, advertise: str | None, on_message: Callable[[bytes, Sequence[bytes]], None]
    ) -> SimulatedListener:
        """Bind a socket for a process; arguments as in the port."""
        host, allowed = split_bind(bind)
        if 0 in allowed:
            self._next_port += 1
            allowed = range(self._next_port, self._next_port + 1)
        endpoints = [join_address(advertise or host, port) for port in allowed]
        taken = self._listeners.keys() | self._kept_ports
        endpoint = next((one for one in endpoints if one not in taken), None)
        if endpoint is None:
            raise ConfigError("address cannot be bound", bind=bind, detail="address is in use")
        listener = SimulatedListener(self, process, endpoint, on_message)
        self._listeners[endpoint] = listener
        self._hosts[endpoint] = process.host
        self._absent_hosts.pop(process.host, None)
        self._wake_dialers()
        return listener

    def connect(
        self,
        process: Process,
        endpoint: str,
        on_message: Callable[[Sequence[bytes]], None],
        on_lost: Callable[[], None],
    ) -> Dialer:
        """Open a connection for a process; arguments as in the port."""
        split_address("endpoint", endpoint)
        if self._is_drawn(self._world.faults.connect_fails):
            self._world.count("no sockets left")
            raise Shortage("this process has no sockets left", endpoint=endpoint)
        self._num_names += 1
        dialer = Dialer(self, process, endpoint, (on_message, on_lost), b"k%d" % self._num_names)
        self._dialers.append(dialer)
        self._connect_soon(dialer, QUICK_S * self._world.pace)
        return dialer

    async def is_refused(self, process: Process, endpoint: str, timeout_s: float) -> bool:
        """Return whether a host refuses connections, as the port specifies. Only the host itself can refuse one."""
        await anyio.sleep(min(timeout_s, QUICK_S * (1 + self._rng.random())))
        host = self._hosts.get(endpoint)
        if host is None or host in self._absent_hosts or self.is_cut(process.host, host):
            await anyio.sleep(timeout_s)
            return False
        return endpoint not in self._listeners and endpoint not in self._kept_ports

    def is_queue_full(self) -> bool:
        """Draw whether a message meets a full queue."""
        if not self._is_drawn(self._world.faults.full_queue):
            return False
        self._world.count("full queue")
        return True

    # What goes wrong ---------------------------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from one host to another until `mend`."""
        self._cut[source, target] = self._loop.now
        for session in list(self._sessions):
            if session.is_up and (source, target) in self._hosts_of(session):
                self._watch_silence(session)

    def mend(self, source: str, target: str) -> None:
        """Let everything through again, including the messages held up."""
        self._cut.pop((source, target), None)
        for session in list(self._sessions):
            for way, ends in enumerate(self._hosts_of(session)):
                if ends == (source, target):
                    held = list(session.stuck[way])
                    session.stuck[way].clear()
                    for payload in held:
                        self._send_on(session, way, payload, QUICK_S)
        self._wake_dialers()

    def heal(self) -> None:
        """Mend every link. Half-open connections stay half-open until the heartbeats time out."""
        for source, target in list(self._cut):
            self.mend(source, target)

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether the link between two hosts is cut in either direction."""
        return (one, other) in self._cut or (other, one) in self._cut

    def sessions(self) -> list[Session]:
        """Return the connections that are up."""
        return [session for session in self._sessions if session.is_up and not session.dialer.is_closed]

    def swallow(self, session: Session) -> None:
        """Lose everything sent over a connection, silently, until the heartbeats time out."""
        session.swallows = [True, True]
        self._watch_silence(session)

    def break_session(self, session: Session, *, lingers: bool = False) -> None:
        """Reset a connection. Messages in flight are lost unless it lingers; the dialer reconnects."""
        if not session.is_up:
            return
        session.is_up = False
        session.lingers = lingers
        self._sessions.remove(session)
        dialer, listener = session.dialer, session.listener
        if listener.sessions.get(dialer.name) is session:
            del listener.sessions[dialer.name]
        if dialer.session is session:
            dialer.session = None
            if not dialer.is_closed and dialer.process.is_alive:
                dialer.process.call(dialer.lost)
                self._connect_soon(dialer, RECONNECT_S)

    def process_ended(self, process: Process) -> None:
        """Close the sockets of a dead process, as its operating system does, unless its host is gone too."""
        for listener in [one for one in self._listeners.values() if one.process is process]:
            del self._listeners[listener.endpoint]
            listener.is_closed = True
        for endpoint in [where for where, owner in self._kept_ports.items() if owner is process]:
            del self._kept_ports[endpoint]
        for dialer in [one for one in self._dialers if one.process is process]:
            dialer.is_closed = True
            self._dialers.remove(dialer)
        if process.has_vanished:
            self._absent_hosts[process.host] = None
        for session in list(self._sessions):
            if process not in session.ends(0) or (session.is_ending and not process.has_vanished):
                continue
            if process.has_vanished:
                self.swallow(session)
            else:
                self.break_session(session, lingers=self._rng.random() < LINGER)

    def process_stopped(self, process: Process) -> None:
        """Break the connections of a stopped process later, because it answers no heartbeats."""
        if process.is_stalling:
            for session in list(self._sessions):
                if process in session.ends(0):
                    self._watch_silence(session)

    # How messages go ---------------------------------------------------------------------------------------------

    def transmit(self, session: Session, way: int, payload: bytes) -> None:
        """Send a message over an established connection."""
        faults, rng, world = self._world.faults, self._rng, self._world
        session.is_ordered |= any(tag in payload[:TAG_END] for tag in DIRECTORY_TAGS)
        is_handshake = payload[:TAG_END].find(HANDSHAKE_TAGS[way]) >= 0
        if is_handshake:
            self._look_at_handshake(session, payload)
        if self.hold is not None:
            source, target = session.ends(way)
            if self.hold(source, target, payload, lambda: self._send_on(session, way, payload, 0.0)):
                return
        if session.swallows[way]:
            return
        is_lossy = not session.is_ordered
        if is_lossy and faults.drop and rng.random() < faults.drop:
            world.count("lost message")
            return
        if is_lossy and faults.duplicate and rng.random() < faults.duplicate:
            world.count("duplicate message")
            self._send_on(session, way, payload, self._delay_s())
        self._send_on(session, way, payload, self._delay_s())

    def _look_at_handshake(self, session: Session, payload: bytes) -> None:
        message = decode(payload)
        if isinstance(message, Hello) and self.on_hello is not None:
            self.on_hello(message)
        if isinstance(message, (Hello, Welcome)) and self._is_drawn(self._world.faults.handshake_reset):
            self._world.count("reset handshake")
            self._loop.call_in(2 * QUICK_S * self._rng.random(), self.break_session, session)

    def _delay_s(self) -> float:
        faults, rng = self._world.faults, self._rng
        if faults.delay and rng.random() < faults.delay:
            self._world.count("delayed message")
            return SLOW_S * rng.random()
        return QUICK_S * self._world.pace * rng.random()

    def _send_on(self, session: Session, way: int, payload: bytes, delay_s: float) -> None:
        faults, rng, loop = self._world.faults, self._rng, self._loop
        at = loop.now + delay_s
        if not session.is_ordered and faults.reorder and rng.random() < faults.reorder:
            self._world.count("reordered message")
            at += LATE_S * rng.random()
        elif faults.late_grant and GRANT_TAG in payload[:TAG_END] and rng.random() < faults.late_grant:
            self._world.count("late grant")
            at += LATE_S * rng.random()
        else:
            at = session.latest[way] = max(at, session.latest[way])
        loop.call_in(at - loop.now, self._arrive, session, way, payload)

    def _arrive(self, session: Session, way: int, payload: bytes) -> None:
        if session.swallows[way] or not (session.is_up or session.lingers):
            return
        source, target = session.ends(way)
        if self._cut and session.is_up and (source.host, target.host) in self._cut:
            session.stuck[way].append(payload)
            return
        if self._world.story is not None:
            words = tell_message(payload)
            if words is not None:
                self._world.tell(f"{target} hears {words} from {source}")
        if way == 0:
            target.call(session.listener.deliver, session.dialer.name, payload)
        else:
            target.call(session.dialer.deliver, payload)

    # How connections come and go ---------------------------------------------------------------------------------

    def _connect_soon(self, dialer: Dialer, within_s: float) -> None:
        self._loop.call_in(within_s * self._rng.random(), self._connect, dialer)

    def _wake_dialers(self) -> None:
        for dialer in self._dialers:
            if dialer.session is None and not dialer.is_closed:
                self._connect_soon(dialer, RECONNECT_S)

    def _connect(self, dialer: Dialer) -> None:
        """Connect if a listener is bound there; otherwise, binding one triggers the next attempt."""
        listener = self._listeners.get(dialer.endpoint)
        if dialer.is_closed or dialer.session is not None or listener is None:
            return
        if self.is_cut(dialer.process.host, listener.process.host):
            return
        session = Session(dialer, listener)
        before = listener.sessions.get(dialer.name)
        listener.sessions[dialer.name] = session
        if before is not None:
            self.break_session(before)
        dialer.session = session
        self._sessions.append(session)
        waiting, dialer.waiting = dialer.waiting, deque()
        for payload in waiting:
            self.transmit(session, 0, payload)
        if any(process.is_stalling for process in session.ends(0)):
            self._watch_silence(session)

    def dialer_closed(self, dialer: Dialer) -> None:
        """Deliver the messages already sent, then end the connection."""
        self._dialers.remove(dialer)
        if dialer.session is not None:
            self._end_session(dialer.session, 0)

    def listener_closed(self, listener: SimulatedListener, *, keep_port: bool) -> None:
        """Deliver the messages already sent, then end the connections. No dialer can connect any more."""
        if self._listeners.get(listener.endpoint) is listener:
            del self._listeners[listener.endpoint]
            if keep_port and listener.process.is_alive:
                self._kept_ports[listener.endpoint] = listener.process
        for session in list(listener.sessions.values()):
            self._end_session(session, 1)

    def _end_session(self, session: Session, way: int) -> None:
        session.is_ending = True
        lasts_s = max(0.0, session.latest[way] - self._loop.now) + QUICK_S
        self._loop.call_in(lasts_s, lambda: self.break_session(session, lingers=True))

    def _watch_silence(self, session: Session) -> None:
        """Break a connection after the heartbeat timeout if its ends are still cut off from each other."""
        self._loop.call_in(HEARTBEAT_S, self._check_silence, session, self._loop.now)

    def _check_silence(self, session: Session, since: float) -> None:
        is_cut = any(self._cut.get(link, self._loop.now) <= since for link in self._hosts_of(session))
        is_stopped = any(process.is_stalling for process in session.ends(0))
        if is_cut or is_stopped or any(session.swallows):
            self.break_session(session)

    def _hosts_of(self, session: Session) -> tuple[tuple[str, str], tuple[str, str]]:
        dialer, listener = session.dialer.process.host, session.listener.process.host
        return (dialer, listener), (listener, dialer)

    def _is_drawn(self, chance: float) -> bool:
        return bool(chance) and self._rng.random() < chance


class SimulatedChannel:
    """The control channel of one process; keeps the contract of `kvflow.ports.ControlChannel`.

    Args:
        network: Carries the messages.
        process: The process.
    """

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def reserve(self) -> None:
        """Do nothing: processes lack no resources here."""

    def listen(
        self,
        bind: str,
        advertise: str | None,
        on_message: Callable[[bytes, Sequence[bytes]], None],
        *,
        trust: Trust = PLAIN,
        on_refused: OnKindRefused = ignore,
    ) -> SimulatedListener:
        """Bind a socket, as the port specifies."""
        return self._network.listen(self._process, bind, advertise, on_message)

    def connect(
        self,
        endpoint: str,
        on_message: Callable[[Sequence[bytes]], None],
        on_lost: Callable[[], None],
        *,
        keys: ClientKeys | None = None,
        on_refused: OnRefused = ignore,
        on_obstacle: OnObstacle = ignore,
    ) -> Dialer:
        """Open a connection, as the port specifies."""
        return self._network.connect(self._process, endpoint, on_message, on_lost)

    async def host_towards(self, endpoint: str) -> str | None:
        """Return None: hosts have no addresses here."""
        return None

    async def is_refused(self, endpoint: str, timeout_s: float) -> bool:
        """Return whether an endpoint refuses connections, as the port specifies."""
        return await self._network.is_refused(self._process, endpoint, timeout_s)
