"""First stage: two ranks get to know each other, once. This is the prefill side; `greeting` is the decode side.

A prefill rank checks what a decode rank asks for in its hello, connects its transport, and welcomes or refuses it.
Afterwards it holds the line over which the two talk.
"""

from collections.abc import Callable

import anyio
import anyio.to_thread
from msgspec.structs import replace

from kvflow.backends.base import Backend
from kvflow.errors import FailureReason, KvflowError, RemoteProtocolError, RouteError, Stage, Unreachable
from kvflow.geometry.blocks import RouteBlocks
from kvflow.geometry.cutting import cutting_of
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.routes import BoundRoute, bind_route
from kvflow.stages.context import StageContext
from kvflow.stages.planning import PeerGeometry
from kvflow.stages.staging import LocalStaging
from kvflow.stages.submit import agent_name
from kvflow.state.events import PeerGreeted, PeerLeft
from kvflow.wire.channel import Listener
from kvflow.wire.codec import decode_frames, encode
from kvflow.wire.messages import (
    LAYERS_SINCE,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Goodbye,
    Hello,
    Message,
    PeerId,
    Refuse,
    Welcome,
)

__all__ = ["PrefillBootstrap"]

HELLOS_AT_ONCE = 16
"""Handshakes that a prefill rank works on at the same time; the rest wait."""


