"""The core of a decode rank: the only place where its protocol state changes. Pure: equal events, equal effects."""

from typing import assert_never

from kvflow.errors import FailureReason, Stage
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
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.decode.room import ReceiveContext, Room
from kvflow.state.decode.rooms import Rooms
from kvflow.state.drain import DrainState
from kvflow.state.effects import CountAnomaly, DecodeEffect, WatchNotices
from kvflow.state.peers import LeaseCheck, is_genuine, log_loss
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
                room, effects = self.rooms.take_pages(event, now)
                return [*effects, *self.instances.want(room, now)]
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
            case ev.ConnectFailed() | ev.LookUpRefused() | ev.ConnectionObstructed():
                return self._obstructed(event)
            case ev.ConnectionRefused():
                return self._connection_refused(event.peer, event.detail, now)
            case ev.ConnectionLost() | ev.InstanceDoubted():
                return self._doubt(event, now)
            case ev.ProbeFinished():
                effects = self.peers.probe_finished(event.peer, now, is_gone=event.is_gone)
                return self._process_ended(event.peer, now) if event.is_gone else effects
            case ev.AddressProbed():
                return self.instances.issuers.finished(event, now)
            case ev.PeerFenced():
                return self._fenced(event.peer, now)
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
                self._leaving.close(event.failure)
                return [*self.offers.fail_all(event.failure), *self.rooms.close(event.failure, now)]
            case ev.TransportClosed():
                return [sent for peer in self.peers.all_open for sent in self.peers.send(peer, Goodbye(peer=self.me))]
            case _:
                assert_never(event)

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
            return self._refused(peer, message, now)
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
                effects = [*self._replace_others(peer, now), *self.instances.welcomed(peer, message, now)]
                return effects if self.peers.is_connected(peer) else [*effects, *self._ask_whether_it_lives(peer, now)]
            case PagesQuery() | SlotQuery():
                return self.rooms.answer(peer, message)
            case Goodbye():
                return self._said_goodbye(peer, message, now)
            case OfferAnswered():
                return self.offers.answered(peer, message)
            case _:
                return [CountAnomaly(f"unexpected_{type(message).__name__.lower()}", peer)]

    def _replace_others(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Give up earlier incarnations of a rank that has accepted a Hello, and earlier owners of its address."""
        effects: list[DecodeEffect] = []
        for other in self.peers.at_endpoint(peer):
            effects += self._process_ended(other, now)
        for other in self.peers.of_rank(peer):
            failure = self._failure(FailureReason.PEER_LOST, f"{other.rank} has restarted")
            effects += [*self._left(other, failure, now), *self.peers.probe(other)]
        return effects

    def _refused(self, peer: PeerId, refuse: Refuse, now: float) -> list[DecodeEffect]:
        if refuse.peer != peer:  # another process answers at its port, or at its address in a directory
            is_its_port = self.peers.is_where_it_listens(peer)
            ended = self._process_ended(peer, now) if is_its_port else self._is_not_there(peer, now)
            return [*ended, *self.peers.close(peer)]
        if refuse.attempt is not None:
            return self.instances.refused(peer, refuse, now)
        if refuse.to not in (None, self.me) or peer not in self.peers:
            return []
        if self.instances.is_handshaking(peer):  # it answers a message sent before the Hello
            return []
        detail = f"{peer.rank} no longer knows this rank: {refuse.detail}"
        return self._left(peer, self._failure(FailureReason.PEER_LOST, detail), now)

    def _said_goodbye(self, peer: PeerId, goodbye: Goodbye, now: float) -> list[DecodeEffect]:
        failure = goodbye.failure or self._failure(FailureReason.PEER_CLOSED, f"{peer.rank} is closing")
        self.peers.said_goodbye(peer)
        effects = self._fenced(peer, now, failure) if goodbye.fenced else []
        effects += self._over(peer, failure, now)
        if not goodbye.fenced:  # its process may end soon, which is a proof for some transports
            effects += self.peers.probe(peer)
        return [*effects, *self.peers.close(peer)]  # no message follows a Goodbye

    # Peers -----------------------------------------------------------------------------------------------------------

    def _obstructed(self, event: ev.ConnectFailed | ev.LookUpRefused | ev.ConnectionObstructed) -> list[DecodeEffect]:
        self.instances.obstacles.note_obstacle(event)
        if not isinstance(event, ev.ConnectFailed):
            return []
        self.peers.open_failed(event.peer)
        return [] if event.is_short else [CountAnomaly("connect_failed", event.peer, detail=event.detail)]

    def _doubt(self, event: ev.ConnectionLost | ev.InstanceDoubted, now: float) -> list[DecodeEffect]:
        """Treat the ranks of a doubted instance as if their connections had broken: those that are well answer soon."""
        if isinstance(event, ev.ConnectionLost):
            return self._connection_lost(event.peer, now)
        connected = [peer for peer in self.instances.peers_of(event.instance) if self.peers.is_connected(peer)]
        return [effect for peer in connected for effect in self._connection_lost(peer, now)]

    def _connection_lost(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Probe a rank whose connection broke, and send it nothing new until it is heard from."""
        known = self.peers.find(peer)
        if known is None:
            if not self.instances.is_handshaking(peer):
                return []
            self.peers.broke_early(peer)
            return self.instances.suspect(peer, now)
        known.disconnected()
        return [*self._ask_whether_it_lives(peer, now), *self.instances.suspect(peer, now)]

    def _ask_whether_it_lives(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        return [*self.peers.probe(peer), *self._ping(peer, now)]

    def _ping(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        return self.peers.ping(peer, now, asks_ends=bool(self.rooms.unproved))

    def _connection_refused(self, peer: PeerId, detail: str, now: float) -> list[DecodeEffect]:
        """Give up a rank because one side refuses the other's key."""
        counted = CountAnomaly("connection_refused", peer, detail=detail)
        if peer not in self.peers:
            return [counted, *self.instances.connection_refused(peer, detail, now)]
        return [counted, *self._left(peer, self._failure(FailureReason.REFUSED, f"{peer.rank}: {detail}"), now)]

    def _process_ended(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Act on the proof that the process of a rank has ended."""
        failure = self._failure(FailureReason.PEER_LOST, f"the process of {peer.rank} has ended")
        is_fenced, effects = self.peers.ended(peer, now)
        if is_fenced:
            effects += self._fenced(peer, now, failure)
        return [*effects, *self._over(peer, failure, now), *self._close_unless_awaited(peer, now)]

    def _is_not_there(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Give up an incarnation that is not at its listed address. This is no proof: directories may lie."""
        self.peers.said_goodbye(peer)
        failure = self._failure(FailureReason.PEER_LOST, f"somebody else answers where {peer.rank} was listed")
        return self._over(peer, failure, now)

    def _over(self, peer: PeerId, failure: Failure, now: float) -> list[DecodeEffect]:
        """Give up an incarnation that is over, whether connected or in the handshake."""
        if peer in self.peers:
            return self._left(peer, failure, now)
        return self.instances.lost(peer, now) if self.instances.is_handshaking(peer) else []

    def _fenced(self, peer: PeerId, now: float, failure: Failure | None = None) -> list[DecodeEffect]:
        """Act on the proof that no write of an incarnation can land any more."""
        failure = failure or self._failure(FailureReason.PEER_LOST, f"the process of {peer.rank} has ended")
        effects = self.rooms.peer_fenced(peer, failure, now)
        self.peers.fenced(peer)
        self.windows.reclaim(self.rooms.scatter_from)
        return [*effects, *(self._close_unless_awaited(peer, now) if self.peers.has_ended(peer) else [])]

    def _scattered(self, event: ev.Scattered, now: float) -> list[DecodeEffect]:
        effects = self.rooms.scattered(event, now)
        self.windows.reclaim(self.rooms.scatter_from)
        return effects

    def _close_unless_awaited(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        return self.peers.close_unless_awaited(peer, now, is_awaited=self.rooms.await_proof_of(peer))

    def _left(self, peer: PeerId, failure: Failure, now: float) -> list[DecodeEffect]:
        if not self.peers.left(peer):
            return []
        return [
            log_loss("peer_disconnected", peer, failure),
            *self.offers.peer_lost(peer, failure),
            *self.rooms.peer_lost(peer, failure, now),
            *self.instances.lost(peer, now),
            *self._close_unless_awaited(peer, now),
        ]

    # Timers ----------------------------------------------------------------------------------------------------------

    def _expired(self, key: DecodeTimer, now: float, late_s: float) -> list[DecodeEffect]:
        match key:
            case LeaseCheck(peer):
                return self._check_lease(peer, now, late_s)
            case PingDue(peer):
                return self._ping(peer, now)
            case ProbeDue(peer):
                return self.peers.probe_suspect(peer)
            case QueuePairsGone(peer):
                return self._fenced(peer, now)
            case PeerForgotten(peer):
                return self._forget_if_unused(peer, now)
            case OfferUnanswered() | OfferOverdue():
                return self.offers.expired(key, now)
            case ReceiveDeadline() | ReceiveStalled() | ReceiveUnanswered() | ReceiveUndrained():
                return self.rooms.expired(key, now)
            case _:
                return self.instances.expired(key, now)

    def _check_lease(self, peer: PeerId, now: float, late_s: float) -> list[DecodeEffect]:
        """Declare a rank lost after it was silent for a whole lease."""
        known = self.peers.find(peer)
        if known is None or not known.check(now, late_s):
            return []
        self.peers.lost(peer, now)
        failure = self._failure(FailureReason.PEER_LOST, f"{peer.rank} was silent for {known.lease_s} s")
        return [
            log_loss("peer_lost", peer, failure),
            *self.offers.peer_lost(peer, failure),
            *self.rooms.peer_lost(peer, failure, now),
            *self.instances.lost(peer, now),
        ]

    def _forget_if_unused(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Forget a rank that stayed silent, or close its connection, unless a transfer still waits for its proof."""
        if peer not in self.peers and self.instances.is_handshaking(peer):  # the connection is in use again
            return []
        if peer not in self.peers and self.peers.has_ended(peer):  # its last messages have arrived or never will
            return self.peers.close(peer)
        if self.rooms.involve(peer):
            self.peers.lost(peer, now)
            return []
        failure = self._failure(FailureReason.PEER_LOST, f"{peer.rank} stayed silent")
        return [*self._left(peer, failure, now), *self._close_unless_awaited(peer, now)]

    def _failure(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.BOOTSTRAP, str(self.me.rank), detail)
