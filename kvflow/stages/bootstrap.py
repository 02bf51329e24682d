"""First stage: connects two ranks, once.

The cores perform the handshake. A prefill rank binds the route that a decode rank requests, and connects its transport.
A decode rank compiles routes from the records of an instance, keeps a connection to each prefill rank, and probes
silent prefill ranks.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import anyio
from msgspec.structs import replace

from kvflow.addresses import check_needs_trust
from kvflow.backends.base import Backend
from kvflow.errors import BackendError, ConfigError, KvflowError, RemoteProtocolError, Shortage, Stage, Unreachable
from kvflow.gate.hellos import HELLOS_AT_ONCE, MAX_CONNECT_S, UnclosedAgents, agent_denial
from kvflow.geometry.binding import bind_route
from kvflow.geometry.blocks import RouteBlocks
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pack import PackedSlices, is_head_major
from kvflow.geometry.routes import compile_routes
from kvflow.packing.staging import LocalStaging
from kvflow.ports import Connection
from kvflow.stages.context import PeerAgents, StageContext, agent_name
from kvflow.stages.planning import PreparedRoute
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.packing import link_for
from kvflow.state.settings import PrefillSettings
from kvflow.trust import Trust
from kvflow.wire.codec import Reader, encode
from kvflow.wire.messages import (
    Drained,
    Failed,
    Goodbye,
    Hello,
    Message,
    Notice,
    OfferAnswered,
    PagesQuery,
    PeerId,
    Ping,
    Pong,
    Refuse,
    SlotQuery,
    Welcome,
)

__all__ = ["HelloChecks", "PeerConnections", "PeerProofs", "RouteCompiler"]

SLICES_BOUND_INLINE: Final = 256
"""Routes with more slices than this are bound in a worker thread."""


ADDRESS_PROBE_S: Final = 1.0
"""How long the hosts of an address may take to refuse connections: no longer than a lookup keeps its place."""


# On a prefill rank -------------------------------------------------------------------------------------------------


class HelloChecks:
    """Checks Hellos against this rank's layout, and connects the transport to their senders.

    `principal_of` returns the principal of a connection. Without `staging`, nothing is packed.
    """

    def __init__(
        self,
        context: StageContext[ev.PrefillEvent],
        settings: PrefillSettings,
        backend: Backend,
        agents: PeerAgents,
        staging: LocalStaging | None,
        principal_of: Callable[[bytes], str],
    ) -> None:
        self._context = context
        self._settings = settings
        self._principal_of = principal_of
        self._backend = backend
        self._agents = agents
        self._staging = staging
        self._at_once: dict[str, anyio.CapacityLimiter] = {}  # by principal; bounded by the key lists
        self._disconnecting: dict[str, anyio.Event] = {}
        self._left = UnclosedAgents()

    def start(self, connection: bytes, hello: Hello) -> None:
        """Check a Hello in a task, which dispatches HelloChecked."""
        principal = self._principal_of(connection)
        if principal not in self._at_once:
            self._at_once[principal] = anyio.CapacityLimiter(HELLOS_AT_ONCE)
        self._context.start_task(self._check, connection, hello, principal)

    def disconnect(self, peer: PeerId) -> None:
        """Release the transport's resources for a peer, unless another peer shares its agent."""
        agent = self._agents.remove(peer)
        if agent is not None:
            self._left.note_gone(agent, peer.rank.instance)
            ended = self._disconnecting[agent] = anyio.Event()
            self._context.start_task(self._disconnect, agent, ended)

    async def _check(self, connection: bytes, hello: Hello, principal: str) -> None:
        async with self._at_once[principal]:
            began = self._context.now()
            try:
                if len(hello.route.slices) > SLICES_BOUND_INLINE:
                    link = await self._context.in_thread(lambda: self.bind(hello))
                else:
                    link = self.bind(hello)
                if link.route.copy_groups:
                    self._check_agent(hello)
                    agent = self._agents.add(hello.peer, hello.agent, hello.backend_metadata)
                    await self._connect(agent, hello, principal)
            except (KvflowError, MemoryError) as error:
                checked = ev.HelloChecked(connection, hello, None, str(error) or "out of memory")
            else:
                checked = ev.HelloChecked(connection, hello, link)
            self._context.times.stages[Stage.BOOTSTRAP].add(self._context.now() - began)
        self._context.dispatch(checked)

    def _check_agent(self, hello: Hello) -> None:
        """Raise RemoteProtocolError if a peer must not have the agent that it claims."""
        agent, shared = hello.agent or agent_name(hello.peer), self._backend.shared_agent
        is_ours = agent == shared and self._backend.is_shared_with(agent_name(hello.peer))
        own = [agent_name(self._context.me), *([shared] if shared else [])]
        denied = agent_denial(agent, own, is_ours=is_ours)
        denied = denied or self._left.denial(agent, hello.peer.rank.instance, self._backend.unclosed())
        if denied:
            raise RemoteProtocolError(denied, peer=str(hello.peer), agent=agent)

    def bind(self, hello: Hello) -> ev.PeerRoute:
        """Return how this rank sends what a decode rank requests. May be called in any thread.

        Raises:
            RouteError, PlanError: The two ranks are incompatible.
        """
        link = link_for(hello, self._settings)
        blocks = RouteBlocks.from_route(link.route) if self._backend.capabilities.takes_blocks else None
        packed: Mapping[str, PackedSlices] = {}
        if self._staging is not None and link.staging is not None:
            packed = self._staging.find(link.slices)
        return replace(link, prepared=PreparedRoute(blocks, packed, is_head_major(link.route)))

    async def _connect(self, agent: str, hello: Hello, principal: str) -> None:
        """Connect the transport to an agent, after any disconnection from it that is still in progress.

        Raises:
            BackendError: The transport cannot connect, or not in time.
        """
        timeout_s = min(hello.handshake_s, MAX_CONNECT_S)
        try:
            with anyio.fail_after(timeout_s):
                while agent in self._disconnecting:
                    await self._disconnecting[agent].wait()
                await self._backend.connect_authenticated(agent, hello.backend_metadata, principal)
        except TimeoutError as error:
            raise BackendError("transport of the peer does not answer", agent=agent, timeout_s=timeout_s) from error

    async def _disconnect(self, agent: str, ended: anyio.Event) -> None:
        try:
            await self._backend.disconnect(agent)
        finally:
            ended.set()
            if self._disconnecting.get(agent) is ended:
                del self._disconnecting[agent]


