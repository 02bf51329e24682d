"""The open rooms of one prefill rank. Pure."""

from typing import assert_never

from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, PlanError, Stage
from kvflow.room import RoomId
from kvflow.state.by_peer import ByPeer
from kvflow.state.effects import CountAnomaly, PrefillEffect
from kvflow.state.events import (
    Chunk,
    DeliveryId,
    LeaseStarted,
    QuiesceAsked,
    ReclaimAsked,
    SendAborted,
    SendOpened,
)
from kvflow.state.prefill.deadlines import (
    DeliveryDeadline,
    DeliveryUnanswered,
    GrantOverdue,
    PostStalled,
    PrefillTimer,
    RoomDeadline,
    RoomUndrained,
    RoomUngranted,
    RoomUnquiesced,
)
from kvflow.state.prefill.delivery import Delivery, SendContext
from kvflow.state.prefill.peers import DecodePeer
from kvflow.state.prefill.room import Room
from kvflow.state.prefill.unfenced import UnfencedDeliveries
from kvflow.state.prefill.waiting import Announcement, Asked, FailedRooms
from kvflow.state.quarantine import Footprint, Quarantine
from kvflow.state.tables import Memory, Signal
from kvflow.state.timers import Timers
from kvflow.wire.messages import Ack, Failure, PeerId

__all__ = ["Rooms"]


