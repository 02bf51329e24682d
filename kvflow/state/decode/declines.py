"""Declines: rooms that this rank will not receive, until their prefill ranks know. Pure."""

from msgspec.structs import replace

from kvflow.errors import FailureReason
from kvflow.room import RoomId
from kvflow.state.decode.deadlines import DeclineUnanswered
from kvflow.state.decode.dialing import Dialing, HandshakeContext
from kvflow.state.decode.instances import Declined, Instance
from kvflow.state.effects import DecodeEffect
from kvflow.wire.messages import Decline, Drained, PeerId

__all__ = ["Declines"]

MAX_DECLINED = 4_096
"""Maximum number of declined rooms of one instance that await an answer."""

MAX_BACKOFF = 8
"""The pause between retransmitted declines doubles up to this multiple of the first pause."""

MAX_DECLINES = 6
"""How often a decline is sent without a handshake."""


class Declines:
    """Sends an instance its declines, and repeats them until all ranks have answered. Methods return effects."""

    def __init__(self, context: HandshakeContext, dialing: Dialing) -> None:
        self._me, settings, _, self._peers, self._rooms, self._timers = context
        self._timeouts = settings.timeouts
        self._dialing = dialing

    def add_decline(
        self, instance: Instance, room: RoomId, declined: Declined, now: float, *, is_announced: bool = False
    ) -> list[DecodeEffect]:
        """Decline a room, now or later; `is_announced`: tell reachable ranks, which know of it, in any case now."""
        instance.declined[room] = declined
        while len(instance.declined) > MAX_DECLINED:
            instance.declined.popitem(last=False)
        if self._may_decline(instance):
            self._timers.set_once(DeclineUnanswered(instance.number), now + self._timeouts.retransmit_s)
        elif not is_announced:
            return []
        return self._decline(instance, room, declined, now)

    def send_all(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Send all unanswered declines, and schedule their retransmission."""
        if not instance.declined or not self._may_decline(instance):
            return []
        times = min(2**instance.num_declines, MAX_BACKOFF)
        self._timers.set(DeclineUnanswered(instance.number), now + times * self._timeouts.retransmit_s)
        return [
            effect
            for room, declined in list(instance.declined.items())
            for effect in self._decline(instance, room, declined, now)
        ]

    def repeat(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Send unanswered declines again, or give up after some times without a handshake."""
        if not self._may_decline(instance):
            return []
        instance.num_declines += 1
        if instance.failure is None or instance.num_declines < MAX_DECLINES:
            return self.send_all(instance, now)
        is_refused = instance.failure.reason is FailureReason.REFUSED
        return self._stop(instance, now) if is_refused else []  # or when it is connected

    def answered(self, instance: Instance, peer: PeerId, drained: Drained, now: float) -> list[DecodeEffect]:
        """Note that a rank has answered a decline, if that is what it answers."""
        declined = instance.declined.get(drained.room)
        if declined is None or declined.generation != drained.generation:
            return []
        is_first = not declined.answered
        declined.answered[peer] = None
        self._dialing.free_place(peer)
        if not all(other in declined.answered for other in instance.peers):
            is_proof = is_first and not self._peers.are_ready(instance)
            return self._decline(instance, drained.room, declined, now) if is_proof else []
        del instance.declined[drained.room]
        return [] if instance.declined else self._stop(instance, now)

    def _may_decline(self, instance: Instance) -> bool:
        """Return whether declines can be sent now: after the handshake, or without one if it has failed."""
        return self._peers.are_ready(instance) or (instance.failure is not None and bool(instance.records))

    def _decline(self, instance: Instance, room: RoomId, declined: Declined, now: float) -> list[DecodeEffect]:
        if declined.issuer is not None and declined.issuer not in instance.peers:  # the issuer of its ticket is gone
            instance.declined.pop(room, None)
            return []
        message = Decline(
            room=room, generation=declined.generation, failure=declined.failure, capability=declined.capability
        )
        effects: list[DecodeEffect] = []
        is_proved = bool(declined.answered)
        for record in instance.records:
            if record.peer in declined.answered:
                continue
            if self._peers.is_connected(record.peer):
                effects += self._peers.send(record.peer, message)
            elif instance.failure is not None and (is_proved or record is instance.records[0]):
                effects += self._dialing.open(record, now)[1]  # without a place, it is told later
                effects += self._peers.send(record.peer, replace(message, peer=self._me, to=record.peer))
        return effects

    def _stop(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Forget declines that are answered, or never will be, and close connections that served only them."""
        instance.declined.clear()
        instance.num_declines = 0
        self._timers.clear(DeclineUnanswered(instance.number))
        effects: list[DecodeEffect] = []
        for peer in instance.peers:
            if peer not in self._peers and peer not in instance.hellos:
                is_awaited = self._rooms.await_proof_of(peer)
                effects += self._peers.close_unless_awaited(peer, now, is_awaited=is_awaited)
        return effects
