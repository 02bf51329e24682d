"""Rooms of a decode rank that wait until their prefill instance is connected, and what delays them, in words. Pure."""

from collections.abc import Iterator

from kvflow.addresses import SCHEME
from kvflow.errors import FailureReason
from kvflow.state.decode.deadlines import HandshakeDeadline
from kvflow.state.decode.dialing import HandshakeContext
from kvflow.state.decode.instances import Instance, Waiting, is_complete
from kvflow.state.decode.room import Room
from kvflow.state.effects import DecodeEffect
from kvflow.state.events import ConnectFailed, ConnectionObstructed, InstanceAddress, InstanceFound, LookUpRefused
from kvflow.state.tables import InstanceState
from kvflow.wire.messages import Failure, PeerId

__all__ = ["Obstacles", "UnconnectedRooms"]


class UnconnectedRooms:
    """Grants the rooms that wait for an instance, or fails them. Methods return effects."""

    def __init__(self, context: HandshakeContext) -> None:
        self._peers, self._rooms, self._timers = context.peers, context.rooms, context.timers
        self._failure = context.failure

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
        return self._failure(FailureReason.UNREACHABLE, detail)

    def _stale(self, issuer: PeerId, why: str) -> Failure:
        detail = f"{issuer.rank} has restarted since it issued the ticket ({issuer}): {why}"
        return self._failure(FailureReason.STALE_TICKET, detail)


class Obstacles:
    """Notes why instances cannot be looked up or connected to, and describes what delays their rooms."""

    def __init__(self, context: HandshakeContext) -> None:
        self._instances, self._peers, self._registry = context.instances, context.peers, context.settings.registry

    def note_obstacle(self, event: LookUpRefused | ConnectFailed | ConnectionObstructed) -> None:
        """Record why an instance, or any registry name, cannot be looked up, or why there is no connection to a rank.

        An obstruction without a detail says that there is a connection.
        """
        if isinstance(event, LookUpRefused):
            for instance in self._instances:
                is_named = not isinstance(instance.ref, InstanceAddress)
                if instance.ref == event.instance or (event.instance is None and is_named):
                    instance.refusal, instance.is_short = event.detail, event.is_short
            return
        found = self._instances.find_by_peer(event.peer)
        if found is None:
            return
        if isinstance(event, ConnectionObstructed):
            if event.peer not in found.peers:
                return
            found.obstacles[event.peer] = event.detail or "it is connected, but does not answer"
        if event.is_short:  # this process lacks what a connection takes
            found.refusal, found.is_short = event.detail, True

    def describe(self, instance: Instance) -> str:
        """Return what delays the rooms of an instance."""
        if instance.is_short:
            return instance.refusal
        if instance.state is InstanceState.COMPILING:
            return "its routes are still being compiled"
        if instance.state is not InstanceState.LOOKING_UP:
            return next(self._silent(instance), "one of its ranks is still connecting")
        if instance.found is None:
            is_elsewhere = bool(self._registry) and not self._registry.startswith(SCHEME)
            if isinstance(instance.ref, InstanceAddress) or is_elsewhere:
                return instance.refusal or "no answer"
            registry = f"the registry at {self._registry}" if self._registry else "the registry"
            silence = f"{registry} does not answer"
            return f"{silence}: {instance.refusal}" if instance.refusal else silence
        ended = [str(record.peer.rank) for record in instance.found.records if self._peers.has_ended(record.peer)]
        if ended:
            return f"processes that are still registered have ended: {', '.join(ended)}"
        if not instance.found.records:
            return "none of its ranks is registered"
        registered = [record.peer.rank.engine_rank for record in instance.found.records]
        needed = instance.found.records[0].num_ranks
        return f"only ranks {registered} of {needed} are registered"

    def _silent(self, instance: Instance) -> Iterator[str]:
        """Yield the reason for each rank that delays the rooms of an instance."""
        for record in instance.records:
            who = f"rank {record.peer.rank} at {record.endpoint}"
            if record.peer in instance.undialed:
                yield f"{who} has not been asked: too many other ranks do not answer"
            elif record.peer in instance.hellos:
                obstacle = instance.obstacles.get(record.peer)
                yield f"{who}: {obstacle}" if obstacle else f"{who} does not answer"
            elif not self._peers.is_connected(record.peer):
                obstacle = instance.obstacles.get(record.peer)
                yield f"{who} has been silent since its connection broke" + (f": {obstacle}" if obstacle else "")
