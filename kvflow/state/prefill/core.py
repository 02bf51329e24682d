"""The core of a prefill rank: the only place where its protocol state changes. Pure: equal events, equal effects."""

from typing import assert_never

from kvflow.errors import FailureReason, Stage
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.counts import CoreCounts
from kvflow.state.drain import DrainState
from kvflow.state.effects import CountAnomaly, DisconnectTransport, PrefillEffect, Reply
from kvflow.state.peers import LeaseCheck, is_genuine, log_loss
from kvflow.state.prefill.deadlines import (
    DeclineForgotten,
    OfferExpired,
    PostStalled,
    PrefillTimer,
    RoomUnopened,
    SlotUnreturned,
)
from kvflow.state.prefill.delivery import SendContext
from kvflow.state.prefill.handshakes import Handshakes
from kvflow.state.prefill.line import CapacityLine
from kvflow.state.prefill.offers import OffersReceived
from kvflow.state.prefill.peers import DecodePeer, DecodePeers, Kept
from kvflow.state.prefill.posting import Posting
from kvflow.state.prefill.queue import PieceQueue
from kvflow.state.prefill.requests import Requests
from kvflow.state.prefill.rooms import Rooms
from kvflow.state.prefill.slots import RemoteSlots, SlotPool
from kvflow.state.prefill.waiting import FailedRooms
from kvflow.state.quarantine import MissingProof, ProofKind, Quarantine
from kvflow.state.settings import PrefillSettings
from kvflow.state.timers import Timers
from kvflow.wire.messages import (
    Ack,
    Announce,
    AnyMessage,
    Cancel,
    Decline,
    Drained,
    Failure,
    Goodbye,
    Grant,
    Hello,
    Offer,
    PeerId,
    Ping,
    Pong,
    Refuse,
    SlotReleased,
)

__all__ = ["PrefillCore"]