# On a decode rank --------------------------------------------------------------------------------------------------

Answer = Welcome | Refuse | Notice | PagesQuery | SlotQuery | Drained | Failed | OfferAnswered | Ping | Pong | Goodbye
"""Messages from prefill ranks."""

ANSWERS: Final[Reader[Answer]] = Reader(Answer)


class PeerConnections:
    """The connections of a decode rank to prefill ranks."""

    def __init__(self, context: StageContext[ev.DecodeEvent], trust: Trust) -> None:
        self._context = context
        self._trust = trust
        self._connections: dict[PeerId, Connection] = {}
        self._acks: list[tuple[PeerId, Message]] = []

    def connect(self, peer: PeerId, endpoint: str) -> None:
        """Open a connection, and dispatch its messages, its loss, and any failure to open it.

        The listener must have a key of the instance, so the source of the address need not be trusted.
        """
        dispatch = self._context.dispatch
        try:
            check_needs_trust("endpoint", endpoint, self._context.config.trust)
            self._connections[peer] = self._context.ports.control.connect(
                endpoint,
                functools.partial(self._handle_frames, peer),
                functools.partial(dispatch, ev.ConnectionLost(peer)),
                keys=self._trust.for_instance(peer.rank.instance),
                on_refused=lambda detail: dispatch(ev.ConnectionRefused(peer, detail)),
                on_obstacle=lambda *found: dispatch(ev.ConnectionObstructed(peer, *found)),
            )
        except (ConfigError, Shortage) as error:
            is_short = isinstance(error, Shortage)
            if is_short:
                self._context.anomalies.count("descriptor_shortage", peer, detail=str(error))
            dispatch(ev.ConnectFailed(peer, str(error), is_short))

    def renew(self, trust: Trust) -> None:
        """Use these keys from now on."""
        self._trust = trust
        for peer, connection in self._connections.items():
            if (keys := trust.for_instance(peer.rank.instance)) is not None:
                connection.renew(keys)

    def disconnect(self, peer: PeerId) -> None:
        """Close the connection to a peer."""
        self._send_acks()
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.close()

    def send(self, peer: PeerId, message: Message) -> None:
        """Send a message to a peer. If that fails, the core retransmits it if needed, or the lease expires."""
        if self._acks:
            self._send_acks()
        connection = self._connections.get(peer)
        if connection is None:
            return
        try:
            connection.send(encode(message))
        except Unreachable as error:
            self._context.anomalies.count("message_lost", peer, detail=str(error))

    def send_ack(self, peer: PeerId, message: Message) -> None:
        """Send an Ack on the next turn of the event loop, after the engine has handled the success."""
        if not self._acks:
            asyncio.get_running_loop().call_soon(self._send_acks)
        self._acks.append((peer, message))

    def close(self) -> None:
        """Close every connection."""
        self._send_acks()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _send_acks(self) -> None:
        acks, self._acks = self._acks, []
        for peer, message in acks:
            self.send(peer, message)

    def _handle_frames(self, peer: PeerId, frames: Sequence[bytes]) -> None:
        try:
            message = ANSWERS.read_frames(frames)
        except RemoteProtocolError as error:
            self._context.anomalies.count("message_rejected", peer, stage=Stage.BOOTSTRAP.value, detail=str(error))
        else:
            connection = self._connections.get(peer) if isinstance(message, Welcome | Refuse) else None
            host = "" if connection is None else connection.peer_host
            self._context.dispatch(ev.MessageReceived(peer, message, host))


