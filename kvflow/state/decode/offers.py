"""Offers that this rank makes to prefill ranks: one to the first rank of an instance, until it is answered. Pure."""

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from kvflow.errors import CapacityExceeded, FailureReason
from kvflow.state.decode.deadlines import OfferOverdue, OfferUnanswered
from kvflow.state.decode.dialing import HandshakeContext
from kvflow.state.decode.unconnected import Obstacles
from kvflow.state.effects import DecodeEffect, ReportOffer
from kvflow.state.events import InstanceRef, OfferMade
from kvflow.wire.messages import Failure, Offer, OfferAnswered, PeerId

__all__ = ["OffersMade"]

MAX_OFFERS: Final = 256
"""Maximum number of offers of one rank that are not answered."""

MAX_BACKOFF: Final = 16
"""The pause between repetitions doubles up to this multiple of the first pause. An older peer rejects offers, and cuts
connections with too many rejected messages: all offers together must stay within what it permits."""


@dataclass(eq=False)
class _Made:
    """An offer.

    Attributes:
        to: The instance that it is for.
        message: The message, with the whole timeout.
        until: When this rank gives up.
        backoff: Pauses until it is sent again.
        peer: The rank that it was sent to; None while it waits for the handshake.
    """

    to: InstanceRef
    message: Offer
    until: float
    backoff: int = 1
    peer: PeerId | None = None


class OffersMade:
    """Sends offers to instances once they are connected, and repeats them; `unsent` are those that wait for that.

    Methods return effects.
    """

    def __init__(self, context: HandshakeContext, obstacles: Obstacles) -> None:
        self._instances, self._peers, self._timers = context.instances, context.peers, context.timers
        self._failure, self._retransmit_s = context.failure, context.settings.timeouts.retransmit_s
        self._obstacles = obstacles
        self._made: dict[int, _Made] = {}
        self.unsent: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._made)

    def make_offer(self, event: OfferMade, now: float) -> None:
        """Note an offer, which `send_waiting` sends; raise CapacityExceeded if too many are not answered."""
        if len(self._made) >= MAX_OFFERS:
            raise CapacityExceeded("too many offers are not answered", limit=MAX_OFFERS)
        until = now + event.offer.timeout_s
        self._made[event.offer.number] = _Made(event.to, event.offer, until)
        self.unsent[event.offer.number] = None
        self._timers.set(OfferOverdue(event.offer.number), until)

    def send_waiting(self, now: float) -> list[DecodeEffect]:
        """Send the offers whose instance is connected; those whose instance is unreachable fail."""
        effects: list[DecodeEffect] = []
        for number in list(self.unsent):
            made = self._made[number]
            instance = self._instances.at(made.to)
            if instance is None:
                failure = self._failure(FailureReason.CAPACITY, "too many unreachable prefill instances")
                effects += self._end_offer(number, failure)
            elif self._peers.are_ready(instance):
                made.peer = instance.peers[0]
                del self.unsent[number]
                effects += self._send(made, made.peer, now)
            elif instance.failure is not None:
                effects += self._end_offer(number, instance.failure)
        return effects

    def answered(self, peer: PeerId, answer: OfferAnswered) -> list[DecodeEffect]:
        """Handle an answer of the rank that has the offer; ignore any other, such as a repeated one."""
        made = self._made.get(answer.number)
        return self._end_offer(answer.number, answer.failure) if made is not None and made.peer == peer else []

    def withdraw(self, number: int) -> None:
        """Forget an offer whose answer the engine does not wait for any more."""
        self._end_offer(number, None)

    def peer_lost(self, peer: PeerId, failure: Failure) -> list[DecodeEffect]:
        """Fail the offers that a lost rank has not answered."""
        numbers = [number for number, made in self._made.items() if made.peer == peer]
        return [effect for number in numbers for effect in self._end_offer(number, failure)]

    def fail_all(self, failure: Failure) -> list[DecodeEffect]:
        """Fail all offers: this rank is closing."""
        return [effect for number in list(self._made) for effect in self._end_offer(number, failure)]

    def expired(self, key: OfferUnanswered | OfferOverdue, now: float) -> list[DecodeEffect]:
        """Send an offer again, or give it up."""
        made = self._made[key.number]
        if isinstance(key, OfferUnanswered):
            return [] if made.peer is None else self._send(made, made.peer, now)
        reason, detail = FailureReason.DEADLINE, f"{made.to} has not answered within {made.message.timeout_s} s"
        instance = self._instances.at(made.to)
        if made.peer is None and instance is not None:
            reason, detail = FailureReason.UNREACHABLE, f"{detail}: {self._obstacles.describe(instance)}"
        return self._end_offer(key.number, self._failure(reason, detail))

    def _send(self, made: _Made, peer: PeerId, now: float) -> list[DecodeEffect]:
        if now >= made.until:
            return []
        self._timers.set(OfferUnanswered(made.message.number), now + made.backoff * self._retransmit_s)
        made.backoff = min(2 * made.backoff, MAX_BACKOFF)
        return self._peers.send(peer, replace(made.message, timeout_s=made.until - now))

    def _end_offer(self, number: int, failure: Failure | None) -> list[DecodeEffect]:
        if self._made.pop(number, None) is None:
            return []
        self.unsent.pop(number, None)
        self._timers.clear(OfferUnanswered(number))
        self._timers.clear(OfferOverdue(number))
        return [ReportOffer(number, failure)]
