"""All rooms that one prefill rank sends: which exist, who asked for them, what they still wait for."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, Stage
from kvflow.state.deadlines import Deadlines
from kvflow.state.effects import CountOddity, DropPlan, Effect, SendMessage
from kvflow.state.events import Chunk, DeliveryId
from kvflow.state.sender import Delivery, Sender, drained
from kvflow.state.tables import Memory, Signal
from kvflow.wire.messages import Cancel, Failed, Failure, Grant, PeerId, Received

__all__ = ["Senders"]

MAX_TOMBSTONES = 4_096
"""Ended rooms that are remembered, so that a grant that comes too late is answered at once."""


@dataclass(frozen=True, slots=True)
class Unopened:
    """Deadline: the engine must open this room before the grant runs out."""

    room: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Ungranted:
    """Deadline: every decode rank must have granted after the last chunk."""

    room: int


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Deadline: the decode rank gives up."""

    delivery: DeliveryId


@dataclass(frozen=True, slots=True)
class Undrained:
    """Deadline: posts must have ended after the room has."""

    room: int


class _Tombstone(NamedTuple):
    failure: Failure | None
    generations: dict[PeerId, int]


class Senders:
    """The table of rooms; every method returns what is to be done."""

    def __init__(self, me: PeerId, timeouts: Timeouts, limits: Limits, deadlines: Deadlines[Hashable]) -> None:
        self.rooms: dict[int, Sender] = {}
        self.waiting: dict[int, dict[PeerId, Grant]] = {}
        self._me = me
        self._timeouts = timeouts
        self._limits = limits
        self._deadlines = deadlines
        self._owed: dict[PeerId, tuple[str, ...]] = {}
        self._tombstones: dict[int, _Tombstone] = {}
        self.num_waiting = 0

    def open(self, room: int, now: float) -> list[Effect]:
        """Start a room; grants that came before are served now.

        Raises:
            LocalProtocolError: The room is open, or its pages are in quarantine.
            CapacityExceeded: Too many rooms are open.
        """
        if room in self.rooms:
            raise LocalProtocolError("room is in use", room=room, memory=self.rooms[room].state.memory.value)
        if len(self.rooms) >= self._limits.transfers:
            raise CapacityExceeded("too many rooms are open", limit=self._limits.transfers)
        self._tombstones.pop(room, None)
        sender = self.rooms[room] = Sender(self._me, room)
        effects: list[Effect] = []
        for peer in list(self.waiting.get(room, ())):
            effects += self._serve(sender, peer, self._forget_waiting(room, peer), now)
        return effects

    def offer(self, room: int, chunk: Chunk, now: float) -> list[Effect]:
        """Take a chunk from the engine."""
        sender = self._known(room)
        return self._follow(sender, sender.offer(chunk), now)

    def abort(self, room: int, failure: Failure, now: float) -> list[Effect]:
        """End a room because its engine gave it up."""
        sender = self.rooms.get(room)
        return self._follow(sender, sender.stop(Signal.ABORTED, failure), now) if sender else []

    def greeted(self, peer: PeerId, *, owed: tuple[str, ...]) -> None:
        """Remember of which components this rank has something for a decode rank."""
        self._owed[peer] = owed

    def grant(self, peer: PeerId, grant: Grant, now: float) -> list[Effect]:
        """Serve a grant, keep it until the engine opens the room, or refuse it."""
        sender = self.rooms.get(grant.room)
        if self._was_served(peer, grant, sender):
            return [CountOddity("grant_duplicate", peer, grant.room)]
        if sender is not None:
            return self._serve(sender, peer, grant, now)
        tombstone = self._tombstones.get(grant.room)
        if tombstone is not None and tombstone.failure is not None and peer not in tombstone.generations:
            tombstone.generations[peer] = grant.generation
            return self.refuse(peer, grant, tombstone.failure)
        if self.num_waiting >= self._limits.pending_grants:
            detail = f"{self._limits.pending_grants} grants wait for their rooms"
            return self.refuse(peer, grant, self._error(FailureReason.CAPACITY, detail))
        self._remember_waiting(peer, grant)
        self._deadlines.set(Unopened(grant.room, peer), now + self._time_to_open(grant))
        return []

    def refuse(self, peer: PeerId, grant: Grant, failure: Failure) -> list[Effect]:
        """Answer a grant that will never be served, so that nothing was or will be written for it."""
        failed = Failed(
            room=grant.room,
            generation=grant.generation,
            engine_rank=self._me.rank.engine_rank,
            failure=failure,
            drained=True,
        )
        return [SendMessage(peer, failed)]

    def cancel(self, peer: PeerId, cancel: Cancel, now: float) -> list[Effect]:
        """Stop a delivery. Of one that is not known nothing is posted, which is all that Drained says."""
        delivery_id = DeliveryId(cancel.room, peer, cancel.generation)
        sender, delivery = self._find(delivery_id)
        if sender is not None and delivery is not None:
            return self._follow(sender, sender.cancel(delivery, cancel.failure), now)
        waiting = self.waiting.get(cancel.room, {})
        if peer in waiting and waiting[peer].generation == cancel.generation:
            self._forget_waiting(cancel.room, peer)
        return [SendMessage(peer, drained(delivery_id, self._me))]

    def received(self, peer: PeerId, received: Received, now: float) -> list[Effect]:
        """Note that a decode rank has everything."""
        sender, delivery = self._find(DeliveryId(received.room, peer, received.generation))
        if sender is None or delivery is None:
            return [CountOddity("received_of_unknown_transfer", peer, received.room)]
        return self._follow(sender, sender.received(delivery), now)

    def plan_finished(self, delivery_id: DeliveryId, seq: int, num_bytes: int) -> list[Effect]:
        """Post what was planned, unless its delivery has ended."""
        delivery = self._find(delivery_id)[1]
        return delivery.plan_finished(seq, num_bytes) if delivery else [DropPlan(delivery_id, seq)]

    def plan_failed(self, delivery_id: DeliveryId, failure: Failure, now: float) -> list[Effect]:
        """End the room of a chunk that cannot be planned."""
        sender = self._find(delivery_id)[0]
        return self._follow(sender, sender.stop(Signal.FAILED, failure), now) if sender else []

    def post_settled(self, delivery_id: DeliveryId, seq: int, failure: Failure | None, now: float) -> list[Effect]:
        """Note that a post has ended."""
        sender, delivery = self._find(delivery_id)
        if sender is None or delivery is None:
            return [CountOddity("settled_unknown_post", delivery_id.peer, delivery_id.room)]
        return self._follow(sender, sender.post_settled(delivery, seq, failure), now)

    def post_doubted(self, delivery_id: DeliveryId, failure: Failure, now: float) -> list[Effect]:
        """Note that it cannot be told whether a post has ended."""
        sender, delivery = self._find(delivery_id)
        if sender is None or delivery is None:
            return [CountOddity("doubted_unknown_post", delivery_id.peer, delivery_id.room)]
        return self._follow(sender, sender.post_doubted(delivery, failure), now)

    def peer_lost(self, peer: PeerId, failure: Failure, now: float) -> list[Effect]:
        """Fail every room that a lost decode rank still waits for, and forget what it asked for."""
        for room in [room for room, grants in self.waiting.items() if peer in grants]:
            self._forget_waiting(room, peer)
        effects: list[Effect] = []
        for sender in list(self.rooms.values()):
            delivery = sender.deliveries.get(peer)
            if delivery is not None and delivery.state.is_pending:
                effects += self._follow(sender, sender.stop(Signal.FAILED, failure), now)
        return effects

    def involve(self, peer: PeerId) -> bool:
        """Say whether an open room has to do with a decode rank."""
        return any(peer in sender.deliveries for sender in self.rooms.values())

    def forget_peer(self, peer: PeerId) -> None:
        """Drop what is kept about a decode rank."""
        self._owed.pop(peer, None)

    def close(self, failure: Failure, now: float) -> list[Effect]:
        """Fail everything; what waits for a room is told that none will come."""
        effects: list[Effect] = []
        for room, grants in list(self.waiting.items()):
            for peer, grant in list(grants.items()):
                self._forget_waiting(room, peer)
                effects += self.refuse(peer, grant, failure)
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
            case Ungranted(room):
                detail = f"not every decode rank asked for the pages within {self._timeouts.grant_s} s"
                return self._expire(room, self._error(FailureReason.NOT_GRANTED, detail), now)
            case Undelivered(delivery_id):
                detail = f"decode rank {delivery_id.peer.rank} has given up by now"
                return self._expire(delivery_id.room, self._error(FailureReason.DEADLINE, detail), now)
            case Undrained(room):
                sender = self._known(room)
                return self._follow(sender, sender.doubt(), now)
        return []

    def _serve(self, sender: Sender, peer: PeerId, grant: Grant, now: float) -> list[Effect]:
        effects = sender.grant(peer, grant, owed=self._owed[peer])
        delivery = sender.deliveries.get(peer)
        if delivery is not None and delivery.grant is grant and delivery.state.is_pending:
            self._deadlines.set(Undelivered(delivery.id), now + grant.timeout_s)
        return self._follow(sender, effects, now)

    def _follow(self, sender: Sender, effects: list[Effect], now: float) -> list[Effect]:
        """Set and clear deadlines after a step of a room; bury it when it is over."""
        for delivery in sender.deliveries.values():
            if not delivery.state.is_pending:
                self._deadlines.clear(Undelivered(delivery.id))
        ungranted, undrained = Ungranted(sender.room), Undrained(sender.room)
        if sender.state.is_pending and sender.lacks_grants:
            self._deadlines.set_once(ungranted, now + self._timeouts.grant_s)
        else:
            self._deadlines.clear(ungranted)
        if sender.state.memory is Memory.DRAINING:
            self._deadlines.set_once(undrained, now + self._timeouts.drain_s)
        else:
            self._deadlines.clear(undrained)
        if sender.state.is_safe and not sender.state.is_pending:
            self._bury(sender)
        return effects

    def _bury(self, sender: Sender) -> None:
        del self.rooms[sender.room]
        generations = {peer: delivery.grant.generation for peer, delivery in sender.deliveries.items()}
        self._tombstones[sender.room] = _Tombstone(sender.failure, generations)
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def _time_to_open(self, grant: Grant) -> float:
        return min(grant.timeout_s, self._timeouts.open_s)

    def _was_served(self, peer: PeerId, grant: Grant, sender: Sender | None) -> bool:
        if sender is not None:
            delivery = sender.deliveries.get(peer)
            return delivery is not None and delivery.grant.generation == grant.generation
        tombstone = self._tombstones.get(grant.room)
        return tombstone is not None and tombstone.generations.get(peer) == grant.generation

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

    def _expire(self, room: int, failure: Failure, now: float) -> list[Effect]:
        sender = self._known(room)
        return self._follow(sender, sender.stop(Signal.FAILED, failure), now)

    def _remember_waiting(self, peer: PeerId, grant: Grant) -> None:
        grants = self.waiting.setdefault(grant.room, {})
        self.num_waiting += peer not in grants
        grants[peer] = grant

    def _forget_waiting(self, room: int, peer: PeerId) -> Grant:
        self._deadlines.clear(Unopened(room, peer))
        grant = self.waiting[room].pop(peer)
        self.num_waiting -= 1
        if not self.waiting[room]:
            del self.waiting[room]
        return grant

    def _error(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.ENQUEUE, str(self._me.rank), detail)