class RouteCompiler:
    """Compiles the routes from the ranks of an instance to this rank."""

    def __init__(self, context: StageContext[ev.DecodeEvent], layout: KVLayout) -> None:
        self._context = context
        self._layout = layout
        self._at_once = anyio.CapacityLimiter(1)

    def start(self, effect: ef.CompileRoutes) -> None:
        """Compile in a worker thread, and dispatch RoutesCompiled."""
        self._context.start_task(self._compile, effect)

    async def _compile(self, effect: ef.CompileRoutes) -> None:
        async with self._at_once:
            began = self._context.now()
            try:
                routes = await self._context.in_thread(lambda: self.compile(effect))
            except (KvflowError, MemoryError) as error:
                compiled = ev.RoutesCompiled(effect.instance, effect.attempt, (), str(error) or "out of memory")
            else:
                compiled = ev.RoutesCompiled(effect.instance, effect.attempt, routes)
            self._context.times.stages[Stage.BOOTSTRAP].add(self._context.now() - began)
        self._context.dispatch(compiled)

    def compile(self, effect: ef.CompileRoutes) -> tuple[ev.RankRoute, ...]:
        """Return the routes from all ranks, in order. May be called in any thread.

        Raises:
            RouteError: The two sides are incompatible.
        """
        layouts = {record.peer.rank.engine_rank: record.layout for record in effect.records}
        routes = compile_routes(layouts, self._layout, decode_rank=self._context.me.rank.engine_rank)
        return tuple(
            ev.RankRoute(route, bind_route(route, record.layout, self._layout).expected)
            for record, route in zip(effect.records, routes, strict=True)
        )


class _LastBytesWait:
    """A wait for last bytes, and `ends`, read while it lasts, of connections over which none of them can come."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends: set[bytes] = set()
        self._listed: dict[PeerId, tuple[bytes, ...]] = {}

    def note(self, effect: ef.NoteEnds) -> None:
        """Take the ends that a rank lists, in place of those that it has listed before."""
        self._listed[effect.peer] = effect.ends
        self.ends.clear()
        self.ends.update(*self._listed.values())


class PeerProofs:
    """Finds out whether a silent prefill rank still exists, and waits until its writes can no longer land."""

    def __init__(self, context: StageContext[ev.DecodeEvent], backend: Backend) -> None:
        self._context = context
        self._backend = backend
        self._waits: dict[tuple[PeerId, int | None], _LastBytesWait] = {}

    def probe(self, effect: ef.ProbePeer) -> None:
        """Check whether the peer's host refuses connections to its port, and dispatch ProbeFinished."""
        self._context.start_task(self._probe, effect)

    def probe_address(self, effect: ef.ProbeAddress) -> None:
        """Check whether an address refuses connections, and dispatch AddressProbed."""
        self._context.start_task(self._probe_address, effect)

    def fence(self, effect: ef.WaitForFence) -> None:
        """Wait until no write of a peer can land any more, and dispatch PeerFenced, or FenceImpossible."""
        wait = self._waits[effect.peer, None] = _LastBytesWait(effect.number)
        self._context.start_task(self._fence, effect, wait)

    def await_landing(self, effect: ef.WaitForLanding) -> None:
        """Wait until nothing that the peer has in flight for a transfer can land, and dispatch Landed, if ever."""
        key = (effect.peer, effect.drained.generation)
        if key not in self._waits:
            wait = self._waits[key] = _LastBytesWait(effect.number)
            self._context.start_task(self._await_landing, effect, wait)

    def note_ends(self, effect: ef.NoteEnds) -> None:
        """Leave sound connections of a living rank out of the waits that had begun when it was asked for them."""
        for wait in self._waits.values():
            if wait.number <= effect.number:
                wait.note(effect)

    async def _await_landing(self, effect: ef.WaitForLanding, wait: _LastBytesWait) -> None:
        drained = effect.drained
        has_landed = await self._backend.outlast(drained.in_flight, wait.ends, is_alive=True)
        del self._waits[effect.peer, drained.generation]
        if has_landed:
            self._context.dispatch(ev.Landed(effect.peer, drained.room, drained.generation))

    async def _probe(self, effect: ef.ProbePeer) -> None:
        timeout_s = self._context.config.timeouts.lease_s
        is_gone = await self._context.ports.control.is_refused(effect.endpoint, timeout_s)
        self._context.dispatch(ev.ProbeFinished(effect.peer, is_gone))

    async def _probe_address(self, effect: ef.ProbeAddress) -> None:
        is_refused = await self._context.ports.control.is_refused(effect.instance.address, ADDRESS_PROBE_S)
        self._context.dispatch(ev.AddressProbed(effect.instance, effect.number, is_refused))

    async def _fence(self, effect: ef.WaitForFence, wait: _LastBytesWait) -> None:
        is_fenced = await self._backend.outlast(effect.domain, wait.ends)
        if self._waits.get((effect.peer, None)) is wait:  # else a later wait for the same peer has begun
            del self._waits[effect.peer, None]
        self._context.dispatch(ev.PeerFenced(effect.peer) if is_fenced else ev.FenceImpossible(effect.peer))