class Rooms:
    """The table of open rooms, and `unfenced`, what is left of ended ones. Methods return effects."""

    def __init__(
        self, context: SendContext, failed: FailedRooms, timers: Timers[PrefillTimer], quarantine: Quarantine
    ) -> None:
        self.rooms: dict[RoomId, Room] = {}
        self._by_peer: ByPeer[RoomId] = ByPeer()
        self._context = context
        self._error = context.error
        self._failed = failed
        self._timeouts = context.settings.timeouts
        self._limits = context.settings.limits
        self._timers = timers
        self._quarantine = quarantine
        self.unfenced = UnfencedDeliveries(context.peers, self._limits.unfenced)

    def find_delivery(self, delivery_id: DeliveryId) -> tuple[Room | None, Delivery | None]:
        """Find a delivery in an open room, and the room."""
        room = self.rooms.get(delivery_id.room)
        delivery = room.deliveries.get(delivery_id.peer.rank) if room else None
        if delivery is None or delivery.id != delivery_id:
            return None, None
        return room, delivery

    # Requests from the engine ----------------------------------------------------------------------------------------

    def open(self, event: SendOpened) -> Room:
        """Open a room.

        Raises:
            LocalProtocolError: The room is open, or its pages are in quarantine.
            CapacityExceeded: Too many rooms are open, too much memory is in quarantine, or too many writes may still
                land.
        """
        room = event.room
        if room in self.rooms:
            raise LocalProtocolError("room is in use", room=room, memory=self.rooms[room].state.memory.value)
        if len(self.rooms) >= self._limits.transfers:
            raise CapacityExceeded("too many rooms are open", limit=self._limits.transfers, setting="limits.transfers")
        self._quarantine.check_admission()
        self.unfenced.check_place()
        self._failed.forget(room)
        opened = self.rooms[room] = Room(self._context, event)
        return opened

    def is_open(self, room: RoomId) -> bool:
        """Return whether the engine has opened a room."""
        return room in self.rooms

    def peers_of(self, room: RoomId) -> list[PeerId]:
        """Return the decode ranks that have granted a room."""
        known = self.rooms.get(room)
        return [] if known is None else [delivery.id.peer for delivery in known.deliveries.values()]

    def follow_engine(
        self, event: QuiesceAsked | LeaseStarted | ReclaimAsked | SendAborted, now: float
    ) -> list[PrefillEffect]:
        """Do what the engine asks for a room; raises as `offer`."""
        match event:
            case QuiesceAsked():
                return self.quiesce(event.room, now)
            case LeaseStarted():
                return self.start_lease(event.room, now)
            case ReclaimAsked():
                return self.reclaim(event.room, event.failure, now, with_announced=event.with_announced)
            case SendAborted():
                return self.abort(event.room, event.failure, now)

    def offer(self, room: RoomId, chunk: Chunk, footprint: Footprint, now: float) -> list[PrefillEffect]:
        """Take a chunk from the engine.

        Raises:
            LocalProtocolError: The room is not open, or does not accept this chunk.
        """
        known = self._known(room)
        return self.follow(known, known.offer(chunk, footprint, now), now)

    def quiesce(self, room: RoomId, now: float) -> list[PrefillEffect]:
        """Stop reading the pages of a room, which continues later. It must be open, as for `offer`."""
        known = self._known(room)
        known.quiesce()
        return self.follow(known, [], now)

    def start_lease(self, room: RoomId, now: float) -> list[PrefillEffect]:
        """Start the lease of a room, whose ticket has left; it may have ended."""
        known = self.rooms.get(room)
        if known is None:
            return []
        known.start_lease()
        return self.follow(known, [], now)

    def reclaim(self, room: RoomId, failure: Failure, now: float, *, with_announced: bool) -> list[PrefillEffect]:
        """End a room whose pages the engine needs, unless a decode rank has granted or, by default, announced."""
        known = self.rooms.get(room)
        if known is None or known.deliveries or (known.announced and not with_announced):
            return []
        return self.fail(known, failure, now)

    def abort(self, room: RoomId, failure: Failure, now: float) -> list[PrefillEffect]:
        """End a room because its engine aborted it."""
        known = self.rooms.get(room)
        return self.follow(known, known.stop(Signal.ABORTED, failure), now) if known else []

    def release(self, room: RoomId, now: float) -> list[PrefillEffect]:
        """Release the pages of a room in quarantine without a proof.

        Raises:
            LocalProtocolError: The room is not in quarantine.
        """
        known = self.rooms.get(room)
        if known is None or known.state.memory is not Memory.QUARANTINED:
            raise LocalProtocolError("room is not in quarantine", room=room)
        return self.follow(known, known.release(), now)

    def close(self, failure: Failure, now: float) -> list[PrefillEffect]:
        """Abort all rooms."""
        effects: list[PrefillEffect] = []
        for room in list(self.rooms.values()):
            effects += self.follow(room, room.stop(Signal.ABORTED, failure), now)
        return effects

    # Requests from decode ranks --------------------------------------------------------------------------------------

    def serve(
        self, room: Room, peer: PeerId, asked: Asked, now: float, asked_at: float | None = None
    ) -> list[PrefillEffect]:
        """Serve a request, which arrived now or at `asked_at`, in an open room; it replaces an earlier announcement."""
        delivery_id = DeliveryId(room.room, peer, asked.generation)
        announced = room.announced.get(peer)
        if announced is not None and announced.generation <= asked.generation:
            room.withdraw(peer)
            self.close_replaced(delivery_id, announced)
        refusal = room.refusal(peer, asked)
        if refusal is None and (excess := self.unfenced.excess(peer)) is not None:
            refusal = self._error(FailureReason.CAPACITY, excess)
        if refusal is not None:
            return self.follow(room, self._context.refuse(delivery_id, refusal), now)
        self._by_peer.add(peer, room.room)
        asked_at = now if asked_at is None else asked_at
        if isinstance(asked, Announcement):
            room.announce(peer, asked)
            return self.follow(room, [], now)
        try:
            effects = room.grant(peer, asked, self._context.peers[peer].link, now, asked_at)
        except PlanError as error:
            failure = self._error(FailureReason.INVALID_PAGES, str(error), Stage.PLANNING)
            effects = [*self._context.refuse(delivery_id, failure), *room.stop(Signal.FAILED, failure)]
        return self.follow(room, effects, now)

    def close_replaced(self, delivery_id: DeliveryId, before: Asked) -> None:
        """Close the generation of a request that another one replaces."""
        if before.generation != delivery_id.generation:
            voided = delivery_id._replace(generation=before.generation)
            self._context.peers.close(voided, self._error(FailureReason.ABORTED, "replaced by a later grant"))

    def acknowledged(self, peer: DecodePeer, ack: Ack, now: float) -> list[PrefillEffect]:
        """Handle the Ack of a decode rank, which has everything."""
        room, delivery = self.find_delivery(DeliveryId(ack.room, peer.id, ack.generation))
        if room is None or delivery is None:
            return [] if ack.generation in peer.closed else [CountAnomaly("ack_of_unknown_transfer", peer.id, ack.room)]
        return self.follow(room, delivery.acknowledged(), now)

    def peer_lost(self, peer: PeerId, failure: Failure, now: float) -> list[PrefillEffect]:
        """Fail every room that a lost decode rank still waits for, or of which it has not acknowledged everything."""
        effects: list[PrefillEffect] = []
        for number in self._by_peer.keys_of(peer):
            room = self.rooms[number]
            delivery = room.delivery_to(peer)
            is_waiting = delivery is not None and delivery.state.is_pending and not delivery.has_arrived
            if is_waiting or peer in room.announced:
                effects += self.fail(room, failure, now)
        return effects

    def peer_disconnected(self, peer: PeerId, now: float) -> None:
        """Return the credit of posts to a disconnected rank: they may take minutes, and it may reconnect before."""
        for delivery in self._deliveries_to(peer):
            for seq in delivery.posted:
                self._context.release_credit(delivery.id, seq, now)
        self.unfenced.peer_disconnected(peer)

    def is_fenced(self, peer: PeerId) -> bool:
        """Return whether no write to a decode rank can still land."""
        return all(delivery.is_fenced for delivery in self._deliveries_to(peer))

    def _deliveries_to(self, peer: PeerId) -> list[Delivery]:
        """Return the deliveries to a decode rank in open rooms, and the unfenced ones."""
        found = [self.rooms[number].delivery_to(peer) for number in self._by_peer.keys_of(peer)]
        return [*(delivery for delivery in found if delivery is not None), *self.unfenced.deliveries_to(peer)]

    # Timers ----------------------------------------------------------------------------------------------------------

    def expired(self, key: RoomDeadline, now: float, late_s: float = 0.0) -> list[PrefillEffect]:
        """Handle an expired timer, `late_s` after it was due."""
        match key:
            case DeliveryUnanswered(delivery_id):
                room, delivery = self.find_delivery(delivery_id)
                return [] if room is None or delivery is None else self.follow(room, delivery.retransmit(), now)
            case RoomUndrained(number):
                room = self._known(number)
                room.in_doubt()
                return self.follow(room, [], now)
            case RoomUnquiesced(number):
                detail = f"writes that have begun still need their pages after {self._timeouts.drain_s} s"
                return self.fail(self._known(number), self._error(FailureReason.STALLED, detail, Stage.SUBMIT), now)
            case RoomUngranted(number):
                return self._ungranted(number, now, late_s)
            case GrantOverdue(number, peer):
                detail = f"decode rank {peer.rank} announced the room, and has given up since"
                return self.fail(self._known(number), self._error(FailureReason.DEADLINE, detail), now)
            case DeliveryDeadline(delivery_id):
                detail = f"decode rank {delivery_id.peer.rank} has given up since"
                return self.fail(self._known(delivery_id.room), self._error(FailureReason.DEADLINE, detail), now)
            case PostStalled(delivery_id):
                detail = f"a write to {delivery_id.peer.rank} is taking too long"
                failure = self._error(FailureReason.STALLED, detail, Stage.SUBMIT)
                return self.fail(self._known(delivery_id.room), failure, now)
            case _:
                assert_never(key)

    def _ungranted(self, number: RoomId, now: float, late_s: float) -> list[PrefillEffect]:
        """Fail a room whose lease has ended, unless this process stood still, and so could not hear who asked."""
        grant_s = self._timeouts.grant_s
        if late_s > self._timeouts.lease_s:
            self._timers.set(RoomUngranted(number), now + min(late_s, grant_s))
            return []
        room = self._known(number)
        detail = f"{room.told_asked()} asked for the room within {grant_s} s"
        return self.fail(room, self._error(FailureReason.NOT_GRANTED, detail), now)

    # Rooms -----------------------------------------------------------------------------------------------------------

    def fail(self, room: Room, failure: Failure, now: float) -> list[PrefillEffect]:
        """End a room, which has failed."""
        return self.follow(room, room.stop(Signal.FAILED, failure), now)

    def follow(self, room: Room, effects: list[PrefillEffect], now: float) -> list[PrefillEffect]:
        """Review a room after a step, update its timers, and drop it once it is over."""
        if not room.has_changed:
            return effects
        effects = [*effects, *room.review()]
        changed: list[Room | Delivery] = [*room.changed.values(), room]
        for waiting in changed:
            waiting.deadlines = self._timers.sync(waiting.deadlines, waiting.deadlines_from(now))
        room.changed.clear()
        room.has_changed = False
        if room.state.memory is Memory.QUARANTINED:
            self._quarantine.add_pages(room.room, room.footprint)
        if room.state.is_safe and not room.state.is_pending:
            self._end_room(room)
        return effects

    def _end_room(self, room: Room) -> None:
        del self.rooms[room.room]
        self._by_peer.remove(room.room)
        self._quarantine.remove(room.room)
        for delivery in room.deliveries.values():
            self._context.peers.close(delivery.id, delivery.failure)
            if not delivery.is_fenced and self._context.peers.why_over(delivery.id.peer) is None:
                self.unfenced.add(delivery)
        if room.failure is not None:
            self._failed.note(room.room, room.failure, (*room.deliveries, *room.told))

    def _known(self, number: RoomId) -> Room:
        room = self.rooms.get(number)
        if room is None:
            raise LocalProtocolError("room is not open", room=number)
        return room
