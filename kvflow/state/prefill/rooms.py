"""All rooms of one prefill rank, and the grants and announcements that wait for rooms. Pure."""

from collections.abc import Hashable
from typing import NamedTuple

from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, Stage
from kvflow.room import RoomId
from kvflow.state.by_peer import ByPeer
from kvflow.state.effects import CountAnomaly, DropPlan, Piece, PostPlan, PrefillEffect
from kvflow.state.events import (
    Chunk,
    DataReady,
    DeliveryId,
    PieceWentDirect,
    PlanFailed,
    PlanFinished,
    PostEnded,
    PostInDoubt,
)
from kvflow.state.prefill.deadlines import (
    DeclineForgotten,
    DeliveryDeadline,
    DeliveryUnanswered,
    GrantOverdue,
    PostStalled,
    RoomUndrained,
    RoomUngranted,
    RoomUnquiesced,
)
from kvflow.state.prefill.declined import DeclinedRooms
from kvflow.state.prefill.delivery import Delivery, DeliveryWait, SendContext
from kvflow.state.prefill.peers import DecodePeer
from kvflow.state.prefill.queue import PieceEnd
from kvflow.state.prefill.room import Room, RoomWait
from kvflow.state.prefill.waiting import Announcement, Asked, RoomUnopened, WaitingRooms
from kvflow.state.quarantine import Footprint, Quarantine
from kvflow.state.tables import Memory, Signal
from kvflow.state.timers import Timers
from kvflow.wire.messages import Ack, Announce, Cancel, Decline, Failure, Grant, PeerId, RankId

__all__ = ["Rooms"]

MAX_FAILED = 4_096
"""Maximum number of failed rooms that are remembered, so that late grants are answered at once."""

UNFENCED_SHARE = 8
"""One decode rank may have 1/8 of the unfenced deliveries, so that others are served if writes to it never end."""

MAX_BACKOFF = 8
"""The pause between retransmissions doubles up to this multiple of the first pause."""


class _FailedRoom(NamedTuple):
    """A room that has failed.

    Attributes:
        told: Decode ranks that know, or whose earlier incarnation did; their next request is a new try.
    """

    failure: Failure
    told: dict[RankId, None]