class PrefillBootstrap:
    """The prefill side: answers hellos, and holds one line to each greeted decode rank.

    Args:
        context: Of this rank.
        layout: Of this rank.
        backend: Connected to each decode rank that fits.
        listener: The control socket.
        on_message: Takes every other message of a greeted peer.
        staging: Where packed pieces are gathered; nothing is packed if None.
    """

    def __init__(
        self,
        context: StageContext,
        layout: KVLayout,
        backend: Backend,
        listener: Listener,
        on_message: Callable[[PeerId, Message], None],
        *,
        staging: LocalStaging | None = None,
    ) -> None:
        self._staging = staging
        self._context = context
        self._layout = layout
        self._backend = backend
        self._listener = listener
        self._on_message = on_message
        self._peers: dict[bytes, PeerId] = {}
        self._lines: dict[PeerId, bytes] = {}
        self._geometry: dict[PeerId, PeerGeometry] = {}
        self._slots = anyio.CapacityLimiter(HELLOS_AT_ONCE)
        self._attempts: dict[PeerId, int] = {}
        self._partings: dict[str, anyio.Event] = {}

    def geometry(self, peer: PeerId) -> PeerGeometry | None:
        """What a decode rank wants and where; None if it is not known."""
        return self._geometry.get(peer)

    async def run(self) -> None:
        """Take messages from everybody, for ever."""
        while True:
            connection, frames = await self._listener.receive()
            try:
                self._take(connection, decode_frames(frames))
            except RemoteProtocolError as error:
                self._reject(connection, error)

    def send(self, peer: PeerId, message: Message) -> None:
        """Send to a greeted peer. What cannot be delivered is lost: the line comes back, or the lease ends."""
        line = self._lines.get(peer)
        if line is None:
            return
        try:
            self._listener.send(line, encode(message))
        except Unreachable as error:
            self._context.oddities.count("message_lost", peer, stage=Stage.BOOTSTRAP.value, detail=str(error))

    def forget(self, peer: PeerId) -> None:
        """Drop what is held for a peer that has left."""
        line = self._lines.pop(peer, None)
        if line is not None:
            self._peers.pop(line, None)
        self._geometry.pop(peer, None)
        self._attempts.pop(peer, None)
        parted = self._partings[agent_name(peer)] = anyio.Event()
        self._context.start_task(self._part, agent_name(peer), parted)

    async def _part(self, agent: str, parted: anyio.Event) -> None:
        try:
            await self._backend.disconnect(agent)
        finally:
            parted.set()
            if self._partings.get(agent) is parted:
                del self._partings[agent]

    async def _connect(self, agent: str, metadata: bytes) -> None:
        """Connect the transport, but not before it has parted with the agent if it is about to."""
        while agent in self._partings:
            await self._partings[agent].wait()
        await self._backend.connect(agent, metadata)

    def _take(self, connection: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._context.start_task(self._answer, connection, message)
            return
        peer = self._peers.get(connection)
        if peer is not None:
            self._on_message(peer, message)
        elif not isinstance(message, (Refuse, Goodbye)):
            self._refuse(connection, None, "say hello first")

    async def _answer(self, connection: bytes, hello: Hello) -> None:
        async with self._slots:
            began = self._context.now()
            try:
                route = self.check(hello)
                self._part_if_changed(hello)
                if route.legs:
                    await self._connect(agent_name(hello.peer), hello.backend_metadata)
            except KvflowError as error:
                self._context.oddities.count(
                    "hello_refused", hello.peer, stage=Stage.BOOTSTRAP.value, detail=str(error)
                )
                self._refuse(connection, hello.peer, str(error))
                return
            self._context.times.add(Stage.BOOTSTRAP, self._context.now() - began)
            self.admit(connection, hello, route)

    def _part_if_changed(self, hello: Hello) -> None:
        """Part with a decode rank that wants other cells than before: what it was promised cannot be kept any more."""
        known = self._geometry.get(hello.peer)
        if known is None or hello.attempt < self._attempts.get(hello.peer, 0):
            return
        if known.pieces != hello.route.pieces or known.layout != hello.layout:
            detail = f"{hello.peer.rank} wants other cells than before"
            failure = self._context.failure(FailureReason.PEER_LOST, Stage.BOOTSTRAP, detail)
            self._context.dispatch(PeerLeft(hello.peer, failure))

    def check(self, hello: Hello) -> BoundRoute:
        """See whether the sender of a hello fits.

        Raises:
            RouteError: Why it does not.
        """
        if hello.to != self._context.me:
            raise RouteError("hello is for another rank or another life of it", to=str(hello.to))
        mine = (OLDEST_VERSION, PROTOCOL_VERSION)
        if hello.versions[0] > mine[1] or hello.versions[1] < mine[0] or hello.versions[0] > hello.versions[1]:
            raise RouteError("no protocol version in common", theirs=hello.versions, mine=mine)
        if hello.backend != self._backend.name:
            raise RouteError("transports differ", theirs=hello.backend, mine=self._backend.name)
        if hello.layout.fingerprint != self._layout.fingerprint:
            raise RouteError(
                "model fingerprints differ", theirs=hello.layout.fingerprint, mine=self._layout.fingerprint
            )
        return bind_route(hello.route, self._layout, hello.layout)

    def admit(self, connection: bytes, hello: Hello, route: BoundRoute) -> None:
        """Take the sender of a hello on, once the transport can write to it."""
        if hello.attempt < self._attempts.get(hello.peer, 0):
            return  # the line it came over is given up
        self._part_if_changed(hello)
        self._attempts[hello.peer] = hello.attempt
        former = self._lines.get(hello.peer)
        if former is not None:
            self._peers.pop(former, None)
        self._peers[connection] = hello.peer
        self._lines[hello.peer] = connection
        blocks = RouteBlocks.of(route) if self._backend.capabilities.takes_blocks else None
        geometry = PeerGeometry(route, hello.layout, hello.route.pieces, blocks=blocks)
        limits = self._context.config.limits
        version = min(PROTOCOL_VERSION, hello.versions[1])
        layer_piece_bytes = limits.bytes_per_layer_piece if version >= LAYERS_SINCE else None
        cutting = cutting_of(route, self._layout, hello.layout, limits.bytes_per_post, layer_piece_bytes)
        if self._staging is not None and hello.staging is not None:
            geometry = replace(geometry, staging=hello.staging, packed=self._staging.find(hello.route.pieces))
            cutting = self._staging.cut(cutting, route, hello.staging)
        self._geometry[hello.peer] = geometry
        greeted = PeerGreeted(hello.peer, hello.lease_s, tuple(route.debts), cutting, geometry.staging)
        self._context.dispatch(greeted)
        self.send(hello.peer, Welcome(peer=self._context.me, version=version))

    def _refuse(self, connection: bytes, to: PeerId | None, detail: str) -> None:
        try:
            self._listener.send(connection, encode(Refuse(peer=self._context.me, to=to, detail=detail)))
        except Unreachable:
            self._context.log.info("refusal_undeliverable", stage=Stage.BOOTSTRAP.value, connection=connection.hex())

    def _reject(self, connection: bytes, error: RemoteProtocolError) -> None:
        self._context.oddities.count(
            "message_rejected",
            self._peers.get(connection),
            stage=Stage.BOOTSTRAP.value,
            connection=connection.hex(),
            detail=str(error),
        )
