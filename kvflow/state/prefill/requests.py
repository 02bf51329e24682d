"""What decode ranks ask of a prefill rank: grants, announcements, cancels and declines. Pure.

A request for a room that the engine has not opened waits, is answered with the failure of the room, or is refused.
"""

from kvflow.errors import FailureReason
from kvflow.room import RoomId
from kvflow.state.effects import CountAnomaly, PrefillEffect
from kvflow.state.events import DeliveryId, SendOpened
from kvflow.state.prefill.deadlines import DeclineForgotten, PrefillTimer, RoomUnopened
from kvflow.state.prefill.delivery import SendContext
from kvflow.state.prefill.peers import DecodePeer
from kvflow.state.prefill.rooms import Rooms
from kvflow.state.prefill.waiting import Announcement, Asked, DeclinedRooms, FailedRooms, WaitingRooms
from kvflow.state.timers import Timers
from kvflow.wire.messages import Announce, Cancel, Decline, Failure, Grant, PeerId, RankId

__all__ = ["Requests"]


class Requests:
    """Requests of decode ranks, and `waiting`, those for rooms that are not open yet. Methods return effects."""

    def __init__(self, context: SendContext, rooms: Rooms, failed: FailedRooms, timers: Timers[PrefillTimer]) -> None:
        self._context = context
        self._error = context.error
        self._rooms = rooms
        self._failed = failed
        self._timeouts = context.settings.timeouts
        self._limits = context.settings.limits
        self.waiting = WaitingRooms(timers, self._limits)
        self._declined = DeclinedRooms(timers, self._timeouts.open_s)

    # Requests from the engine ----------------------------------------------------------------------------------------

    def open_room(self, event: SendOpened, now: float) -> list[PrefillEffect]:
        """Open a room, and serve the requests that have arrived before. Errors are as in `Rooms.open`."""
        room, opened = event.room, self._rooms.open(event)
        effects: list[PrefillEffect] = []
        for peer in self.waiting.peers(room):
            asked_at = self.waiting.asked_at(room, peer)
            effects += self._rooms.serve(opened, peer, self.waiting.take_request(room, peer), now, asked_at)
        declined = self._declined.take_declines(room)
        if declined:
            effects += self._rooms.fail(opened, next(iter(declined.values())), now)
            self._note_told(room, declined)
        return effects

    def refuse_unopened(self, room: RoomId, failure: Failure) -> list[PrefillEffect]:
        """Refuse the requests for a room that the engine could not open; later ones are refused when they arrive."""
        if self._rooms.rooms.get(room) is not None:
            return []
        told: dict[RankId, None] = {}
        effects: list[PrefillEffect] = []
        for peer in self.waiting.peers(room):
            asked = self.waiting.take_request(room, peer)
            effects += self._context.refuse(DeliveryId(room, peer, asked.generation), failure)
            told[peer.rank] = None
        self._failed.note(room, failure, told)
        return effects

    def refuse_waiting(self, failure: Failure) -> list[PrefillEffect]:
        """Refuse all requests that wait for a room."""
        effects: list[PrefillEffect] = []
        for room, peer in self.waiting.all():
            asked = self.waiting.take_request(room, peer)
            effects += self._context.refuse(DeliveryId(room, peer, asked.generation), failure)
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
        room, delivery = self._rooms.find_delivery(delivery_id)
        if room is not None and delivery is not None:
            return self._rooms.follow(room, delivery.retransmit(), now)
        unfenced = self._rooms.unfenced.find(delivery_id)
        if unfenced is not None:
            return unfenced.retransmit()
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

    def taker(self, peer: PeerId) -> str:
        """Return the principal to whose share the requests of a decode rank count; empty if it is not connected."""
        return self._context.peers.taker(peer) if peer in self._context.peers else ""

    def has_place(self, peer: PeerId, num_bytes: int) -> bool:
        """Return whether page tables of a decode rank can be kept until their room is open."""
        return peer in self._context.peers and self.waiting.has_bytes(self._context.peers.taker(peer), num_bytes)

    def needs_pages(self, connection: bytes, grant: Grant) -> bool:
        """Return whether a grant whose pages were not sent with it can be served only once they are here.

        Otherwise its sender has no handshake, or it is a repetition, or late.
        """
        peer = self._context.peers.at(connection)
        if peer is None:
            return False
        delivery_id = DeliveryId(grant.room, peer.id, grant.generation)
        is_known = self._rooms.find_delivery(delivery_id)[1] is not None or delivery_id in self._rooms.unfenced
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
        is_granted = self._rooms.find_delivery(delivery_id)[1] is not None or delivery_id in self._rooms.unfenced
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
        room, delivery = self._rooms.find_delivery(delivery_id)
        if room is not None and delivery is not None:
            return self._rooms.follow(room, room.cancel(delivery, cancel), now)
        unfenced = self._rooms.unfenced.find(delivery_id)
        if unfenced is not None:
            return self._rooms.unfenced.settle(unfenced, unfenced.cancel(cancel))
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

        If it `was_asked`, this rank had a request for it, so it cannot belong to a try before the one that failed.
        """
        number, peer, generation = delivery_id
        if self.waiting.find(number, peer) is not None:
            return []
        room = self._rooms.rooms.get(number)
        if room is None:
            failed = self._failed.find(number)
            if was_asked or failed is None or peer.rank in failed.told:  # it knew that the last try has failed
                self._declined.add_decline(number, peer.rank, failure, now)
            self._note_told(number, {peer.rank: failure})
            return []
        delivery = room.deliveries.get(peer.rank)
        if delivery is not None and delivery.id.peer == peer and delivery.id.generation < generation:
            # It has given up this try, and declines the next one.
            self._declined.add_decline(number, peer.rank, failure, now)
            return []
        if delivery is not None or peer in room.announced or room.is_of_other_instance(peer.rank):
            return []
        effects = self._rooms.fail(room, failure, now) if room.state.is_pending else []
        self._note_told(number, {peer.rank: failure})
        return effects

    def peer_lost(self, peer: PeerId, failure: Failure, now: float) -> list[PrefillEffect]:
        """Fail every room that a lost decode rank still waits for; a room that is not open fails when it is opened.

        The decode rank fails them as well. It, or its next incarnation, may ask for them again.
        """
        for number in self.waiting.rooms_of(peer):
            self.waiting.take_request(number, peer)
            self._declined.add_decline(number, peer.rank, failure, now)
        return self._rooms.peer_lost(peer, failure, now)

    # Timers ----------------------------------------------------------------------------------------------------------

    def expired(self, key: RoomUnopened | DeclineForgotten) -> list[PrefillEffect]:
        """Handle an expired timer."""
        if isinstance(key, DeclineForgotten):
            self._declined.take_declines(key.room)
            return []
        asked = self.waiting.take_request(key.room, key.peer)
        limit = "while it was announced"
        if isinstance(asked, Grant):
            limit = f"within {min(asked.timeout_s, self._timeouts.open_s)} s"
        failure = self._error(FailureReason.UNKNOWN_ROOM, f"prefill did not open the room {limit}")
        return self._context.refuse(DeliveryId(key.room, key.peer, asked.generation), failure)

    # Requests that wait ----------------------------------------------------------------------------------------------

    def _asked(self, delivery_id: DeliveryId) -> Asked | None:
        """Find a request that waits for its room, or an announcement in an open room."""
        number, peer, generation = delivery_id
        room = self._rooms.rooms.get(number)
        asked = self.waiting.find(number, peer) if room is None else room.announced.get(peer)
        return asked if asked is not None and asked.generation == generation else None

    def _withdraw(self, delivery_id: DeliveryId) -> bool:
        """Remove the request that `_asked` finds; return whether there was one."""
        if self._asked(delivery_id) is None:
            return False
        room = self._rooms.rooms.get(delivery_id.room)
        if room is None:
            self.waiting.take_request(delivery_id.room, delivery_id.peer)
        else:
            room.withdraw(delivery_id.peer)
        return True

    def _ask(self, delivery_id: DeliveryId, asked: Asked, now: float, leaving: Failure | None) -> list[PrefillEffect]:
        """Serve a request, keep it until the engine opens the room, or refuse it."""
        self._declined.withdraw(delivery_id.room, delivery_id.peer.rank)
        room = self._rooms.rooms.get(delivery_id.room)
        if room is not None:
            return self._rooms.serve(room, delivery_id.peer, asked, now)
        return self._context.refuse(delivery_id, leaving) if leaving else self._keep(delivery_id, asked, now)

    def _keep(self, delivery_id: DeliveryId, asked: Asked, now: float) -> list[PrefillEffect]:
        """Keep a request until the engine opens the room; it replaces an earlier one of its decode rank."""
        number, peer, generation = delivery_id
        kept = self.waiting.find(number, peer)
        if kept is not None and kept.generation > generation:
            return []
        failure = self._failed.tell(number, peer.rank)
        if failure is not None:
            return self._context.refuse(delivery_id, failure)
        taker = self._context.peers.taker(peer)
        has_place = self.waiting.has_place(taker, asked, kept)
        if kept is not None:
            self.waiting.take_request(number, peer)
            self._rooms.close_replaced(delivery_id, kept)
        if not has_place:
            limits = self._limits
            shared = f"{limits.pending_grants} grants and limits.pending_grant_bytes={limits.pending_grant_bytes}"
            detail = (
                f"too many grants for rooms that are not open: {len(self.waiting)}, of which {shared} allow a share"
            )
            return self._context.refuse(delivery_id, self._error(FailureReason.CAPACITY, detail))
        until = asked.deadline if isinstance(asked, Announcement) else now + min(asked.timeout_s, self._timeouts.open_s)
        self.waiting.add_request(number, peer, taker, asked, now, until)
        return []

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

    def _note_told(self, room: RoomId, ranks: dict[RankId, Failure]) -> None:
        """Note that decode ranks know of a room's failure: their next request is a new try."""
        failed, known = self._failed.find(room), self._rooms.rooms.get(room)
        told = failed.told if failed is not None else known.told if known is not None else {}  # or its posts continue
        if len(told) < self._limits.peers:
            told.update(dict.fromkeys(ranks))
