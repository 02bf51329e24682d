"""All rooms that one decode rank receives, and the prefill instances it can receive them from."""

from collections.abc import Hashable
from typing import Final, NamedTuple

import msgspec

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, Stage
from kvflow.state.breaker import Breaker
from kvflow.state.deadlines import Deadlines
from kvflow.state.effects import CountOddity, Effect, GreetInstance, SendMessage
from kvflow.state.events import GreetedRank, ReceiveOpened, Scattered
from kvflow.state.ledger import Ledger
from kvflow.state.quarantine import Quarantine
from kvflow.state.receiver import Receiver
from kvflow.state.tables import BreakerState, Memory, Outcome, Signal
from kvflow.wire.messages import Cancel, Drained, Failed, Failure, Notice, PeerId, Received, Unstage, Unstaged

__all__ = ["Receivers"]

MIN_TIMEOUT_S = 1e-3
"""What a grant says when its time is already up; the receiver's own deadline follows at once."""

MAX_ENDINGS = 16_384
"""Ended transfers that are remembered, so that a prefill rank that missed the end is told."""

MAX_BACKOFF = 8
"""Words are repeated less and less often, down to this many times the first pause."""

GRANTS_PER_PAUSE = 500
"""Where more rooms than this are open, each says its grant again later than after the first pause. Grants are rarely
lost, and repeating thousands of them for as long as prefill lets them wait costs more than moving them."""

MAX_BREAKERS = 1_024
"""Instances whose failures are remembered."""

PREFILL_FAULTS: Final = frozenset(
    {
        FailureReason.UNREACHABLE,
        FailureReason.PEER_LOST,
        FailureReason.WRITE_FAILED,
        FailureReason.STALLED,
        FailureReason.INCOMPLETE,
    }
)
"""Failures that speak against the instance, not against the request or the engines."""


class Unreceived(msgspec.Struct, frozen=True):
    """Deadline: the whole transfer."""

    generation: int


class Stalled(msgspec.Struct, frozen=True):
    """Deadline: something must have arrived."""

    generation: int


class Unanswered(msgspec.Struct, frozen=True):
    """Deadline: every granted rank should have said its last word."""

    generation: int


class Undrained(msgspec.Struct, frozen=True):
    """Deadline: granted ranks must have said Drained after the transfer has failed."""

    generation: int


class Ending(NamedTuple):
    """How a transfer ended; no failure for a success."""

    room: int
    granted: tuple[PeerId, ...]
    failure: Failure | None