class PrefillCore:
    """State of one prefill rank: its decode ranks, its rooms, and the queue of pieces."""

    def __init__(self, me: PeerId, settings: PrefillSettings) -> None:
        self.me = me
        self.timers: Timers[PrefillTimer] = Timers()
        self.quarantine = Quarantine(settings.limits.quarantined_bytes)
        self.peers = DecodePeers(self.timers, settings.limits.peers)
        self.slots = RemoteSlots(self.peers, settings.timeouts, self.timers, self._look_again)
        self.local_slots = SlotPool(settings.staging.num_slots if settings.staging else 0)
        self.queue = PieceQueue(settings.limits, self.local_slots, self.slots)
        context, failed = SendContext(me, settings, self.peers, self.queue, self.slots), FailedRooms()
        self.rooms = Rooms(context, failed, self.timers, self.quarantine)
        self.line = CapacityLine(self.queue.full, self.rooms.peers_of)
        self.requests = Requests(context, self.rooms, failed, self.timers)
        self.offers = OffersReceived(me, self.peers, self.timers, are_taken=settings.takes_offers)
        self._settings = settings
        self._leaving = DrainState()
        self.handshakes = Handshakes(me, settings, self.peers, self.slots, self._leaving, self._left)
        self.posting = Posting(context, self.rooms)

    def handle(self, event: ev.PrefillEvent, now: float) -> list[PrefillEffect]:
        """Process one event, at a time in seconds on a monotonic clock, and return effects to be carried out in order.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining: The engine requested something that is not allowed now;
                the state is unchanged. Events from peers never raise.
        """
        effects = self._handle(event, now)
        effects += self.posting.take_turn(now)
        if self.queue.has_freed_capacity:
            self.queue.has_freed_capacity = False
            effects += self.line.admit()
        return effects

    def missing_proofs(self, key: RoomId) -> list[MissingProof]:
        """Return the missing proofs that nothing reads the pages of a room any more."""
        known = self.rooms.rooms.get(key)
        peers = [] if known is None else [one.id.peer for one in known.deliveries.values() if one.posted]
        return [MissingProof(str(peer), "", ProofKind.WRITE_END) for peer in peers]

    def pages_of(self, key: RoomId) -> dict[str, bytes]:
        """Return the pages of a room by component, encoded as `WIRE_PAGES`."""
        known = self.rooms.rooms.get(key)
        return {} if known is None else known.pages()

    def peers_of(self, key: RoomId) -> list[PeerId]:
        """Return the decode ranks that have asked for a room, or announced it."""
        known = self.rooms.rooms.get(key)
        granted = [] if known is None else [one.id.peer for one in known.deliveries.values()]
        return granted if known is None else list(dict.fromkeys([*granted, *known.announced]))

    def counts(self) -> CoreCounts:
        """Count what is open, waits, or is in quarantine."""
        waiting, slots = self.requests.waiting, self.local_slots
        return CoreCounts(
            rooms=len(self.rooms.rooms) - len(self.quarantine),
            quarantined=len(self.quarantine),
            quarantined_pages=self.quarantine.total.num_pages,
            quarantined_bytes=self.quarantine.total.num_bytes,
            announced=waiting.num_announced + sum(len(room.announced) for room in self.rooms.rooms.values()),
            timers=len(self.timers),
            peers=len(self.peers),
            peers_by_state=self.peers.count_states(),
            waiting_grants=len(waiting) - waiting.num_announced,
            queued_chunks=len(self.queue),
            slots_taken=slots.num_slots - slots.num_free - slots.num_lost,
            slots_lost=slots.num_lost + self.slots.num_lost,
        )

    def _handle(self, event: ev.PrefillEvent, now: float) -> list[PrefillEffect]:  # noqa: C901, PLR0912 - one arm an event
        match event:
            case ev.MessageArrived():
                return self._message_arrived(event, now)
            case ev.PeerRevoked():
                return self._revoked(event.peer, now)
            case ev.ChunkOffered():
                return self.rooms.offer(event.room, event.chunk, event.footprint, now)
            case ev.QuiesceAsked() | ev.LeaseStarted() | ev.ReclaimAsked() | ev.SendAborted():
                return self.rooms.follow_engine(event, now)
            case ev.ChunkWaits():
                self.line.add_call(event.call, event.room)
                return []
            case ev.WaitEnded():
                return [*self.line.remove_call(event.call)]
            case ev.PostEnded():
                return self._post_ended(event, now)
            case ev.SendOpened():
                self._leaving.check_open(event.room)
                return self.requests.open_room(event, now)
            case ev.SendRefused():
                return self.requests.refuse_unopened(event.room, event.failure)
            case ev.TimePassed():
                return [effect for key, late_s in self.timers.expire(now) for effect in self._expired(key, now, late_s)]
            case ev.TurnContinued():
                self.posting.resume()
                return []
            case ev.DataReady():
                return self.posting.data_ready(event, now)
            case ev.PlanFinished():
                return self.posting.plan_finished(event, now)
            case ev.PieceWentDirect():
                return self.posting.piece_went_direct(event)
            case ev.PlanFailed():
                return self.posting.plan_failed(event, now)
            case ev.PostInDoubt():
                effects = self.posting.post_in_doubt(event, now)
                return [*effects, *self._write_failed(event.delivery.peer, event.failure, now)]
            case ev.OfferDecided():
                return self.offers.answer((event.peer, event.number), event.failure)
            case ev.HelloChecked():
                return self._hello_checked(event, now)
            case ev.ReplyLost():
                return self._reply_lost(event.connection, now)
            case ev.QuarantineReleased():
                return self.rooms.release(event.key, now)
            case ev.DrainStarted():
                self._leaving.drain(event.failure)
                return [*self.offers.decline_all(event.failure), *self.requests.refuse_waiting(event.failure)]
            case ev.CloseStarted():
                self._leaving.close(event.failure)
                refused = [*self.offers.decline_all(event.failure), *self.requests.refuse_waiting(event.failure)]
                return [*refused, *self.rooms.close(event.failure, now)]
            case ev.TransportClosed():
                return self._goodbyes()
            case _:
                assert_never(event)

    def _goodbyes(self) -> list[PrefillEffect]:
        """Tell every decode rank that the transport is closed, and whether all of its writes have ended."""
        return [
            Reply(connection, Goodbye(peer=self.me, fenced=self.rooms.is_fenced(peer)))
            for connection, peer in self.peers.connections().items()
        ]

    def _look_again(self, peer: PeerId) -> None:
        self.queue.look_again(peer)

    # Handshake -------------------------------------------------------------------------------------------------------

    def _message_arrived(self, event: ev.MessageArrived, now: float) -> list[PrefillEffect]:
        connection, message = event.connection, event.message
        if isinstance(message, Hello):
            if event.denied:
                return self.handshakes.refuse(connection, message, event.denied, "hello_denied")
            kept = Kept(event.principal or message.peer.rank.instance, event.num_bytes)
            return self.handshakes.greet(connection, message, kept, now)
        peer = self.peers.at(connection)
        if peer is not None:
            denied = self._failure(FailureReason.REFUSED, event.denied) if event.denied else None
            return self._message_received(peer, message, now, denied, was_new=event.was_new)
        if isinstance(message, Goodbye):
            is_known = self.peers.is_remembered(connection, message.peer)
            return self._said_goodbye(message.peer, message, now) if is_known else []
        if isinstance(message, Refuse):
            return []
        if isinstance(message, Decline) and message.peer is not None:
            return self._declined(connection, message.peer, message, event.denied, now)
        refusal = Refuse(peer=self.me, to=None, detail="handshake required")
        return [CountAnomaly("handshake_required", None), Reply(connection, refusal)]

    def _declined(
        self, connection: bytes, peer: PeerId, decline: Decline, denied: str, now: float
    ) -> list[PrefillEffect]:
        """Handle the decline of a decode rank with which there is no handshake, for example because it is refused."""
        if decline.to != self.me:
            return [Reply(connection, Refuse(peer=self.me, to=peer, detail=f"this is {self.me}"))]
        refused = self._failure(FailureReason.REFUSED, denied) if denied else None
        effects = self.requests.decline(peer, decline, now, denied=refused)
        return [*effects, Reply(connection, self._drained(decline))]

    def _drained(self, decline: Decline) -> Drained:
        return Drained(
            room=decline.room,
            generation=decline.generation,
            engine_rank=self.me.rank.engine_rank,
            failure=decline.failure,
        )

    def _hello_checked(self, event: ev.HelloChecked, now: float) -> list[PrefillEffect]:
        effects = self.handshakes.finish_check(event, now)
        self.rooms.unfenced.find_connected(event.hello.peer)
        return effects

    def _reply_lost(self, connection: bytes, now: float) -> list[PrefillEffect]:
        """Note that a connection is gone. A newcomer replaces its decode rank; without one, the lease runs on."""
        former = self.peers.at(connection)
        if former is None:
            return []
        former.liveness.disconnected()
        newcomer = former.newcomer
        if newcomer is None:
            return []
        if now > former.asked_at + newcomer.hello.lease_s:  # it has stopped repeating its Hello
            self.peers.put_newcomer(former, None)
            return []
        failure = self._failure(FailureReason.PEER_LOST, f"{former.id.rank} has restarted")
        return [*self._left(former.id, failure, now), *self.handshakes.greet(*newcomer, now)]

    # Messages --------------------------------------------------------------------------------------------------------

    def _message_received(
        self, peer: DecodePeer, message: AnyMessage, now: float, denied: Failure | None, *, was_new: bool
    ) -> list[PrefillEffect]:
        peer.liveness.heard(now)
        if not is_genuine(peer.id, message):
            return [CountAnomaly("message_in_the_name_of_another", peer.id)]
        if isinstance(message, Goodbye):
            return self._said_goodbye(peer.id, message, now)
        if not peer.was_heard:
            self.peers.heard(peer, [*self.slots.peer_restarted(peer.id), *self.rooms.unfenced.forget_earlier(peer.id)])
        if isinstance(message, Grant):
            leaving = self._leaving.failure
            return self.requests.grant(peer, message, now, leaving=leaving, denied=denied, was_new=was_new)
        return self._obey(peer, message, now, denied, was_new=was_new)

    def _obey(
        self, peer: DecodePeer, message: AnyMessage, now: float, denied: Failure | None, *, was_new: bool
    ) -> list[PrefillEffect]:
        match message:
            case Announce():
                return self.requests.announce(peer, message, now, leaving=self._leaving.failure, denied=denied)
            case Ack():
                effects = self.rooms.acknowledged(peer, message, now)
                self.slots.closed(ev.DeliveryId(message.room, peer.id, message.generation))
                return effects
            case Offer():
                return self.offers.receive(peer.id, message, now, leaving=self._leaving.failure, denied=denied)
            case SlotReleased():
                self.slots.released(peer.id, message)
                return []
            case Ping():
                asks_ends, sent_at = message.asks_ends, message.sent_at
                answered_at = None if sent_at is None else now
                pong = Pong(peer=self.me, asks_ends=asks_ends, sent_at=sent_at, answered_at=answered_at)
                return [Reply(peer.connection, pong)]
            case Pong():
                return self.handshakes.refuse_newcomer(peer)
            case Cancel():
                effects = self.requests.cancel(peer.id, message, now, was_asked=was_new)
                self.slots.closed(ev.DeliveryId(message.room, peer.id, message.generation))
                return effects
            case Decline():
                effects = self.requests.decline(peer.id, message, now, denied=denied)
                return [*effects, Reply(peer.connection, self._drained(message))]
            case _:
                return [CountAnomaly(f"unexpected_{type(message).__name__.lower()}", peer.id)]

    def _said_goodbye(self, peer: PeerId, goodbye: Goodbye, now: float) -> list[PrefillEffect]:
        failure = goodbye.failure or self._failure(FailureReason.PEER_CLOSED, f"{peer.rank} is closing")
        self.rooms.unfenced.forget_peer(peer)
        self.slots.left(peer)
        effects = self._left(peer, failure, now)
        self.peers.mark_ended(peer, f"{peer} has said goodbye")
        return effects

    def _post_ended(self, event: ev.PostEnded, now: float) -> list[PrefillEffect]:
        is_news = event.failure is not None and not self.queue.is_in_doubt(event.delivery, event.seq)
        effects = self.posting.post_ended(event, now)
        if event.failure is None:
            peer = self.peers.find(event.delivery.peer)
            if peer is not None:
                peer.write_succeeded(now)
        elif is_news:
            effects += self._write_failed(event.delivery.peer, event.failure, now)
        return effects

    def _write_failed(self, peer_id: PeerId, failure: Failure, now: float) -> list[PrefillEffect]:
        """Disconnect a peer to which writes keep failing."""
        peer = self.peers.find(peer_id)
        return self._connect_anew(peer, failure, now) if peer is not None and peer.write_failed(now) else []

    def _post_stalled(self, key: PostStalled, now: float) -> list[PrefillEffect]:
        """Disconnect a peer to which no write has succeeded for long, although it is heard from.

        Its data connection may be blackholed, for example, and every later post would wait behind the others.
        """
        effects = self.rooms.expired(key, now)
        peer = self.peers.find(key.delivery.peer)
        if peer is None or not peer.is_stuck(now, self._settings.timeouts.progress_s):
            return effects
        detail = f"writes to {peer.id.rank} are taking too long"
        failure = Failure(FailureReason.STALLED, Stage.SUBMIT, str(self.me.rank), detail)
        return [*effects, *self._connect_anew(peer, failure, now)]

    def _connect_anew(self, peer: DecodePeer, failure: Failure, now: float) -> list[PrefillEffect]:
        """Disconnect a peer, which must reconnect with fresh native state.

        A rank that is draining or closing serves nothing new, so it stays connected to report when its writes have
        ended.
        """
        if self._leaving.failure is not None:
            return []
        refusal = Refuse(
            peer=self.me, to=peer.id, detail=f"writes to this decode rank fail, so it must reconnect: {failure.detail}"
        )
        effects = self.requests.peer_lost(peer.id, failure, now)
        return [*effects, Reply(peer.connection, refusal), *self._left(peer.id, failure, now)]

    def _revoked(self, peer: PeerId, now: float) -> list[PrefillEffect]:
        """Disconnect a peer whose key is no longer listed, or abort its handshake."""
        self.peers.forget_handshake(peer)
        known = self.peers.find(peer)
        if known is None:
            return []
        failure = self._failure(FailureReason.REFUSED, f"key of {peer.rank} is no longer listed")
        refusal = Refuse(peer=self.me, to=peer, detail=failure.detail)
        return [
            CountAnomaly("peer_revoked", peer),
            *self.requests.peer_lost(peer, failure, now),
            Reply(known.connection, refusal),
            *self._left(peer, failure, now),
        ]

    def _left(self, peer: PeerId, failure: Failure, now: float) -> list[PrefillEffect]:
        """Disconnect a peer. The rooms that it waits for fail first, while it can still be told."""
        if peer not in self.peers:
            return []
        effects = self.requests.peer_lost(peer, failure, now)
        self.rooms.peer_disconnected(peer, now)
        effects += self.offers.peer_left(peer, failure)
        self.peers.remove(peer, failure)
        self.slots.disconnected(peer)
        return [*effects, DisconnectTransport(peer), log_loss("peer_disconnected", peer, failure)]

    def _expired(self, key: PrefillTimer, now: float, late_s: float) -> list[PrefillEffect]:
        match key:
            case LeaseCheck(peer):
                liveness = self.peers[peer].liveness
                if not liveness.check(now, late_s):  # sending to a silent one fails if its connection is gone
                    return self.peers.send(peer, Ping(peer=self.me)) if liveness.is_silent else []
                # A decode rank has no proofs to give; if it is alive, it reconnects.
                detail = f"{peer.rank} was silent for {liveness.lease_s} s"
                return self._left(peer, self._failure(FailureReason.PEER_LOST, detail), now)
            case PostStalled():
                return self._post_stalled(key, now)
            case SlotUnreturned():
                return self.slots.expired(key, now)
            case OfferExpired():
                return self.offers.expired(key)
            case RoomUnopened() | DeclineForgotten():
                return self.requests.expired(key)
            case _:
                return self.rooms.expired(key, now, late_s)

    def _failure(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.BOOTSTRAP, str(self.me.rank), detail)
