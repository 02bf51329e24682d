"""A decode rank in virtual time."""

import itertools
import struct
from typing import TYPE_CHECKING

from kvflow.backends.base import BackendEvent
from kvflow.config import RankConfig
from kvflow.errors import FailureReason, PlanError, RemoteProtocolError, Stage
from kvflow.geometry.pages import pages_spanned
from kvflow.simulation.greeting import Greeting
from kvflow.simulation.host import Host
from kvflow.simulation.network import Line
from kvflow.simulation.requests import Receiving, Request
from kvflow.simulation.shapes import KV, STATE, CellTable, Shape
from kvflow.stages.digests import OwnMemory
from kvflow.stages.scatter import Scatter
from kvflow.stages.verify import _Comparison
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.staging import StagingArea
from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import Goodbye, Message, Notice, PeerId, Refuse, Welcome

if TYPE_CHECKING:
    from kvflow.simulation.world import World

__all__ = ["DecodeHost"]


PROBE_S = 0.1
VERIFYING_S = 0.05
SCATTERING_S = 0.005
SLOWLY_S = 0.5


class DecodeHost(Host):
    """One life of a decode rank. Arguments as in `Host`."""

    def __init__(self, world: "World", config: RankConfig, me: PeerId, table: CellTable) -> None:
        super().__init__(world, config, me, table)
        self._generations = itertools.count(1)
        self.lines: dict[PeerId, Line] = {}
        self.attempts = itertools.count()
        self.receiving: dict[int, Receiving] = {}
        self._greetings: dict[str, Greeting] = {}
        self._known: dict[PeerId, None] = {}
        self._probes: dict[PeerId, None] = {}
        self._scatter = Scatter(self.context, table.layout, self.backend.view, self.staging)
        self.shape: Shape = self.world.instances[self.me.rank.instance].shape

    # The engine ------------------------------------------------------------------------------------------------------

    def receive(self, request: Request, timeout_s: float | None = None) -> Receiving | None:
        """Start to receive a room; None if the pool has no pages left.

        Raises:
            LocalProtocolError, CapacityExceeded: It may not be received now.
        """
        layout = self.pool.table.layout
        tokens = (request.start, request.num_tokens)
        ranges = {KV: tokens}
        counts = {KV: pages_spanned(tokens, layout.component(KV).tokens_per_slot)}
        if STATE in self.pool.table.first_page and request.wants_state:
            ranges[STATE] = (0, 1)
            counts[STATE] = 1
        generation = next(self._generations)
        lease = self.pool.take(f"{request} generation {generation} on {self.me}", counts)
        if lease is None:
            return None
        timeout_s = self.config.timeouts.transfer_s if timeout_s is None else timeout_s
        now = self.world.schedule.now
        receiving = Receiving(request, self, lease, now, self.frozen_s, generation, timeout_s, ranges)
        wish = ev.ReceiveOpened(
            room=request.room,
            generation=generation,
            instance=request.prefill,
            ranges=ranges,
            pages={name: wire_pages(lease.pages[name]) for name in ranges},
            num_decode_ranks=request.num_decode_ranks,
            timeout_s=timeout_s,
            secret=self.world.rng.randbytes(16),
            footprint=self.footprint(lease),
            digest=request.digest,
            priority=request.priority,
        )
        self.receiving[generation] = receiving
        self.open_transfer(generation, receiving, wish)
        self.world.oracle.opened(receiving)
        return receiving

    def abort_room(self, receiving: Receiving) -> None:
        """Give a room up."""
        if receiving.decided_at is None and receiving.generation in self.transfers:
            detail = "the decode engine left the room before it was complete"
            self.dispatch(ev.ReceiveAborted(receiving.request.room, self.failure(FailureReason.ABORTED, detail)))

    # As in kvflow.decode ---------------------------------------------------------------------------------------------

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.GreetInstance(instance):
                self._greetings[instance] = Greeting(self, instance)
                self._greetings[instance].begin()
            case ef.VerifyDigests():
                self._verify(effect)
            case ef.ScatterStaged():
                self.world.schedule.after(self._scattering_s(), self.call, self._scatter_now, effect)
            case ef.ProbePeer(peer):
                self._probe(peer)
            case ef.ReportReceiver():
                if effect.handed is not None:
                    self.world.oracle.handed(self.receiving[effect.generation], effect)
                self._report(effect.generation, effect)

    def send(self, peer: PeerId, message: Message) -> None:
        """Send to a greeted peer."""
        line = self.lines.get(peer)
        if line is not None:
            self.world.network.to_server(line, encode(message))

    def _forget(self, peer: PeerId) -> None:
        self.forget_line(peer)

    def forget_line(self, peer: PeerId) -> None:
        """Close the line to a peer that has left."""
        line = self.lines.pop(peer, None)
        if line is not None:
            self.world.network.close(line)

    def line_to(self, peer: PeerId) -> Line:
        """The line to a rank, opened if there is none yet."""
        if peer not in self.lines:
            self.lines[peer] = self.world.network.dial(self, peer.rank, lambda data: self._take(peer, data))
        return self.lines[peer]

    def _verify(self, effect: ef.VerifyDigests) -> None:
        """Compare what has arrived with its digests, as a worker thread does; it may take its time."""
        memory = OwnMemory(self.pool.table.layout, self.backend.view)
        comparison = _Comparison(self.context, memory, effect)
        generation = effect.opened.generation
        delay_s = VERIFYING_S * self.world.rng.random()
        self.world.schedule.after(delay_s, self.call, self._verified, generation, comparison)

    def _verified(self, generation: int, comparison: _Comparison) -> None:
        receiving = self.receiving[generation]
        comparison.is_wanted = receiving.decided_at is None
        failure = comparison.run()
        if comparison.is_wanted:
            self.world.oracle.verified(receiving)
        self.dispatch(ev.DigestsVerified(generation, failure))

    def _scattering_s(self) -> float:
        rng = self.world.rng
        return SCATTERING_S * rng.random() if rng.random() < 0.8 else SLOWLY_S * rng.random()

    def _scatter_now(self, effect: ef.ScatterStaged) -> None:
        """Scatter, as a worker thread does, which may take its time."""
        receiving = self.receiving[effect.opened.generation]
        failure = None
        try:
            work = self._scatter.prepare(effect)
            self.world.oracle.scattered(receiving, work.slot.address)
            work.scatter(effect.notice.num_bytes)
        except PlanError as error:
            failure = self._scatter.failure(effect, error)
        self.dispatch(ev.Scattered(effect.opened.generation, effect.notice, failure))

    def _staging_area(self) -> StagingArea | None:
        if self.staging is None or self.world.staging is None:
            return None
        shape = self.world.staging
        return self.staging.area(slot_bytes=shape.slot_bytes, num_slots=shape.num_slots)

    def remember(self, peer: PeerId) -> None:
        """Note where a rank listens; whoever had that address before is gone."""
        before = [other for other in self._known if other.rank == peer.rank and other != peer]
        self._known[peer] = None
        for other in before:
            del self._known[other]
            self.dispatch(ev.PeerGone(other))

    def _probe(self, peer: PeerId) -> None:
        """Find out whether anybody listens where a silent peer did."""
        if peer in self._known and peer not in self._probes:
            self._probes[peer] = None
            self.world.schedule.after(PROBE_S * self.world.rng.random(), self.call, self._probed, peer)

    def _probed(self, peer: PeerId) -> None:
        del self._probes[peer]
        if self.world.network.refuses(self.me.rank, peer.rank):
            self.dispatch(ev.PeerGone(peer))

    def _take(self, peer: PeerId, data: bytes) -> None:
        """Take a message from a line, as `DecodeBootstrap._take` does."""
        try:
            message = decode(data)
        except RemoteProtocolError:
            self.context.oddities.count("message_rejected")
            return
        greeting = self._greetings.get(peer.rank.instance)
        if isinstance(message, (Welcome, Refuse)) and greeting is not None and greeting.answer(peer, message):
            return
        if isinstance(message, Goodbye) and greeting is not None:
            greeting.left(peer)
        if isinstance(message, Refuse) and message.peer != peer:
            self.dispatch(ev.PeerGone(peer))
        elif isinstance(message, Refuse):
            detail = f"{peer.rank} does not know this rank any more: {message.detail}"
            failure = self.context.failure(FailureReason.PEER_LOST, Stage.BOOTSTRAP, detail)
            self.dispatch(ev.PeerLeft(peer, failure))
        else:
            self.dispatch(ev.MessageReceived(peer, message))

    def take_notice(self, payload: bytes) -> None:
        """Take an in-band notice, as `Aggregate.run` does."""
        message = decode(payload)
        if isinstance(message, Notice):
            self.dispatch(ev.NoticeDelivered(message))

    def take_bytes(self, line: Line, data: bytes) -> None:
        """No line ends at a decode rank."""

    def line_closed(self, line: Line) -> None:
        """No line ends at a decode rank."""

    def _after_dispatch(self) -> None:
        """A decode rank has no stages that wait."""

    def take_backend_event(self, event: BackendEvent) -> None:
        """A decode rank posts nothing."""
        self.context.oddities.count("post_on_decode_rank")

    def leftovers(self) -> dict[str, int]:
        """What is still kept for transfers."""
        receivers = self.core.receivers
        return {
            "rooms": len(receivers.rooms),
            "scatters": len(receivers.scattered_peers()),
            "ungreeted": sum(len(waiting) for waiting in receivers._ungreeted.values()),
        }


def wire_pages(slots: tuple[int, ...]) -> bytes:
    """Pages as they go into a grant."""
    return struct.pack(f"<{len(slots)}I", *slots)
