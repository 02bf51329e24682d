"""Offers that other instances make to this one: each is passed to the engine once, and answered. Pure."""

from collections import OrderedDict
from typing import Final

from kvflow.errors import FailureReason, Stage
from kvflow.gate.shares import FairShares
from kvflow.state.effects import CountAnomaly, PassOffer, PrefillEffect, WithdrawOffer
from kvflow.state.prefill.deadlines import OfferExpired, PrefillTimer
from kvflow.state.prefill.peers import DecodePeers
from kvflow.state.timers import Timers
from kvflow.wire.messages import Failure, Offer, OfferAnswered, PeerId

__all__ = ["OfferId", "OffersReceived"]

MAX_OFFERS: Final = 256
"""Maximum number of offers that the engine has not answered. One principal has a share of them."""

MAX_ANSWERS: Final = 4_096
"""Maximum number of answers that are remembered, for offers that are repeated."""

OfferId = tuple[PeerId, int]
"""The decode rank that has sent an offer, and its number."""


class OffersReceived:
    """Offers by their sender and number; all are declined unless they `are_taken`. Methods return effects."""

    def __init__(self, me: PeerId, peers: DecodePeers, timers: Timers[PrefillTimer], *, are_taken: bool) -> None:
        self._me = me
        self._peers = peers
        self._timers = timers
        self._open: dict[OfferId, None] = {}
        self._shares = FairShares(MAX_OFFERS)
        self._answers: OrderedDict[OfferId, Failure | None] = OrderedDict()
        self._are_taken = are_taken

    def __len__(self) -> int:
        return len(self._open)

    def receive(
        self, peer: PeerId, offer: Offer, now: float, *, leaving: Failure | None = None, denied: Failure | None = None
    ) -> list[PrefillEffect]:
        """Pass an offer to the engine, or decline it; answer a repeated one again."""
        key = (peer, offer.number)
        if key in self._open:
            return []
        if key in self._answers:
            return self._reply(key, self._answers[key])
        if denied is not None:
            return [CountAnomaly("offer_denied", peer, detail=denied.detail), *self._answer(key, denied)]
        if leaving is not None:
            return self._answer(key, leaving)
        if not self._are_taken:
            return self._answer(key, self._failure(FailureReason.REFUSED, f"{self._me.rank} takes no offers"))
        taker = self._peers.taker(peer)
        if not self._shares.has_place(taker, 1):
            detail = f"{len(self._open)} offers are not answered, and one principal has a share of {MAX_OFFERS}"
            return self._answer(key, self._failure(FailureReason.CAPACITY, detail))
        self._open[key] = None
        self._shares.hold(key, taker, 1)
        self._timers.set(OfferExpired(*key), now + offer.timeout_s)
        return [PassOffer(peer, offer)]

    def answer(self, key: OfferId, failure: Failure | None) -> list[PrefillEffect]:
        """Answer an offer as the engine decides; nothing if its sender has left or given up."""
        return self._answer(key, failure) if self._close(key) else []

    def decline_all(self, failure: Failure) -> list[PrefillEffect]:
        """Decline all open offers: this rank is leaving."""
        effects: list[PrefillEffect] = []
        for key in list(self._open):
            effects += [*self._withdraw(key, failure), *self._reply(key, failure)]
        return effects

    def peer_left(self, peer: PeerId, failure: Failure) -> list[PrefillEffect]:
        """Withdraw the offers of a decode rank that has left."""
        return [effect for key in list(self._open) if key[0] == peer for effect in self._withdraw(key, failure)]

    def expired(self, key: OfferExpired) -> list[PrefillEffect]:
        """Withdraw an offer whose sender has given up."""
        return self._withdraw((key.peer, key.number), self._failure(FailureReason.DEADLINE, "not decided in time"))

    def _withdraw(self, key: OfferId, failure: Failure) -> list[PrefillEffect]:
        """Close an offer that the engine has not decided: it must not see it again if it arrives once more."""
        self._close(key)
        self._note_answer(key, failure)
        return [WithdrawOffer(*key)]

    def _close(self, key: OfferId) -> bool:
        if key not in self._open:
            return False
        del self._open[key]
        self._shares.release(key)
        self._timers.clear(OfferExpired(*key))
        return True

    def _answer(self, key: OfferId, failure: Failure | None) -> list[PrefillEffect]:
        self._note_answer(key, failure)
        return self._reply(key, failure)

    def _note_answer(self, key: OfferId, failure: Failure | None) -> None:
        self._answers[key] = failure
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _reply(self, key: OfferId, failure: Failure | None) -> list[PrefillEffect]:
        return self._peers.send(key[0], OfferAnswered(number=key[1], failure=failure))

    def _failure(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.BOOTSTRAP, str(self._me.rank), detail)