class Rooms:
    """The table of rooms, and `waiting`, the requests for rooms that are not open yet. Methods return effects.

    A room that is over leaves the table. A delivery whose bytes may still land at the decode rank is kept as
    *unfenced*, without its pages: the source pages are free, but that proves nothing about the destination. The decode
    rank is sent Drained only once the last post has ended in a way that proves it. If there is no such way, only the
    end of one of the two processes is a proof. When there are too many unfenced deliveries, those of disconnected
    decode ranks are dropped; such a rank must not reconnect, and so is never sent Drained. While all decode ranks are
    connected, new work is refused instead.
    """

    def __init__(self, context: SendContext, timers: Timers[Hashable], quarantine: Quarantine) -> None:
        self.rooms: dict[RoomId, Room] = {}
        self.unfenced: dict[DeliveryId, Delivery] = {}
        self._unfenced_by_peer: ByPeer[DeliveryId] = ByPeer()
        self._by_peer: ByPeer[RoomId] = ByPeer()
        self._context = context
        self._timeouts = context.settings.timeouts
        self._limits = context.settings.limits
        self._timers = timers
        self._quarantine = quarantine
        self.waiting = WaitingRooms(timers, self._limits)
        self._failed: dict[RoomId, _FailedRoom] = {}
        self._declined = DeclinedRooms(timers, self._timeouts.open_s)

    # Requests from the engine ----------------------------------------------------------------------------------------

    def open(self, room: RoomId, now: float, *, has_lease: bool = True) -> list[PrefillEffect]:
        """Open a room, and serve the grants and announcements that have arrived before.

        Raises:
            LocalProtocolError: The room is open, or its pages are in quarantine.
            CapacityExceeded: Too many rooms are open, too much memory is in quarantine, or too many writes may still
                land.
        """
        if room in self.rooms:
            raise LocalProtocolError("room is in use", room=room, memory=self.rooms[room].state.memory.value)
        if len(self.rooms) >= self._limits.transfers:
            raise CapacityExceeded("too many rooms are open", limit=self._limits.transfers, setting="limits.transfers")
        self._quarantine.check_admission()
        if not self._has_place_for_unfenced():
            raise CapacityExceeded(
                "too many ended transfers have writes that may still land at decode ranks",
                unfenced=len(self.unfenced),
                limit=self._limits.unfenced,
                setting="limits.unfenced",
            )
        self._failed.pop(room, None)
        opened = self.rooms[room] = Room(self._context, room, has_lease=has_lease)
        effects: list[PrefillEffect] = []
        for peer in self.waiting.peers(room):
            effects += self._serve(opened, peer, self.waiting.take(room, peer), now)
        declined = self._declined.take(room)
        if declined:
            effects += self._follow(opened, opened.stop(Signal.FAILED, next(iter(declined.values()))), now)
            self._tell(room, declined)
        return effects

    def refuse_unopened(self, room: RoomId, failure: Failure) -> list[PrefillEffect]:
        """Refuse the requests for a room that the engine could not open; later ones are refused when they arrive."""
        if room in self.rooms:
            return []
        told: dict[RankId, None] = {}
        effects: list[PrefillEffect] = []
        for peer in self.waiting.peers(room):
            asked = self.waiting.take(room, peer)
            effects += self._context.refuse(DeliveryId(room, peer, asked.generation), failure)
            told[peer.rank] = None
        self._note_failed(room, failure, told)
        return effects

    def offer(self, room: RoomId, chunk: Chunk, footprint: Footprint, now: float) -> list[PrefillEffect]:
        """Take a chunk from the engine.

        Raises:
            LocalProtocolError: The room is not open, or does not accept this chunk.
        """
        known = self._known(room)
        return self._follow(known, known.offer(chunk, footprint, now), now)

    def quiesce(self, room: RoomId, now: float) -> list[PrefillEffect]:
        """Stop reading the pages of a room, which continues later.

        Raises:
            LocalProtocolError: The room is not open.
        """
        known = self._known(room)
        known.quiesce()
        return self._follow(known, known.review(), now)

    def start_lease(self, room: RoomId, now: float) -> list[PrefillEffect]:
        """Start the lease of a room, whose ticket has left; it may have ended."""
        known = self.rooms.get(room)
        if known is None:
            return []
        known.has_lease = True
        return self._follow(known, [], now)

    def reclaim(self, room: RoomId, failure: Failure, now: float, *, with_announced: bool) -> list[PrefillEffect]:
        """End a room whose pages the engine needs, unless a decode rank has granted or, by default, announced."""
        known = self.rooms.get(room)
        if known is None or known.deliveries or (known.announced and not with_announced):
            return []
        return self._follow(known, known.stop(Signal.FAILED, failure), now)

    def abort(self, room: RoomId, failure: Failure, now: float) -> list[PrefillEffect]:
        """End a room because its engine aborted it."""
        known = self.rooms.get(room)
        return self._follow(known, known.stop(Signal.ABORTED, failure), now) if known else []

    def release(self, room: RoomId, now: float) -> list[PrefillEffect]:
        """Release the pages of a room in quarantine without a proof.

        Raises:
            LocalProtocolError: The room is not in quarantine.
        """
        known = self.rooms.get(room)
        if known is None or known.state.memory is not Memory.QUARANTINED:
            raise LocalProtocolError("room is not in quarantine", room=room)
        return self._follow(known, known.release(), now)

    def close(self, failure: Failure, now: float) -> list[PrefillEffect]:
        """Fail all rooms and all waiting requests."""
        effects = self.refuse_waiting(failure)
        for room in list(self.rooms.values()):
            effects += self._follow(room, room.stop(Signal.ABORTED, failure), now)
        return effects

    # Requests from decode ranks --------------------------------------------------------------------------------------

    def grant(
        self,
        peer: DecodePeer,
        grant: Grant,
        now: float,
        *,
        leaving: Failure | None = None,
        denied: Failure | None = None,
        was_new: bool = False,
    ) -> list[PrefillEffect]:
        """Serve a grant, keep it until the engine opens the room, or refuse it; answer a repeated one again.

        If `leaving` is set, no more rooms will be opened. If `denied` is set, a new request is refused. If `was_new` is
        set, it was new when it arrived, and is late only if its generation has ended since.
        """
        delivery_id = DeliveryId(grant.room, peer.id, grant.generation)
        peer.used(grant.generation)
        delivery = self._find(delivery_id)[1] or self.unfenced.get(delivery_id)
        if delivery is not None:
            return delivery.retransmit()
        asked = self._asked(delivery_id)  # it may wait until later ones are forgotten
        if isinstance(asked, Grant):
            return []
        is_closed = peer.closed.result(grant.generation) is not None if was_new else grant.generation in peer.closed
        if asked is None and is_closed:
            is_wanted = any(name in grant.ranges for name in peer.link.components)
            return self._answer_closed(peer, delivery_id, is_wanted=is_wanted)
        if denied is not None and asked is None:
            return self._deny(delivery_id, denied)
        return self._ask(delivery_id, grant, now, leaving)

    def is_new(self, peer: DecodePeer, grant: Grant) -> bool:
        """Return whether a grant is neither known nor late."""
        delivery_id = DeliveryId(grant.room, peer.id, grant.generation)
        is_known = self._find(delivery_id)[1] is not None or delivery_id in self.unfenced
        return not (is_known or isinstance(self._asked(delivery_id), Grant) or grant.generation in peer.closed)

    def announce(
        self,
        peer: DecodePeer,
        announce: Announce,
        now: float,
        *,
        leaving: Failure | None = None,
        denied: Failure | None = None,
    ) -> list[PrefillEffect]:
        """Wait for an announced grant as long as its decode rank lives, or refuse it; ignore a repeated one.

        `leaving` and `denied` are as in `grant`.
        """
        delivery_id = DeliveryId(announce.room, peer.id, announce.generation)
        peer.used(announce.generation)
        is_granted = self._find(delivery_id)[1] is not None or delivery_id in self.unfenced
        if is_granted or self._asked(delivery_id) is not None:
            return []
        if announce.generation in peer.closed:
            return self._answer_closed(peer, delivery_id, is_wanted=True)
        if denied is not None:
            return self._deny(delivery_id, denied)
        until = now + announce.timeout_s + self._timeouts.lease_s  # its last message may be in flight
        announcement = Announcement(announce.generation, announce.num_decode_ranks, until)
        return self._ask(delivery_id, announcement, now, leaving)

    def cancel(self, peer: PeerId, cancel: Cancel, now: float, *, was_asked: bool = False) -> list[PrefillEffect]:
        """Stop a delivery; an unknown one, even if it `was_asked`, has no posts, so Drained is sent at once."""
        delivery_id = DeliveryId(cancel.room, peer, cancel.generation)
        room, delivery = self._find(delivery_id)
        if room is not None and delivery is not None:
            return self._follow(room, room.cancel(delivery, cancel), now)
        unfenced = self.unfenced.get(delivery_id)
        if unfenced is not None:
            return self._settle_unfenced(unfenced, unfenced.cancel(cancel))
        is_known = self._withdraw(delivery_id) or was_asked
        effects = self._give_up(delivery_id, cancel.failure, now, was_asked=True) if is_known else []
        self._context.peers.close(delivery_id, cancel.failure)  # its grant may be in flight, and must not be served
        return [*effects, *self._context.drained(delivery_id, cancel.failure)]

    def decline(
        self, peer: PeerId, decline: Decline, now: float, *, denied: Failure | None = None
    ) -> list[PrefillEffect]:
        """End a room that a decode rank declines, now or when the engine opens it; once for each generation.

        The rank need not be connected. When a decline is retransmitted, the room id may already belong to another try.
        The caller answers it.
        """
        delivery_id = DeliveryId(decline.room, peer, decline.generation)
        was_asked = isinstance(self._asked(delivery_id), Announcement) and self._withdraw(delivery_id)
        if denied is not None and not was_asked:
            return [self._count_denied(delivery_id, denied)]
        known = self._context.peers.find(peer)
        is_repeated = self._declined.is_repeated(delivery_id)
        if known is not None:
            is_repeated = decline.generation in known.closed
        if is_repeated and not was_asked:
            return []
        self._context.peers.close(delivery_id, decline.failure)
        self._declined.note(delivery_id)
        return self._give_up(delivery_id, decline.failure, now, was_asked=was_asked)

    def _give_up(
        self, delivery_id: DeliveryId, failure: Failure, now: float, *, was_asked: bool
    ) -> list[PrefillEffect]:
        """End a declined room, unless the decode rank has asked for it again since.

        Args:
            delivery_id: Declined delivery.
            failure: Why it was declined.
            now: The time.
            was_asked: Whether this rank had a request for it, so it cannot belong to a try before the one that failed.
        """
        number, peer, generation = delivery_id
        if self.waiting.find(number, peer) is not None:
            return []
        room = self.rooms.get(number)
        if room is None:
            failed = self._failed.get(number)
            if was_asked or failed is None or peer.rank in failed.told:  # it knew that the last try has failed
                self._declined.put(number, peer.rank, failure, now)
            self._tell(number, {peer.rank: failure})
            return []
        delivery = room.deliveries.get(peer.rank)
        if delivery is not None and delivery.id.peer == peer and delivery.id.generation < generation:
            self._declined.put(number, peer.rank, failure, now)  # it has given up this try, and declines the next
            return []
        if delivery is not None or peer in room.announced or room.is_of_other_instance(peer.rank):
            return []
        effects = self._follow(room, room.stop(Signal.FAILED, failure), now) if room.state.is_pending else []
        self._tell(number, {peer.rank: failure})
        return effects

    def acknowledged(self, peer: DecodePeer, ack: Ack, now: float) -> list[PrefillEffect]:
        """Handle the Ack of a decode rank, which has everything."""
        room, delivery = self._find(DeliveryId(ack.room, peer.id, ack.generation))
        if room is None or delivery is None:
            return [] if ack.generation in peer.closed else [CountAnomaly("ack_of_unknown_transfer", peer.id, ack.room)]
        return self._follow(room, room.acknowledged(delivery), now)

    def peer_lost(self, peer: PeerId, failure: Failure, now: float) -> list[PrefillEffect]:
        """Fail every room that a lost decode rank still waits for; a room that is not open fails when it is opened.

        The decode rank fails them as well. It, or its next incarnation, may ask for them again.
        """
        for number in self.waiting.rooms_of(peer):
            self.waiting.take(number, peer)
            self._declined.put(number, peer.rank, failure, now)
        effects: list[PrefillEffect] = []
        for number in self._by_peer.keys_of(peer):
            room = self.rooms[number]
            delivery = room.delivery_to(peer)
            if (delivery is not None and delivery.state.is_pending) or peer in room.announced:
                effects += self._follow(room, room.stop(Signal.FAILED, failure), now)
        return effects

    def peer_disconnected(self, peer: PeerId) -> None:
        """Return the credit of posts in flight to a disconnected rank.

        If the rank reconnects, they must not block other posts: they may take minutes to end.
        """
        for delivery in self._deliveries_to(peer):
            for seq in delivery.posted:
                self._release_credit(delivery.id, seq)

    def peer_restarted(self, peer: PeerId) -> list[PeerId]:
        """Forget unfenced deliveries to earlier incarnations of a decode rank, whose pages no longer exist.

        Returns:
            The earlier incarnations.
        """
        earlier = [other for other in self._unfenced_by_peer.peers if other.rank == peer.rank and other != peer]
        for other in earlier:
            self.peer_ended(other)
        return earlier

    def peer_ended(self, peer: PeerId) -> None:
        """Forget unfenced deliveries to a terminated incarnation of a decode rank."""
        for key in self._unfenced_by_peer.keys_of(peer):
            self._forget_unfenced(key)

    def is_fenced(self, peer: PeerId) -> bool:
        """Return whether no write to a decode rank can still land."""
        return all(delivery.is_fenced for delivery in self._deliveries_to(peer))

    def _deliveries_to(self, peer: PeerId) -> list[Delivery]:
        """Return the deliveries to a decode rank in open rooms, and the unfenced ones."""
        found = [self.rooms[number].delivery_to(peer) for number in self._by_peer.keys_of(peer)]
        unfenced = [self.unfenced[key] for key in self._unfenced_by_peer.keys_of(peer)]
        return [*(delivery for delivery in found if delivery is not None), *unfenced]

    def refuse_waiting(self, failure: Failure) -> list[PrefillEffect]:
        """Refuse all requests that wait for a room."""
        effects: list[PrefillEffect] = []
        for room, peer in self.waiting.all():
            asked = self.waiting.take(room, peer)
            effects += self._context.refuse(DeliveryId(room, peer, asked.generation), failure)
        return effects

    # Reports from the stages -----------------------------------------------------------------------------------------

    def data_ready(self, event: DataReady, now: float) -> list[PrefillEffect]:
        """Queue pieces whose data is ready; fail the room if the device has failed."""
        room, delivery = self._find(event.delivery)
        if room is None or delivery is None or not delivery.awaits(event.wait):
            return []
        if event.failure is not None:
            return self._follow(room, room.stop(Signal.FAILED, event.failure), now)
        return delivery.data_ready(now)

    def plan_finished(self, plan: PlanFinished, now: float) -> list[PrefillEffect]:
        """Post a finished plan, unless its delivery has ended."""
        room, delivery = self._find(plan.delivery)
        effects: list[PrefillEffect] = [DropPlan(plan.delivery, plan.seq)]
        if delivery is not None:
            effects = delivery.plan_finished(plan)
        for effect in effects:
            match effect:
                case DropPlan():
                    self._context.queue.end(plan.delivery, plan.seq, PieceEnd.DROPPED)
                case PostPlan(notice=notice) if notice.staged is not None:
                    self._context.slots.posted(plan.delivery, plan.seq, notice)
                case PostPlan():
                    self._context.queue.release_slots(plan.delivery, plan.seq)
        return effects if room is None else self._follow(room, [*effects, *room.review()], now)

    def piece_went_direct(self, event: PieceWentDirect) -> list[PrefillEffect]:
        """Take back the slots of a piece that was written directly."""
        self._context.slots.not_posted(event.delivery, event.seq)
        self._context.queue.release_slots(event.delivery, event.seq)
        delivery = self._find(event.delivery)[1]
        if delivery is not None:
            delivery.went_direct(event.seq)
        return []

    def plan_failed(self, event: PlanFailed, now: float) -> list[PrefillEffect]:
        """Fail the room of a piece that cannot be planned."""
        self._context.slots.not_posted(event.delivery, event.seq)
        self._context.queue.end(event.delivery, event.seq, PieceEnd.DROPPED)
        room, delivery = self._find(event.delivery)
        if room is None or delivery is None:
            unfenced = self.unfenced.get(event.delivery)
            if unfenced is None:
                return []
            unfenced.not_posted(event.seq)
            return self._settle_unfenced(unfenced, unfenced.post_ended(event.seq, is_written=False))
        delivery.not_posted(event.seq)
        stopped = room.stop(Signal.FAILED, event.failure)
        settled = delivery.post_ended(event.seq, is_written=False)
        return self._follow(room, [*stopped, *settled, *room.review()], now)

    def post_ended(self, event: PostEnded, now: float) -> list[PrefillEffect]:
        """Note that a post has ended."""
        self._context.queue.end(event.delivery, event.seq, PieceEnd.ENDED)
        self._context.slots.ended(event, now)
        room, delivery = self._find(event.delivery)
        if room is None or delivery is None:
            unfenced = self.unfenced.get(event.delivery)
            if unfenced is not None:
                effects = unfenced.post_ended(event.seq, is_written=False, lingers=event.lingers)
                return self._settle_unfenced(unfenced, effects)
            return [CountAnomaly("end_of_unknown_post", event.delivery.peer, event.delivery.room)]
        effects = room.post_ended(delivery, event.seq, event.failure, lingers=event.lingers)
        if delivery.has_posts:  # the next one gets the full time limit
            self._timers.clear(PostStalled(event.delivery))
            delivery.waits = delivery.waits._replace(post=False)
            room.changed[delivery.id.peer.rank] = delivery
        return self._follow(room, effects, now)

    def post_in_doubt(self, event: PostInDoubt, now: float) -> list[PrefillEffect]:
        """Note that the transport cannot tell whether a post has ended."""
        self._release_credit(event.delivery, event.seq)  # it must not block others until it ends
        room, delivery = self._find(event.delivery)
        if room is None or delivery is None:
            return [CountAnomaly("doubt_of_unknown_post", event.delivery.peer, event.delivery.room)]
        return self._follow(room, room.post_in_doubt(delivery, event.failure), now)

    # Timers ----------------------------------------------------------------------------------------------------------

    def expired(self, key: Hashable, now: float, late_s: float = 0.0) -> list[PrefillEffect]:
        """Handle an expired timer.

        Args:
            key: What it was set for.
            now: The time.
            late_s: How late it is handled.
        """
        match key:
            case RoomUnopened(number, peer):
                asked = self.waiting.take(number, peer)
                failure = self._error(FailureReason.UNKNOWN_ROOM, self._unopened(asked))
                return self._context.refuse(DeliveryId(number, peer, asked.generation), failure)
            case DeclineForgotten(number):
                self._declined.take(number)
            case DeliveryUnanswered(delivery_id):
                return self._retransmit(delivery_id, now)
            case RoomUndrained(number):
                room = self._known(number)
                return self._follow(room, room.in_doubt(), now)
            case RoomUnquiesced(number):
                detail = f"writes that have begun still need their pages after {self._timeouts.drain_s} s"
                failure = Failure(FailureReason.STALLED, Stage.SUBMIT, str(self._context.me.rank), detail)
                return self._fail(number, failure, now)
            case RoomUngranted(number):
                return self._ungranted(number, now, late_s)
            case GrantOverdue(number, peer):
                detail = f"decode rank {peer.rank} announced the room, and has given up since"
                return self._fail(number, self._error(FailureReason.DEADLINE, detail), now)
            case DeliveryDeadline(delivery_id):
                detail = f"decode rank {delivery_id.peer.rank} has given up since"
                return self._fail(delivery_id.room, self._error(FailureReason.DEADLINE, detail), now)
            case PostStalled(delivery_id):
                detail = f"a write to {delivery_id.peer.rank} is taking too long"
                failure = Failure(FailureReason.STALLED, Stage.SUBMIT, str(self._context.me.rank), detail)
                return self._fail(delivery_id.room, failure, now)
        return []

    def _ungranted(self, number: RoomId, now: float, late_s: float) -> list[PrefillEffect]:
        """Fail a room whose lease has ended, unless this process stood still, and so could not hear who asked."""
        grant_s = self._timeouts.grant_s
        if late_s > self._timeouts.lease_s:
            self._timers.set(RoomUngranted(number), now + min(late_s, grant_s))
            return []
        detail = f"not every decode rank asked for the pages within {grant_s} s"
        return self._fail(number, self._error(FailureReason.NOT_GRANTED, detail), now)

    def _release_credit(self, delivery: DeliveryId, seq: int) -> None:
        if not self._context.queue.is_in_doubt(delivery, seq):
            self._context.queue.end(delivery, seq, PieceEnd.IN_DOUBT)
            self._context.slots.in_doubt(delivery, seq)

    def _fail(self, number: RoomId, failure: Failure, now: float) -> list[PrefillEffect]:
        room = self._known(number)
        return self._follow(room, room.stop(Signal.FAILED, failure), now)

    def _retransmit(self, delivery_id: DeliveryId, now: float) -> list[PrefillEffect]:
        delivery = self._find(delivery_id)[1]
        if delivery is None:
            return []
        effects = delivery.retransmit()
        pause_s = self._timeouts.retransmit_s * min(2**delivery.num_retransmits, MAX_BACKOFF)
        self._timers.set(DeliveryUnanswered(delivery_id), now + pause_s)
        return effects

    # Grants and announcements ----------------------------------------------------------------------------------------

    def _asked(self, delivery_id: DeliveryId) -> Asked | None:
        """Find a request that waits for its room, or an announcement in an open room."""
        number, peer, generation = delivery_id
        room = self.rooms.get(number)
        asked = self.waiting.find(number, peer) if room is None else room.announced.get(peer)
        return asked if asked is not None and asked.generation == generation else None

    def _withdraw(self, delivery_id: DeliveryId) -> bool:
        """Remove the request that `_asked` finds; return whether there was one."""
        if self._asked(delivery_id) is None:
            return False
        room = self.rooms.get(delivery_id.room)
        if room is None:
            self.waiting.take(delivery_id.room, delivery_id.peer)
        else:
            room.withdraw(delivery_id.peer)
        return True

    def _ask(self, delivery_id: DeliveryId, asked: Asked, now: float, leaving: Failure | None) -> list[PrefillEffect]:
        """Serve a request, keep it until the engine opens the room, or refuse it."""
        self._declined.withdraw(delivery_id.room, delivery_id.peer.rank)
        room = self.rooms.get(delivery_id.room)
        if room is not None:
            return self._serve(room, delivery_id.peer, asked, now)
        return self._context.refuse(delivery_id, leaving) if leaving else self._keep(delivery_id, asked, now)

    def _keep(self, delivery_id: DeliveryId, asked: Asked, now: float) -> list[PrefillEffect]:
        """Keep a request until the engine opens the room; it replaces an earlier one of its decode rank."""
        number, peer, generation = delivery_id
        kept = self.waiting.find(number, peer)
        if kept is not None and kept.generation > generation:
            return []
        failed = self._failed.get(number)
        if failed is not None and peer.rank not in failed.told:
            failed.told[peer.rank] = None
            return self._context.refuse(delivery_id, failed.failure)
        taker = self._context.peers.taker(peer)
        has_place = self.waiting.has_place(taker, asked, kept)
        if kept is not None:
            self.waiting.take(number, peer)
            self._void(delivery_id, kept)
        if not has_place:
            limits = self._limits
            shared = f"limits.pending_grants={limits.pending_grants}, pending_grant_bytes={limits.pending_grant_bytes}"
            detail = (
                f"too many grants for rooms that are not open: {len(self.waiting)}, of which {shared} allow a share"
            )
            refused = self._context.refuse(delivery_id, self._error(FailureReason.CAPACITY, detail))
            return [CountAnomaly("grant_over_share", peer, number), *refused]
        self.waiting.put(number, peer, taker, asked, self._open_by(asked, now))
        return []

    def _void(self, delivery_id: DeliveryId, before: Asked) -> None:
        """Close the generation of a request that another one replaces."""
        if before.generation != delivery_id.generation:
            voided = delivery_id._replace(generation=before.generation)
            self._context.peers.close(voided, self._error(FailureReason.ABORTED, "replaced by a later grant"))

    def _serve(self, room: Room, peer: PeerId, asked: Asked, now: float) -> list[PrefillEffect]:
        """Serve a request in an open room; it replaces an earlier announcement."""
        delivery_id = DeliveryId(room.room, peer, asked.generation)
        announced = room.announced.get(peer)
        if announced is not None and announced.generation <= asked.generation:
            room.withdraw(peer)
            self._void(delivery_id, announced)
        refusal = room.refusal(peer, asked) or self._too_many_unfenced(peer)
        if refusal is not None:
            return self._follow(room, self._context.refuse(delivery_id, refusal), now)
        self._by_peer.add(peer, room.room)
        if isinstance(asked, Announcement):
            room.announce(peer, asked)
            return self._follow(room, [], now)
        return self._begin_delivery(room, peer, asked, now)

    def _begin_delivery(self, room: Room, peer: PeerId, grant: Grant, now: float) -> list[PrefillEffect]:
        effects = room.grant(peer, grant, self._context.peers[peer].link, now)
        delivery = room.deliveries[peer.rank]
        if delivery.state.is_pending:
            self._timers.set(DeliveryDeadline(delivery.id), now + grant.timeout_s)
        return self._follow(room, effects, now)

    def _too_many_unfenced(self, peer: PeerId) -> Failure | None:
        """Return why a request is refused because too many writes may still land; None if it is not."""
        most = max(self._limits.unfenced // UNFENCED_SHARE, 1)
        num_unfenced = self._unfenced_by_peer.count_of(peer)
        if num_unfenced < most and self._has_place_for_unfenced():
            return None
        found = f"{num_unfenced} ended transfers may still land at {peer.rank}, of {len(self.unfenced)} in all"
        detail = f"writes of {found}; limits.unfenced={self._limits.unfenced} allows {most} to one rank"
        return self._error(FailureReason.CAPACITY, detail)

    def _deny(self, delivery_id: DeliveryId, denied: Failure) -> list[PrefillEffect]:
        return [self._count_denied(delivery_id, denied), *self._context.refuse(delivery_id, denied)]

    def _count_denied(self, delivery_id: DeliveryId, denied: Failure) -> CountAnomaly:
        return CountAnomaly("room_denied", delivery_id.peer, delivery_id.room, denied.detail)

    def _answer_closed(self, peer: DecodePeer, delivery_id: DeliveryId, *, is_wanted: bool) -> list[PrefillEffect]:
        """Answer a late request: it is never served, whatever its decode rank has missed.

        `is_wanted` is set if the decode rank expects bytes from this rank.
        """
        closed = peer.closed.result(delivery_id.generation)
        if closed is None and is_wanted:
            too_old = self._error(FailureReason.PROTOCOL, "the grant is older than the oldest one that is remembered")
            failure = peer.failure_before(delivery_id.generation) or too_old
        elif closed is None or closed.failure is None:  # a rank with nothing to send may be asked late
            return []
        else:
            failure = closed.failure
        return self._context.refuse(delivery_id, failure)

    def _open_by(self, asked: Asked, now: float) -> float:
        """Return when the engine must have opened a room."""
        if isinstance(asked, Announcement):
            return asked.deadline
        return now + min(asked.timeout_s, self._timeouts.open_s)

    def _unopened(self, asked: Asked) -> str:
        if isinstance(asked, Announcement):
            return "prefill did not open the room while it was announced"
        return f"prefill did not open the room within {min(asked.timeout_s, self._timeouts.open_s)} s"

    def _tell(self, room: RoomId, ranks: dict[RankId, Failure]) -> None:
        """Note that decode ranks know of a room's failure: their next request is a new try."""
        failed, known = self._failed.get(room), self.rooms.get(room)
        told = failed.told if failed is not None else known.told if known is not None else {}  # or its posts continue
        if len(told) < self._limits.peers:
            told.update(dict.fromkeys(ranks))

    # Rooms -----------------------------------------------------------------------------------------------------------

    def _follow(self, room: Room, effects: list[PrefillEffect], now: float) -> list[PrefillEffect]:
        """Update the timers after a step of a room, and drop the room once it is over."""
        if room.is_quiescing:
            effects = [*effects, *room.report_quiesced()]
        for delivery in room.changed.values():
            waits = delivery.now_waits
            if waits != delivery.waits:
                self._watch_delivery(delivery, DeliveryWait(*waits), now)
        room.changed.clear()
        waits_for = room.now_waits
        if waits_for != room.waits:
            self._watch_room(room, RoomWait(*waits_for), now)
        if room.state.memory is Memory.QUARANTINED:
            self._quarantine.put(room.room, room.footprint)
        if room.state.is_safe and not room.state.is_pending:
            self._end(room)
        return effects

    def _watch_room(self, room: Room, waits: RoomWait, now: float) -> None:
        """Update the timers of a room to what it waits for now."""
        before, room.waits = room.waits, waits
        if waits.grants and not before.grants:
            self._timers.set_once(RoomUngranted(room.room), now + self._timeouts.grant_s)
        elif before.grants and not waits.grants:
            self._timers.clear(RoomUngranted(room.room))
        if waits.quiesce and not before.quiesce:
            self._timers.set_once(RoomUnquiesced(room.room), now + self._timeouts.drain_s)
        elif before.quiesce and not waits.quiesce:
            self._timers.clear(RoomUnquiesced(room.room))
        if waits.drain and not before.drain:
            self._timers.set_once(RoomUndrained(room.room), now + self._timeouts.drain_s)
        elif before.drain and not waits.drain:
            self._timers.clear(RoomUndrained(room.room))
        if waits.announced != before.announced:
            self._watch_announced(room.room, before, waits)

    def _watch_announced(self, number: RoomId, before: RoomWait, waits: RoomWait) -> None:
        for peer, _ in before.announced:
            self._timers.clear(GrantOverdue(number, peer))
        for peer, deadline in waits.announced:
            self._timers.set(GrantOverdue(number, peer), deadline)

    def _watch_delivery(self, delivery: Delivery, waits: DeliveryWait, now: float) -> None:
        """Update the timers of a delivery to what it waits for now."""
        before, delivery.waits = delivery.waits, waits
        if before.outcome and not waits.outcome:
            self._timers.clear(DeliveryDeadline(delivery.id))
        if waits.post and not before.post:
            progress_s = min(self._timeouts.progress_s, delivery.grant.progress_s)
            self._timers.set_once(PostStalled(delivery.id), now + progress_s)
        elif before.post and not waits.post:
            self._timers.clear(PostStalled(delivery.id))
        if waits.answer and not before.answer:
            self._timers.set_once(DeliveryUnanswered(delivery.id), now + self._timeouts.retransmit_s)
        elif before.answer and not waits.answer:
            self._timers.clear(DeliveryUnanswered(delivery.id))

    def taken(self, piece: Piece, now: float, *, is_posted: bool) -> list[PrefillEffect]:
        """Note that a piece has left the queue: the caller posts it now, or plans it first.

        Raises:
            LocalProtocolError: The delivery of the piece is unknown.
        """
        room, delivery = self._find(piece.delivery)
        if room is None or delivery is None:
            raise LocalProtocolError("piece of an unknown delivery", delivery=piece.delivery)
        return self._follow(room, delivery.taken(piece, is_posted=is_posted), now)

    def _end(self, room: Room) -> None:
        del self.rooms[room.room]
        self._by_peer.remove(room.room)
        self._quarantine.remove(room.room)
        for delivery in room.deliveries.values():
            self._context.peers.close(delivery.id, delivery.failure)
            if not delivery.is_fenced and self._context.peers.why_over(delivery.id.peer) is None:
                delivery.forget_pages()
                self.unfenced[delivery.id] = delivery
                self._unfenced_by_peer.add(delivery.id.peer, delivery.id)
        if room.failure is not None:
            self._note_failed(room.room, room.failure, dict.fromkeys((*room.deliveries, *room.told)))

    def _note_failed(self, room: RoomId, failure: Failure, told: dict[RankId, None]) -> None:
        self._failed[room] = _FailedRoom(failure, told)
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _settle_unfenced(self, delivery: Delivery, effects: list[PrefillEffect]) -> list[PrefillEffect]:
        if delivery.is_fenced:
            self._forget_unfenced(delivery.id)
        return effects

    def _forget_unfenced(self, key: DeliveryId) -> None:
        del self.unfenced[key]
        self._unfenced_by_peer.remove(key)

    def _has_place_for_unfenced(self) -> bool:
        """Return whether there is place for another unfenced delivery.

        Those to disconnected ranks are dropped for it, oldest first, unless that would not be enough.
        """
        limit, peers = self._limits.unfenced, self._context.peers
        if len(self.unfenced) < limit:
            return True
        counts = self.count_unfenced()
        if limit <= sum(count for peer, count in counts.items() if peer in peers):
            return False
        for peer in counts:
            if len(self.unfenced) >= limit and peer not in peers:
                self.peer_ended(peer)
                peers.end(peer, "writes to this incarnation are no longer tracked, because too many have not ended")
        return True

    def count_unfenced(self) -> dict[PeerId, int]:
        """Return the number of unfenced deliveries by decode rank."""
        return {peer: self._unfenced_by_peer.count_of(peer) for peer in self._unfenced_by_peer.peers}

    def _find(self, delivery_id: DeliveryId) -> tuple[Room | None, Delivery | None]:
        room = self.rooms.get(delivery_id.room)
        delivery = room.deliveries.get(delivery_id.peer.rank) if room else None
        if delivery is None or delivery.id != delivery_id:
            return None, None
        return room, delivery

    def _known(self, number: RoomId) -> Room:
        room = self.rooms.get(number)
        if room is None:
            raise LocalProtocolError("room is not open", room=number)
        return room

    def _error(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.ENQUEUE, str(self._context.me.rank), detail)