class Receivers:
    """The table of rooms; every method returns what is to be done.

    A receiver in quarantine gives its room free but stays in the table under its generation, so that a late Drained
    still finds it.
    """

    def __init__(
        self,
        me: PeerId,
        timeouts: Timeouts,
        limits: Limits,
        deadlines: Deadlines[Hashable],
        quarantine: Quarantine,
    ) -> None:
        self.receivers: dict[int, Receiver] = {}
        self.rooms: dict[int, int] = {}
        self._me = me
        self._timeouts = timeouts
        self._limits = limits
        self._deadlines = deadlines
        self._last_generation = 0
        self._instances: dict[str, tuple[GreetedRank, ...]] = {}
        self._ungreeted: dict[str, dict[int, Receiver]] = {}
        self._quarantine = quarantine
        self._endings: Ledger[Ending] = Ledger(MAX_ENDINGS)
        self._breakers: dict[str, Breaker] = {}

    def open(self, opened: ReceiveOpened, now: float) -> list[Effect]:
        """Start a room: grant at once if the instance is known, else greet it first.

        Raises:
            LocalProtocolError: The room is being received already, or its generation is not new.
            CapacityExceeded: Too many rooms are open, or too much is in quarantine.
        """
        if opened.room in self.rooms:
            raise LocalProtocolError(
                "room is being received already", room=opened.room, generation=self.rooms[opened.room]
            )
        if len(self.receivers) >= self._limits.transfers:
            raise CapacityExceeded("too many rooms are open", limit=self._limits.transfers)
        self._quarantine.check_admission()
        if opened.generation <= self._last_generation:
            raise LocalProtocolError("generation was used before", generation=opened.generation)
        self._last_generation = opened.generation
        receiver = Receiver(self._me, opened, gives_up=now + opened.timeout_s, progress_s=self._timeouts.progress_s)
        self.receivers[receiver.generation] = receiver
        self.rooms[opened.room] = receiver.generation
        self._deadlines.set(Unreceived(receiver.generation), receiver.gives_up)
        breaker = self._breakers.get(opened.instance)
        if breaker is not None:
            if not breaker.admits(now):
                return self._follow(receiver, receiver.stop(Signal.FAILED, self._avoided(opened.instance)), now)
            receiver.is_probe = breaker.state is BreakerState.PROBING
        ranks = self._instances.get(opened.instance)
        if ranks is not None:
            return self._grant(receiver, ranks, now)
        effects = self._greet(opened.instance)
        self._ungreeted[opened.instance][receiver.generation] = receiver
        return effects

    def abort(self, room: int, failure: Failure, now: float) -> list[Effect]:
        """End a room because its engine gave it up."""
        receiver = self.receivers.get(self.rooms.get(room, 0))
        return self._follow(receiver, receiver.stop(Signal.ABORTED, failure), now) if receiver else []

    def greeted(self, instance: str, ranks: tuple[GreetedRank, ...], now: float) -> list[Effect]:
        """Grant to every room that waited for this instance."""
        self._instances[instance] = ranks
        effects: list[Effect] = []
        for rank in ranks:
            for receiver in self.receivers.values():
                effects += receiver.regreeted(rank)
        for receiver in self._ungreeted.pop(instance, {}).values():
            effects += self._grant(receiver, ranks, now)
        return effects

    def unreachable(self, instance: str, failure: Failure, now: float) -> list[Effect]:
        """Fail every room that waited for this instance."""
        effects: list[Effect] = []
        for receiver in self._ungreeted.pop(instance, {}).values():
            effects += self._follow(receiver, receiver.stop(Signal.FAILED, failure), now)
        return effects

    def notice(self, notice: Notice, sender: PeerId | None, now: float) -> list[Effect]:
        """Count a notice for the transfer it names; `sender` is None if it came in band."""
        receiver = self._find(notice.room, notice.generation)
        if receiver is None:
            return self._answer_again(notice.room, notice.generation, sender, "notice_of_unknown_transfer")
        before = receiver.num_arrived
        effects = receiver.notice(notice, sender)
        is_waiting = receiver.state.is_pending and not receiver.is_verifying
        if is_waiting and receiver.num_arrived != before:
            self._deadlines.set(Stalled(receiver.generation), now + self._timeouts.progress_s)
        return self._follow(receiver, effects, now)

    def verified(self, generation: int, failure: Failure | None, now: float) -> list[Effect]:
        """Take in what came of comparing digests; the transfer may be over by now."""
        receiver = self.receivers.get(generation)
        return self._follow(receiver, receiver.verified(failure), now) if receiver else []

    def scattered(self, event: Scattered, now: float) -> list[Effect]:
        """Take in what came of scattering; its transfer is on record until then."""
        receiver = self.receivers.get(event.generation)
        if receiver is None:
            return [CountOddity("scattered_unknown_transfer", None, event.notice.room)]
        self._deadlines.set(Stalled(receiver.generation), now + self._timeouts.progress_s)
        return self._follow(receiver, receiver.scattered(event.notice, event.failure), now)

    def scattered_peers(self) -> dict[PeerId, None]:
        """Ranks whose staging slots are being read."""
        return {peer: None for receiver in self.receivers.values() for peer in receiver.scattered_peers()}

    def unstage(self, peer: PeerId, ask: Unstage, _: float) -> list[Effect]:
        """Say that a slot is not read any more, if that is so; nothing of a transfer that is over ever is."""
        receiver = self._find(ask.room, ask.generation)
        if receiver is not None:
            return receiver.unstage(peer, ask.seq)
        if ask.generation > self._last_generation:
            return [CountOddity("unstage_of_unknown_transfer", peer, ask.room)]
        word = Unstaged(room=ask.room, generation=ask.generation, engine_rank=ask.engine_rank, seq=ask.seq)
        return [SendMessage(peer, word)]

    def drained(self, peer: PeerId, drained: Drained, now: float) -> list[Effect]:
        """Take a rank's word that it can write nothing more."""
        receiver = self._find(drained.room, drained.generation)
        if receiver is None:
            is_late = self._endings.is_over(drained.generation)
            return [] if is_late else [CountOddity("drained_of_unknown_transfer", peer, drained.room)]
        return self._follow(receiver, receiver.drained(peer, drained.failure), now)

    def failed(self, peer: PeerId, failed: Failed, now: float) -> list[Effect]:
        """End a room because a prefill rank said so."""
        receiver = self._find(failed.room, failed.generation)
        if receiver is None or not receiver.involves(peer):
            return self._answer_again(failed.room, failed.generation, peer, "failed_of_unknown_transfer")
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

    def gone(self, peer: PeerId, failure: Failure, now: float) -> list[Effect]:
        """Take the proof that nothing of a prefill rank's life can be written any more."""
        effects: list[Effect] = []
        for receiver in list(self.receivers.values()):
            if receiver.involves(peer):
                effects += self._follow(receiver, receiver.fenced(peer, failure), now)
        return effects

    def reconnected(self, peer: PeerId) -> list[Effect]:
        """Ask a rank that is back for the proofs that it owes."""
        effects: list[Effect] = []
        for receiver in self.receivers.values():
            effects += receiver.remind(peer)
        return effects

    def release(self, generation: int, now: float) -> list[Effect]:
        """Take the pages of a transfer in quarantine back unproved.

        Raises:
            LocalProtocolError: The transfer is not in quarantine.
        """
        receiver = self.receivers.get(generation)
        if receiver is None or receiver.state.memory is not Memory.QUARANTINED:
            raise LocalProtocolError("transfer is not in quarantine", generation=generation)
        if receiver.is_scattering:
            raise LocalProtocolError("pages are being written from staging memory", generation=generation)
        return self._follow(receiver, receiver.release(), now)

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
            case Stalled(generation):
                receiver = self.receivers[generation]
                failure = Failure(FailureReason.STALLED, Stage.AGGREGATE, str(self._me.rank), self._stall(receiver))
                return self._follow(receiver, receiver.stop(Signal.FAILED, failure), now)
            case Unanswered(generation):
                return self._say_again(self.receivers[generation], now)
            case Undrained(generation):
                receiver = self.receivers[generation]
                return self._follow(receiver, receiver.doubt(), now)
        return []

    def _grant(self, receiver: Receiver, ranks: tuple[GreetedRank, ...], now: float) -> list[Effect]:
        self._deadlines.set(Stalled(receiver.generation), now + self._timeouts.first_bytes_s)
        self._deadlines.set(Unanswered(receiver.generation), now + self._pause_s(receiver))
        return self._follow(receiver, receiver.grant(ranks, self._time_left(receiver, now)), now)

    def _greet(self, instance: str) -> list[Effect]:
        """Greet an instance, unless that is going on or done."""
        if instance in self._ungreeted or instance in self._instances:
            return []
        self._ungreeted[instance] = {}
        return [GreetInstance(instance)]

    def _say_again(self, receiver: Receiver, now: float) -> list[Effect]:
        effects = receiver.repeat(self._time_left(receiver, now))
        if receiver.failure is not None and receiver.granted:  # with nobody to ask, a quarantine would last for ever
            effects += self._greet(receiver.opened.instance)
        self._deadlines.set(Unanswered(receiver.generation), now + self._pause_s(receiver))
        return effects

    def _pause_s(self, receiver: Receiver) -> float:
        """Time until words are said again: longer each time, and where many wait, so that those cost no more than few.

        Who has failed asks for the proof that its pages are quiet, and does not wait for others with that.
        """
        times: float = min(2**receiver.num_repeats, MAX_BACKOFF)
        if receiver.failure is None:
            times = max(times, len(self.receivers) / GRANTS_PER_PAUSE)
        return self._timeouts.repeat_s * times

    def _time_left(self, receiver: Receiver, now: float) -> float:
        return max(receiver.gives_up - now, MIN_TIMEOUT_S)

    def _stall(self, receiver: Receiver) -> str:
        if receiver.num_arrived:
            return f"nothing arrived for {self._timeouts.progress_s} s"
        return f"nothing arrived within {self._timeouts.first_bytes_s} s"

    def _answer_again(self, room: int, generation: int, peer: PeerId | None, oddity: str) -> list[Effect]:
        """Tell a rank how a transfer has ended that it still talks about."""
        ending = self._endings.find(generation)
        if ending is None or ending.room != room or (peer is not None and peer not in ending.granted):
            return [CountOddity(oddity, peer, room)]
        if peer is None:  # in band; what is missed is said again over the control channel
            return []
        if ending.failure is None:
            return [SendMessage(peer, Received(room=room, generation=generation))]
        return [SendMessage(peer, Cancel(room=room, generation=generation, failure=ending.failure))]

    def _avoided(self, instance: str) -> Failure:
        detail = f"transfers with {instance} failed again and again; it is tried again after a pause"
        return Failure(FailureReason.PEER_FAILING, Stage.BOOTSTRAP, str(self._me.rank), detail)

    def _judge(self, receiver: Receiver, now: float) -> None:
        """Let the end of a transfer speak for or against its instance."""
        instance = receiver.opened.instance
        if receiver.state.outcome is Outcome.SUCCESS and instance in self._breakers:
            self._breakers.pop(instance).succeeded()
        elif receiver.failure is not None and receiver.failure.reason in PREFILL_FAULTS:
            self._breakers.setdefault(instance, Breaker()).failed(now)
            while len(self._breakers) > MAX_BREAKERS:
                del self._breakers[next(iter(self._breakers))]
        elif receiver.is_probe and instance in self._breakers:
            self._breakers[instance].undecided(now)

    def _follow(self, receiver: Receiver, effects: list[Effect], now: float) -> list[Effect]:
        """Set and clear deadlines after a step of a room; forget it when it is over."""
        if receiver.state.is_going_on and not receiver.is_verifying:
            return effects
        generation = receiver.generation
        if not receiver.state.is_pending:
            if self._deadlines.clear(Unreceived(generation)):
                self._judge(receiver, now)
                receiver.num_repeats = 0
                if not receiver.state.is_safe:
                    self._deadlines.set(Unanswered(generation), now + self._timeouts.repeat_s)
            self._ungreeted.get(receiver.opened.instance, {}).pop(generation, None)
        if not receiver.state.is_pending or receiver.is_verifying:
            self._deadlines.clear(Stalled(generation))
        if receiver.state.memory is Memory.DRAINING:
            self._deadlines.set_once(Undrained(generation), now + self._timeouts.drain_s)
        else:
            self._deadlines.clear(Undrained(generation))
        if receiver.state.memory in (Memory.SAFE, Memory.QUARANTINED) and self.rooms.get(receiver.room) == generation:
            del self.rooms[receiver.room]
        if receiver.state.memory is Memory.QUARANTINED:
            self._quarantine.put(generation, receiver.opened.footprint)
        if receiver.state.is_safe:
            self._quarantine.remove(generation)
            self._deadlines.clear(Unanswered(generation))
            self._endings.end(generation, Ending(receiver.room, receiver.granted, receiver.failure))
            self.receivers.pop(generation, None)
        return effects

    def _find(self, room: int, generation: int) -> Receiver | None:
        receiver = self.receivers.get(generation)
        return receiver if receiver is not None and receiver.room == room else None
