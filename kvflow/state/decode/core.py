"""The core of a decode rank: the only place where its protocol state changes. Pure: equal events, equal effects."""

from typing import assert_never

from kvflow.state import events as ev
from kvflow.state.counts import CoreCounts
from kvflow.state.decode.deadlines import (
    DecodeTimer,
    OfferOverdue,
    OfferUnanswered,
    PeerForgotten,
    PingDue,
    ProbeDue,
    QueuePairsGone,
    ReceiveDeadline,
    ReceiveStalled,
    ReceiveUnanswered,
    ReceiveUndrained,
)
from kvflow.state.decode.handshake import Instances
from kvflow.state.decode.liveness import PrefillLiveness
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.decode.room import ReceiveContext, Room
from kvflow.state.decode.rooms import Rooms
from kvflow.state.drain import DrainState
from kvflow.state.effects import CountAnomaly, DecodeEffect, WatchNotices
from kvflow.state.peers import LeaseCheck, is_genuine
from kvflow.state.quarantine import MissingProof, ProofKind, Quarantine
from kvflow.state.settings import DecodeSettings
from kvflow.state.timers import Timers
from kvflow.wire.messages import (
    AnyMessage,
    Drained,
    Failed,
    Failure,
    Goodbye,
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

__all__ = ["DecodeCore"]


class DecodeCore:
    """State of one decode rank: prefill instances, their ranks, and its rooms."""

    def __init__(self, me: PeerId, settings: DecodeSettings) -> None:
        self.me = me
        self._settings = settings
        self.timers: Timers[DecodeTimer] = Timers()
        self.quarantine = Quarantine(settings.limits.quarantined_bytes)
        self.peers = PrefillPeers(me, settings, self.timers)
        self.windows = self.peers.windows
        peers, progress_s = self.peers, settings.timeouts.progress_s
        context = ReceiveContext(me, progress_s, peers.probe, self._decline, self._reconnect, peers.clocks)
        self.rooms = Rooms(context, settings, self.timers, self.quarantine)
        self.instances = Instances(me, settings, self.peers, self.rooms, self.timers)
        self.offers = self.instances.offers
        self.liveness = PrefillLiveness(me, self.peers, self.rooms, self.instances)
        self._leaving = DrainState()
        self._is_watching = False

    def handle(self, event: ev.DecodeEvent, now: float) -> list[DecodeEffect]:
        """Process one event, at a time in seconds on a monotonic clock, and return effects to be carried out in order.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining: The engine requested something that is not allowed now;
                the state is unchanged. Events from peers never raise.
        """
        effects = self._handle(event, now)
        if self.offers.unsent:
            effects += self.offers.send_waiting(now)
        is_watching = len(self.rooms.generations) > len(self.rooms.announced)
        if is_watching is not self._is_watching:
            self._is_watching = is_watching
            effects.append(WatchNotices(is_watching))
        return effects

    def counts(self) -> CoreCounts:
        """Count what is open, waits, or is in quarantine."""
        return CoreCounts(
            rooms=len(self.rooms.generations),
            quarantined=len(self.quarantine),
            quarantined_pages=self.quarantine.total.num_pages,
            quarantined_bytes=self.quarantine.total.num_bytes,
            announced=len(self.rooms.announced),
            timers=len(self.timers),
            peers=len(self.peers),
            peers_by_state=self.peers.count_states(),
            windows_taken=self.windows.num_taken,
            windows_free=self.windows.num_windows - self.windows.num_taken,
        )

    def missing_proofs(self, key: int) -> list[MissingProof]:
        """Return the missing proofs that nothing can write to the pages of a transfer any more."""
        room = self.rooms.rooms.get(key)
        if room is None:
            return []
        own = [MissingProof(str(self.me), "", ProofKind.LOCAL)] if room.is_scattering or room.is_verifying else []
        return [*(self.peers.missing_proof(peer) for peer in room.unproved()), *own]

    def pages_of(self, key: int) -> dict[str, bytes]:
        """Return the pages of a transfer by component, encoded as `WIRE_PAGES`."""
        room = self.rooms.rooms.get(key)
        return {} if room is None else dict(room.opened.pages)

    def peers_of(self, key: int) -> tuple[PeerId, ...]:
        """Return the prefill ranks that were told of a room."""
        room = self.rooms.rooms.get(key)
        return () if room is None else room.told

    def peers_reachable(self) -> list[PeerId]:
        """Return the prefill ranks that messages can be sent to, including those in the handshake."""
        return self.peers.all_open

    def _handle(self, event: ev.DecodeEvent, now: float) -> list[DecodeEffect]:  # noqa: C901, PLR0912 - one arm an event
        match event:
            case ev.MessageReceived():
                return self._message_received(event, now)
            case ev.ReceiveOpened():
                self._leaving.check_open(event.room)
                return self.instances.want(self.rooms.open(event, now), now)
            case ev.ReceiveGranted():
                return self._take_pages(event, now)
            case ev.TimePassed():
                return [effect for key, late_s in self.timers.expire(now) for effect in self._expired(key, now, late_s)]
            case ev.ReceiveAborted():
                return self.rooms.abort(event.room, event.failure, now)
            case ev.RoomDeclined():
                return self.instances.decline_refused(event, now)
            case ev.OfferMade() | ev.OfferWithdrawn():
                return self.instances.follow_offer(event, now)
            case ev.InstanceFound():
                return self.instances.found(event, now)
            case ev.RoutesCompiled():
                return self.instances.compiled(event, now)
            case ev.ConnectFailed():
                return self.liveness.connect_failed(event)
            case ev.LookUpRefused() | ev.ConnectionObstructed():
                self.instances.obstacles.note_obstacle(event)
                return []
            case ev.ConnectionRefused():
                return self.liveness.connection_refused(event.peer, event.detail, now)
            case ev.ConnectionLost():
                return self.liveness.connection_lost(event.peer, now)
            case ev.InstanceDoubted():
                return self.liveness.doubt_ranks(event.instance, now)
            case ev.ProbeFinished():
                return self.liveness.probe_finished(event, now)
            case ev.AddressProbed():
                return self.instances.issuers.finished(event, now)
            case ev.PeerFenced():
                return self.liveness.fenced(event.peer, now)
            case ev.Landed():
                return self.rooms.landed(event)
            case ev.FenceImpossible():
                self.peers.fence_impossible(event.peer)
                return []
            case ev.DigestsVerified():
                return self.rooms.verified(event.generation, event.failure, now)
            case ev.NoticeDelivered():
                return self.rooms.notice(event.notice, None, now, event.waited_s)
            case ev.Scattered():
                return self._scattered(event, now)
            case ev.QuarantineReleased(key):
                return self.rooms.release(key, now)
            case ev.DrainStarted():
                self._leaving.drain(event.failure)
                return []
            case ev.CloseStarted():
                return self._close(event.failure, now)
            case ev.TransportClosed():
                return [sent for peer in self.peers.all_open for sent in self.peers.send(peer, Goodbye(peer=self.me))]
            case _:
                assert_never(event)

    def _take_pages(self, event: ev.ReceiveGranted, now: float) -> list[DecodeEffect]:
        room, effects = self.rooms.take_pages(event, now)
        return [*effects, *self.instances.want(room, now)]

    def _close(self, failure: Failure, now: float) -> list[DecodeEffect]:
        self._leaving.close(failure)
        return [*self.offers.fail_all(failure), *self.rooms.close(failure, now)]

    def _scattered(self, event: ev.Scattered, now: float) -> list[DecodeEffect]:
        effects = self.rooms.scattered(event, now)
        self.windows.reclaim(self.rooms.scatter_from)
        return effects

    def _decline(self, room: Room, failure: Failure, now: float) -> list[DecodeEffect]:
        return self.instances.decline(room, failure, now)

    def _reconnect(self, instance: ev.InstanceRef, now: float) -> list[DecodeEffect]:
        return self.instances.reconnect(instance, now)

    # Messages --------------------------------------------------------------------------------------------------------

    def _message_received(self, event: ev.MessageReceived, now: float) -> list[DecodeEffect]:
        peer, message = event.peer, event.message
        if event.host:
            self.peers.note_host(peer, event.host)
        if isinstance(message, Refuse):
            return self.liveness.refused(peer, message, now)
        if not is_genuine(peer, message):
            return [CountAnomaly("message_in_the_name_of_another", peer)]
        is_back = self.peers.heard(peer, now)
        effects = [*self.rooms.peer_back(peer), *self.instances.back(peer, now)] if is_back else []
        return [*effects, *self._obey(peer, message, now)]

    def _obey(self, peer: PeerId, message: AnyMessage, now: float) -> list[DecodeEffect]:  # noqa: C901 - one a message
        """Handle a message of a rank. Proofs count in every state of the handshake."""
        match message:
            case Notice():
                return self.rooms.notice(message, peer, now)
            case Drained() if message.in_flight:
                return self.rooms.in_flight(peer, message, self.peers.begin_wait())
            case Drained():
                answered = self.instances.decline_answered(peer, message, now)
                return [*answered, *self.rooms.drained(peer, message, now)]
            case Failed():
                return self.rooms.failed(peer, message, now)
            case Pong():
                self.peers.compare_clocks(peer, message, now)
                return self.peers.listed_ends(peer, message)
            case Ping():
                return self.peers.send(peer, Pong(peer=self.me))
            case Welcome():
                if not self.instances.is_handshaking(peer, message.attempt):
                    return []
                effects = [*self.liveness.replace_others(peer, now), *self.instances.welcomed(peer, message, now)]
                return (
                    effects
                    if self.peers.is_connected(peer)
                    else [*effects, *self.liveness.ask_whether_it_lives(peer, now)]
                )
            case PagesQuery() | SlotQuery():
                return self.rooms.answer(peer, message)
            case Goodbye():
                return self.liveness.said_goodbye(peer, message, now)
            case OfferAnswered():
                return self.offers.answered(peer, message)
            case _:
                return [CountAnomaly(f"unexpected_{type(message).__name__.lower()}", peer)]

    # Timers ----------------------------------------------------------------------------------------------------------

    def _expired(self, key: DecodeTimer, now: float, late_s: float) -> list[DecodeEffect]:
        match key:
            case LeaseCheck(peer):
                return self.liveness.check_lease(peer, now, late_s)
            case PingDue(peer):
                return self.liveness.ping_rank(peer, now)
            case ProbeDue(peer):
                return self.peers.probe_suspect(peer)
            case QueuePairsGone(peer):
                return self.liveness.fenced(peer, now)
            case PeerForgotten(peer):
                return self.liveness.forget_if_unused(peer, now)
            case OfferUnanswered() | OfferOverdue():
                return self.offers.expired(key, now)
            case ReceiveDeadline() | ReceiveStalled() | ReceiveUnanswered() | ReceiveUndrained():
                return self.rooms.expired(key, now)
            case _:
                return self.instances.expired(key, now)
