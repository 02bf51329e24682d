"""All rooms that one prefill rank sends: which exist, who asked for them, what they still wait for."""

from collections.abc import Hashable
from typing import NamedTuple

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, Stage
from kvflow.state.acquaintances import Acquaintances
from kvflow.state.deadlines import Deadlines
from kvflow.state.effects import CountOddity, DropPlan, Effect, SendMessage
from kvflow.state.events import Chunk, DeliveryId, PlanFinished, PostSettled
from kvflow.state.overdue import Pending, RoomPending, Stalled, Unanswered, Undelivered, Undrained, Ungranted, Unopened
from kvflow.state.quarantine import Footprint, Quarantine
from kvflow.state.sender import Delivery, Sender
from kvflow.state.tables import Memory, Signal
from kvflow.state.unproved import Unproved
from kvflow.state.waiting import WaitingGrants
from kvflow.state.words import drained, failed
from kvflow.wire.messages import Cancel, Failure, Grant, PeerId, RankId, Received

__all__ = ["Senders"]

MAX_TOMBSTONES = 4_096
"""Failed rooms that are remembered, so that a grant that comes too late is answered at once."""

MAX_BACKOFF = 8
"""Words are repeated less and less often, down to this many times the first pause."""


class _Tombstone(NamedTuple):
    """A room that has failed.

    Attributes:
        told: Decode ranks that know, or whose former life did; what they ask for next is another try.
    """

    failure: Failure
    told: dict[RankId, None]


