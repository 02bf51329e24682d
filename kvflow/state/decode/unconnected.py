"""Rooms of a decode rank that wait until their prefill instance is connected. Pure."""

from kvflow.errors import FailureReason, Stage
from kvflow.state.decode.deadlines import DecodeTimer, HandshakeDeadline
from kvflow.state.decode.instances import Instance, Waiting, is_complete
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.decode.room import Room
from kvflow.state.decode.rooms import Rooms
from kvflow.state.effects import DecodeEffect
from kvflow.state.events import InstanceAddress, InstanceFound
from kvflow.state.timers import Timers
from kvflow.wire.messages import Failure, PeerId

__all__ = ["UnconnectedRooms"]


class UnconnectedRooms:
    """Grants the rooms that wait for an instance, or fails them. Methods return effects.

    Args:
        me: This incarnation of this rank.
        peers: Known prefill ranks.
        rooms: All rooms.
        timers: Where handshake deadlines are set.
    """

    def __init__(self, me: PeerId, peers: PrefillPeers, rooms: Rooms, timers: Timers[DecodeTimer]) -> None:
        self._me = me
        self._peers = peers
        self._rooms = rooms
        self._timers = timers

    def add(self, instance: Instance, waiting: Waiting) -> None:
        """Let a room wait until its deadline at most."""
        instance.waiting[waiting.room.generation] = waiting
        self._set_deadline(instance, waiting.fails_at)

    def remove(self, instance: Instance, generation: int) -> None:
        """Let a room wait no longer, if it does."""
        instance.waiting.pop(generation, None)
        self._clear_deadline(instance)

    def move(self, before: Instance, event: InstanceFound, instance: Instance) -> None:
        """Move the rooms that refer to an address to the instance that answers there."""
        for generation, waiting in list(before.waiting.items()):
            if waiting.room.opened.instance == event.instance:
                instance.waiting[generation] = before.waiting.pop(generation)
        if before.fails_at is not None and instance.waiting:
            self._set_deadline(instance, before.fails_at)
        self._clear_deadline(before)

    def grant(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Grant the rooms that refer to the connected ranks; the others keep waiting."""
        effects: list[DecodeEffect] = []
        for generation, (room, *_) in list(instance.waiting.items()):
            if instance.is_meant_by(room):
                del instance.waiting[generation]
                effects += self._rooms.connected(room, tuple(instance.ranks.values()), now)
        self._clear_deadline(instance)
        return effects

    def fail_outdated(self, instance: Instance, event: InstanceFound, now: float) -> list[DecodeEffect]:
        """Fail rooms whose tickets were issued by processes that no longer exist.

        A rank that answers for itself is authoritative. About other ranks it may be out of date, because they may have
        restarted.
        """
        if not isinstance(event.instance, InstanceAddress):
            return []
        there = {record.peer.rank: record for record in event.records}
        effects: list[DecodeEffect] = []
        for room, number, _ in list(instance.waiting.values()):
            issuer = room.opened.issuer
            if issuer is None or room.opened.instance != event.instance or number > event.number:
                continue
            record = there.get(issuer.rank)
            answers_for_itself = record is not None and record.endpoint == event.instance.address
            if record is None and is_complete(event.records):
                failure = self._stale(issuer, f"{event.records[0].peer.rank.instance} has all of its ranks without it")
                effects += self._rooms.fail(room, failure, now)
            elif record is not None and record.peer != issuer and answers_for_itself:
                effects += self._rooms.fail(room, self._stale(issuer, f"{record.peer} answers now"), now)
        return effects

    def fail_overdue(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Fail rooms whose deadline has passed, if their ticket is stale or other ranks than theirs are connected."""
        instance.fails_at = None
        effects: list[DecodeEffect] = []
        for room, _, fails_at in list(instance.waiting.values()):
            failure = self._mismatch(instance, room)
            if failure is not None and now >= fails_at:
                effects += self._rooms.fail(room, failure, now)
        if instance.waiting and self._peers.are_ready(instance):
            self._set_deadline(instance, min(waiting.fails_at for waiting in instance.waiting.values()))
        return effects

    def fail_all(self, instance: Instance, failure: Failure, now: float) -> list[DecodeEffect]:
        """Fail all rooms that wait for an instance."""
        effects: list[DecodeEffect] = []
        for room, *_ in list(instance.waiting.values()):
            effects += self._rooms.fail(room, failure, now)
        instance.waiting.clear()
        self._clear_deadline(instance)
        return effects

    def _set_deadline(self, instance: Instance, when: float) -> None:
        """Set the handshake deadline of an instance's rooms, unless an earlier one is set."""
        if instance.fails_at is None or when < instance.fails_at:
            instance.fails_at = when
            self._timers.set(HandshakeDeadline(instance.number), when)

    def _clear_deadline(self, instance: Instance) -> None:
        """Clear the handshake deadline if no room waits."""
        if not instance.waiting:
            instance.fails_at = None
            self._timers.clear(HandshakeDeadline(instance.number))

    def _mismatch(self, instance: Instance, room: Room) -> Failure | None:
        """Return why a room's ticket is stale, or why the room cannot be granted to the connected ranks."""
        issuer = room.opened.issuer
        records = () if instance.found is None else instance.found.records
        other = next(
            (record.peer for record in records if issuer is not None and record.peer.rank == issuer.rank), None
        )
        if issuer is not None and other is not None and other != issuer:
            return self._stale(issuer, f"{other} is registered now")
        if not self._peers.are_ready(instance):
            return None
        connected = ", ".join(map(str, instance.peers))
        detail = f"a different process is connected under the name of {room.opened.instance}: {connected}"
        return Failure(FailureReason.UNREACHABLE, Stage.BOOTSTRAP, str(self._me.rank), detail)

    def _stale(self, issuer: PeerId, why: str) -> Failure:
        detail = f"{issuer.rank} has restarted since it issued the ticket ({issuer}): {why}"
        return Failure(FailureReason.STALE_TICKET, Stage.BOOTSTRAP, str(self._me.rank), detail)
