"""All rooms that one decode rank receives, and the prefill instances it can receive them from."""

from collections.abc import Hashable
from dataclasses import dataclass

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, Stage
from kvflow.state.deadlines import Deadlines
from kvflow.state.effects import CountOddity, Effect, GreetInstance
from kvflow.state.events import GreetedRank, ReceiveOpened
from kvflow.state.receiver import Receiver
from kvflow.state.tables import Memory, Signal
from kvflow.wire.messages import Drained, Failed, Failure, Notice, PeerId

__all__ = ["Receivers"]


MIN_TIMEOUT_S = 1e-3
"""What a grant says when its time is already up; the receiver's own deadline follows at once."""


@dataclass(frozen=True, slots=True)
class Unreceived:
    """Deadline: the whole transfer."""

    generation: int


@dataclass(frozen=True, slots=True)
class Undrained:
    """Deadline: granted ranks must have said Drained after the transfer has failed."""

    generation: int


class Receivers:
    """The table of rooms; every method returns what is to be done.

    A receiver in quarantine gives its room free but stays in the table under its generation, so that a late Drained
    still finds it.
    """

    def __init__(self, me: PeerId, timeouts: Timeouts, limits: Limits, deadlines: Deadlines[Hashable]) -> None:
        self.receivers: dict[int, Receiver] = {}
        self.rooms: dict[int, int] = {}
        self._me = me
        self._timeouts = timeouts
        self._limits = limits
        self._deadlines = deadlines
        self._last_generation = 0
        self._instances: dict[str, tuple[GreetedRank, ...]] = {}
        self._ungreeted: dict[str, dict[int, Receiver]] = {}

    def open(self, opened: ReceiveOpened, now: float) -> list[Effect]:
        """Start a room: grant at once if the instance is known, else greet it first.

        Raises:
            LocalProtocolError: The room is being received already, or its generation is not new.
            CapacityExceeded: Too many rooms are open.
        """
        if opened.room in self.rooms:
            raise LocalProtocolError(
                "room is being received already", room=opened.room, generation=self.rooms[opened.room]
            )
        if len(self.receivers) >= self._limits.transfers:
            raise CapacityExceeded("too many rooms are open", limit=self._limits.transfers)
        if opened.generation <= self._last_generation:
            raise LocalProtocolError("generation was used before", generation=opened.generation)
        self._last_generation = opened.generation
        receiver = Receiver(self._me, opened, gives_up=now + opened.timeout_s, progress_s=self._timeouts.progress_s)
        self.receivers[receiver.generation] = receiver
        self.rooms[opened.room] = receiver.generation
        self._deadlines.set(Unreceived(receiver.generation), receiver.gives_up)
        ranks = self._instances.get(opened.instance)
        if ranks is not None:
            return self._grant(receiver, ranks, now)
        is_greeting = opened.instance in self._ungreeted
        self._ungreeted.setdefault(opened.instance, {})[receiver.generation] = receiver
        return [] if is_greeting else [GreetInstance(opened.instance)]

    def abort(self, room: int, failure: Failure, now: float) -> list[Effect]:
        """End a room because its engine gave it up."""
        receiver = self.receivers.get(self.rooms.get(room, 0))
        return self._follow(receiver, receiver.stop(Signal.ABORTED, failure), now) if receiver else []

    def greeted(self, instance: str, ranks: tuple[GreetedRank, ...], now: float) -> list[Effect]:
        """Grant to every room that waited for this instance."""
        self._instances[instance] = ranks
        effects: list[Effect] = []
        for receiver in self._ungreeted.pop(instance, {}).values():
            effects += self._grant(receiver, ranks, now)
        return effects

    def unreachable(self, instance: str, failure: Failure, now: float) -> list[Effect]:
        """Fail every room that waited for this instance."""
        effects: list[Effect] = []
        for receiver in self._ungreeted.pop(instance, {}).values():
            effects += self._follow(receiver, receiver.stop(Signal.FAILED, failure), now)
        return effects

    def notice(self, notice: Notice, now: float) -> list[Effect]:
        """Count a notice for the transfer it names."""
        receiver = self._find(notice.room, notice.generation)
        if receiver is None:
            return [CountOddity("notice_of_unknown_transfer", None, notice.room)]
        return self._follow(receiver, receiver.notice(notice), now)

    def drained(self, peer: PeerId, drained: Drained, now: float) -> list[Effect]:
        """Take a rank's word that it can write nothing more."""
        receiver = self._find(drained.room, drained.generation)
        if receiver is None:
            return [CountOddity("drained_of_unknown_transfer", peer, drained.room)]
        return self._follow(receiver, receiver.drained(peer), now)

    def failed(self, peer: PeerId, failed: Failed, now: float) -> list[Effect]:
        """End a room because a prefill rank said so."""
        receiver = self._find(failed.room, failed.generation)
        if receiver is None or not receiver.involves(peer):
            return [CountOddity("failed_of_unknown_transfer", peer, failed.room)]
        return self._follow(receiver, receiver.failed(peer, failed.failure, is_drained=failed.drained), now)

    def peer_lost(self, peer: PeerId, failure: Failure, now: float) -> list[Effect]:
        """Fail every room that the lost rank still owes something; greet its instance anew before the next one."""
        ranks = self._instances.get(peer.rank.instance, ())
        if any(rank.peer == peer for rank in ranks):
            del self._instances[peer.rank.instance]
        effects: list[Effect] = []
        for receiver in list(self.receivers.values()):
            if receiver.involves(peer):
                effects += self._follow(receiver, receiver.lost(peer, failure), now)
        return effects

    def involve(self, peer: PeerId) -> bool:
        """Say whether a room, in quarantine or not, was granted to a prefill rank."""
        return any(receiver.involves(peer) for receiver in self.receivers.values())

    def close(self, failure: Failure, now: float) -> list[Effect]:
        """End every room."""
        effects: list[Effect] = []
        for receiver in list(self.receivers.values()):
            effects += self._follow(receiver, receiver.stop(Signal.ABORTED, failure), now)
        return effects

    def expired(self, key: Hashable, now: float) -> list[Effect]:
        """A deadline passed."""
        match key:
            case Unreceived(generation):
                receiver = self.receivers[generation]
                detail = f"no success within {receiver.opened.timeout_s} s"
                failure = Failure(FailureReason.DEADLINE, Stage.AGGREGATE, str(self._me.rank), detail)
                return self._follow(receiver, receiver.stop(Signal.FAILED, failure), now)
            case Undrained(generation):
                receiver = self.receivers[generation]
                return self._follow(receiver, receiver.doubt(), now)
        return []

    def _grant(self, receiver: Receiver, ranks: tuple[GreetedRank, ...], now: float) -> list[Effect]:
        left_s = max(receiver.gives_up - now, MIN_TIMEOUT_S)
        return self._follow(receiver, receiver.grant(ranks, left_s), now)

    def _follow(self, receiver: Receiver, effects: list[Effect], now: float) -> list[Effect]:
        """Set and clear deadlines after a step of a room; forget it when it is over."""
        generation = receiver.generation
        if not receiver.state.is_pending:
            self._deadlines.clear(Unreceived(generation))
            self._ungreeted.get(receiver.opened.instance, {}).pop(generation, None)
        if receiver.state.memory is Memory.DRAINING:
            self._deadlines.set_once(Undrained(generation), now + self._timeouts.drain_s)
        else:
            self._deadlines.clear(Undrained(generation))
        if receiver.state.memory in (Memory.SAFE, Memory.QUARANTINED) and self.rooms.get(receiver.room) == generation:
            del self.rooms[receiver.room]
        if receiver.state.is_safe:
            self.receivers.pop(generation, None)
        return effects

    def _find(self, room: int, generation: int) -> Receiver | None:
        receiver = self.receivers.get(generation)
        return receiver if receiver is not None and receiver.room == room else None