class Senders:
    """The table of rooms; every method returns what is to be done."""

    def __init__(
        self,
        me: PeerId,
        timeouts: Timeouts,
        limits: Limits,
        deadlines: Deadlines[Hashable],
        quarantine: Quarantine,
    ) -> None:
        self.rooms: dict[int, Sender] = {}
        self.waiting = WaitingGrants()
        self._me = me
        self._timeouts = timeouts
        self._limits = limits
        self._deadlines = deadlines
        self._quarantine = quarantine
        self.acquaintances = Acquaintances()
        self._tombstones: dict[int, _Tombstone] = {}
        self.unproved = Unproved()

    def open(self, room: int, now: float) -> list[Effect]:
        """Start a room; grants that came before are served now.

        Raises:
            LocalProtocolError: The room is open, or its pages are in quarantine.
            CapacityExceeded: Too many rooms are open, or too much is in quarantine.
        """
        if room in self.rooms:
            raise LocalProtocolError("room is in use", room=room, memory=self.rooms[room].state.memory.value)
        if len(self.rooms) >= self._limits.transfers:
            raise CapacityExceeded("too many rooms are open", limit=self._limits.transfers)
        self._quarantine.check_admission()
        self._tombstones.pop(room, None)
        sender = self.rooms[room] = Sender(self._me, room)
        effects: list[Effect] = []
        for peer in self.waiting.of_room(room):
            effects += self._serve(sender, peer, self._forget_waiting(room, peer), now)
        return effects

    def offer(self, room: int, chunk: Chunk, footprint: Footprint, now: float) -> list[Effect]:
        """Take a chunk from the engine."""
        sender = self._known(room)
        return self._follow(sender, sender.offer(chunk, footprint), now)

    def abort(self, room: int, failure: Failure, now: float) -> list[Effect]:
        """End a room because its engine gave it up."""
        sender = self.rooms.get(room)
        return self._follow(sender, sender.stop(Signal.ABORTED, failure), now) if sender else []

    def grant(self, peer: PeerId, grant: Grant, now: float, *, leaving: Failure | None = None) -> list[Effect]:
        """Serve a grant, keep it until the engine opens the room, or refuse it; answer a repeated one again.

        No room will be opened any more if there is a reason for `leaving`.
        """
        delivery_id = DeliveryId(grant.room, peer, grant.generation)
        self.acquaintances.asked(peer, grant.generation)
        delivery = self._find(delivery_id)[1] or self.unproved.find(delivery_id)
        if delivery is not None:
            return delivery.repeat()
        kept = self.waiting.find(grant.room, peer)
        if kept is not None and kept.generation == grant.generation:  # it may outlive the memory of later ones
            return []
        if self.acquaintances.is_over(peer, grant.generation):
            return self._answer_again(peer, grant)
        sender = self.rooms.get(grant.room)
        if sender is not None:
            return self._serve(sender, peer, grant, now)
        return self.refuse(peer, grant, leaving) if leaving else self._keep(peer, grant, now)

    def _keep(self, peer: PeerId, grant: Grant, now: float) -> list[Effect]:
        """Keep a grant until the engine opens the room; an older one of the same decode rank is void."""
        kept = self.waiting.find(grant.room, peer)
        if kept is not None and kept.generation >= grant.generation:
            return []
        tombstone = self._tombstones.get(grant.room)
        if tombstone is not None and peer.rank not in tombstone.told:
            tombstone.told[peer.rank] = None
            return self.refuse(peer, grant, tombstone.failure)
        if len(self.waiting) >= self._limits.pending_grants:
            detail = f"{self._limits.pending_grants} grants wait for their rooms"
            return self.refuse(peer, grant, self._error(FailureReason.CAPACITY, detail))
        if kept is not None:
            self.acquaintances.end(
                DeliveryId(grant.room, peer, kept.generation), self._error(FailureReason.ABORTED, "asked anew")
            )
        self.waiting.put(peer, grant)
        self._deadlines.set(Unopened(grant.room, peer), now + self._time_to_open(grant))
        return []

    def refuse(self, peer: PeerId, grant: Grant, failure: Failure) -> list[Effect]:
        """Answer a grant that will never be served, so that nothing was or will be written for it."""
        delivery_id = DeliveryId(grant.room, peer, grant.generation)
        self.acquaintances.end(delivery_id, failure)
        return [SendMessage(peer, failed(delivery_id, self._me, failure, drained=True))]

    def cancel(self, peer: PeerId, cancel: Cancel, now: float) -> list[Effect]:
        """Stop a delivery. Of one that is not known nothing is posted, which is all that Drained says."""
        delivery_id = DeliveryId(cancel.room, peer, cancel.generation)
        sender, delivery = self._find(delivery_id)
        if sender is not None and delivery is not None:
            return self._follow(sender, sender.cancel(delivery, cancel.failure), now)
        unproved = self.unproved.find(delivery_id)
        if unproved is not None:
            return unproved.cancel(cancel.failure)
        waiting = self.waiting.find(cancel.room, peer)
        if waiting is not None and waiting.generation == cancel.generation:
            self._forget_waiting(cancel.room, peer)
        self.acquaintances.end(delivery_id, cancel.failure)  # its grant may still be on the way, and must find it over
        return [SendMessage(peer, drained(delivery_id, self._me, cancel.failure))]

    def received(self, peer: PeerId, received: Received, now: float) -> list[Effect]:
        """Note that a decode rank has everything."""
        sender, delivery = self._find(DeliveryId(received.room, peer, received.generation))
        if sender is None or delivery is None:
            if self.acquaintances.is_over(peer, received.generation):
                return []
            return [CountOddity("received_of_unknown_transfer", peer, received.room)]
        return self._follow(sender, sender.received(delivery), now)

    def plan_finished(self, plan: PlanFinished, now: float) -> list[Effect]:
        """Post what was planned, unless its delivery has ended."""
        sender, delivery = self._find(plan.delivery)
        if sender is None or delivery is None:
            return [DropPlan(plan.delivery, plan.seq)]
        return self._follow(sender, sender.plan_finished(delivery, plan), now)

    def plan_failed(self, delivery_id: DeliveryId, failure: Failure, now: float) -> list[Effect]:
        """End the room of a chunk that cannot be planned."""
        sender = self._find(delivery_id)[0]
        return self._follow(sender, sender.stop(Signal.FAILED, failure), now) if sender else []

    def post_settled(self, event: PostSettled, now: float) -> list[Effect]:
        """Note that a post has ended."""
        sender, delivery = self._find(event.delivery)
        if sender is None or delivery is None:
            unproved = self.unproved.find(event.delivery)
            if unproved is not None:
                return self.unproved.post_settled(unproved, event.seq, lingers=event.lingers)
            return [CountOddity("settled_unknown_post", event.delivery.peer, event.delivery.room)]
        effects = sender.post_settled(delivery, event.seq, event.failure, lingers=event.lingers)
        if delivery.has_posts:  # the next one has all its time, from now on
            self._deadlines.clear(Stalled(event.delivery))
            delivery.watched = delivery.watched._replace(post=False)
        return self._follow(sender, effects, now)

    def is_doubted(self, delivery_id: DeliveryId) -> bool:
        """Say whether a post of a delivery was in doubt before it ended."""
        if self.unproved.find(delivery_id) is not None:  # taken back by an operator, and it was in quarantine before
            return True
        delivery = self._find(delivery_id)[1]
        return delivery is not None and delivery.state.memory is Memory.QUARANTINED

    def post_doubted(self, delivery_id: DeliveryId, failure: Failure, now: float) -> list[Effect]:
        """Note that it cannot be told whether a post has ended."""
        sender, delivery = self._find(delivery_id)
        if sender is None or delivery is None:
            return [CountOddity("doubted_unknown_post", delivery_id.peer, delivery_id.room)]
        return self._follow(sender, sender.post_doubted(delivery, failure), now)

    def peer_lost(self, peer: PeerId, failure: Failure, now: float) -> list[Effect]:
        """Fail every room that a lost decode rank still waits for, and forget what it asked for."""
        for room in self.waiting.of_peer(peer):
            self._forget_waiting(room, peer)
        effects: list[Effect] = []
        for sender in list(self.rooms.values()):
            delivery = sender.deliveries.get(peer)
            if delivery is not None and delivery.state.is_pending:
                effects += self._follow(sender, sender.stop(Signal.FAILED, failure), now)
        return effects

    def release(self, room: int, now: float) -> list[Effect]:
        """Take the pages of a room in quarantine back unproved.

        Raises:
            LocalProtocolError: The room is not in quarantine.
        """
        sender = self.rooms.get(room)
        if sender is None or sender.state.memory is not Memory.QUARANTINED:
            raise LocalProtocolError("room is not in quarantine", room=room)
        return self._follow(sender, sender.release(), now)

    def turn_away(self, failure: Failure) -> list[Effect]:
        """Tell everybody who waits for a room that none will come."""
        effects: list[Effect] = []
        for room, peer in self.waiting.everybody():
            effects += self.refuse(peer, self._forget_waiting(room, peer), failure)
        return effects

    def close(self, failure: Failure, now: float) -> list[Effect]:
        """Fail everything."""
        effects = self.turn_away(failure)
        for sender in list(self.rooms.values()):
            effects += self._follow(sender, sender.stop(Signal.ABORTED, failure), now)
        return effects

    def expired(self, key: Hashable, now: float) -> list[Effect]:
        """A deadline passed."""
        match key:
            case Unopened(room, peer):
                grant = self._forget_waiting(room, peer)
                detail = f"prefill did not open the room within {self._time_to_open(grant)} s"
                return self.refuse(peer, grant, self._error(FailureReason.UNKNOWN_ROOM, detail))
            case Unanswered(delivery_id):
                return self._say_again(delivery_id, now)
            case Undrained(room):
                sender = self._known(room)
                return self._follow(sender, sender.doubt(), now)
            case Ungranted() | Undelivered() | Stalled():
                room, failure = self._overdue(key)
                sender = self._known(room)
                return self._follow(sender, sender.stop(Signal.FAILED, failure), now)
        return []

    def _overdue(self, key: Ungranted | Undelivered | Stalled) -> tuple[int, Failure]:
        """Which room a deadline ends, and why."""
        match key:
            case Ungranted(room):
                detail = f"not every decode rank asked for the pages within {self._timeouts.grant_s} s"
                return room, self._error(FailureReason.NOT_GRANTED, detail)
            case Undelivered(delivery_id):
                detail = f"decode rank {delivery_id.peer.rank} has given up by now"
                return delivery_id.room, self._error(FailureReason.DEADLINE, detail)
            case Stalled(delivery_id):
                detail = f"a write to {delivery_id.peer.rank} has not ended for too long"
                failure = Failure(FailureReason.STALLED, Stage.SUBMIT, str(self._me.rank), detail)
                return delivery_id.room, failure

    def _serve(self, sender: Sender, peer: PeerId, grant: Grant, now: float) -> list[Effect]:
        refusal = sender.refusal(peer, grant)
        if refusal is not None:
            return self.refuse(peer, grant, refusal)
        effects = sender.grant(
            peer, grant, owed=self.acquaintances.owed(peer), cutting=self.acquaintances.cutting(peer)
        )
        delivery = sender.deliveries[peer]
        if delivery.state.is_pending:
            self._deadlines.set(Undelivered(delivery.id), now + grant.timeout_s)
        return self._follow(sender, effects, now)

    def _follow(self, sender: Sender, effects: list[Effect], now: float) -> list[Effect]:
        """Set and clear deadlines after a step of a room; bury it when it is over."""
        for delivery in sender.deliveries.values():
            pending = delivery.pending
            if pending != delivery.watched:
                self._watch(delivery, pending, now)
        room_pending = sender.pending
        if room_pending != sender.watched:
            self._watch_room(sender, room_pending, now)
        if sender.state.memory is Memory.QUARANTINED:
            self._quarantine.put(sender.room, sender.footprint)
        if sender.state.is_safe and not sender.state.is_pending:
            self._bury(sender)
        return effects

    def _watch_room(self, sender: Sender, pending: RoomPending, now: float) -> None:
        """Set and clear the deadlines of what has begun or ended to be pending."""
        before, sender.watched = sender.watched, pending
        if pending.grants and not before.grants:
            self._deadlines.set_once(Ungranted(sender.room), now + self._timeouts.grant_s)
        elif before.grants and not pending.grants:
            self._deadlines.clear(Ungranted(sender.room))
        if pending.drain and not before.drain:
            self._deadlines.set_once(Undrained(sender.room), now + self._timeouts.drain_s)
        elif before.drain and not pending.drain:
            self._deadlines.clear(Undrained(sender.room))

    def _watch(self, delivery: Delivery, pending: Pending, now: float) -> None:
        """Set and clear the deadlines of what has begun or ended to be pending."""
        before, delivery.watched = delivery.watched, pending
        if before.outcome and not pending.outcome:
            self._deadlines.clear(Undelivered(delivery.id))
        if pending.post and not before.post:
            progress_s = min(self._timeouts.progress_s, delivery.grant.progress_s)
            self._deadlines.set_once(Stalled(delivery.id), now + progress_s)
        elif before.post and not pending.post:
            self._deadlines.clear(Stalled(delivery.id))
        if pending.answer and not before.answer:
            self._deadlines.set_once(Unanswered(delivery.id), now + self._timeouts.repeat_s)
        elif before.answer and not pending.answer:
            self._deadlines.clear(Unanswered(delivery.id))

    def _say_again(self, delivery_id: DeliveryId, now: float) -> list[Effect]:
        delivery = self._find(delivery_id)[1]
        if delivery is None:
            return []
        effects = delivery.repeat()
        pause_s = self._timeouts.repeat_s * min(2**delivery.num_repeats, MAX_BACKOFF)
        self._deadlines.set(Unanswered(delivery_id), now + pause_s)
        return effects

    def _answer_again(self, peer: PeerId, grant: Grant) -> list[Effect]:
        """Answer a late grant: it is never served, whatever its decode rank has missed."""
        ending = self.acquaintances.ending(peer, grant.generation)
        is_owed = any(name in grant.ranges for name in self.acquaintances.owed(peer))
        if ending is None and is_owed:
            too_old = self._error(FailureReason.PROTOCOL, "the grant is older than what is remembered")
            failure = self.acquaintances.parting(peer, grant.generation) or too_old
        elif ending is None or ending.failure is None:  # a rank that owes nothing may be asked long after its part
            return []
        else:
            failure = ending.failure
        return self.refuse(peer, grant, failure)

    def _bury(self, sender: Sender) -> None:
        del self.rooms[sender.room]
        self._quarantine.remove(sender.room)
        self.unproved.keep(sender.deliveries.values())
        for delivery in sender.deliveries.values():
            self.acquaintances.end(delivery.id, delivery.failure)
        if sender.failure is not None:
            self._tombstones[sender.room] = _Tombstone(
                sender.failure, dict.fromkeys(peer.rank for peer in sender.deliveries)
            )
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def _time_to_open(self, grant: Grant) -> float:
        return min(grant.timeout_s, self._timeouts.open_s)

    def _find(self, delivery_id: DeliveryId) -> tuple[Sender | None, Delivery | None]:
        sender = self.rooms.get(delivery_id.room)
        delivery = sender.deliveries.get(delivery_id.peer) if sender else None
        if delivery is None or delivery.id != delivery_id:
            return None, None
        return sender, delivery

    def _known(self, room: int) -> Sender:
        sender = self.rooms.get(room)
        if sender is None:
            raise LocalProtocolError("room is not open", room=room)
        return sender

    def _forget_waiting(self, room: int, peer: PeerId) -> Grant:
        self._deadlines.clear(Unopened(room, peer))
        return self.waiting.take(room, peer)

    def _error(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.ENQUEUE, str(self._me.rank), detail)
