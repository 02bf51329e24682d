"""What a prefill rank remembers of the decode ranks that have said hello. Pure."""

from typing import NamedTuple

from kvflow.state.events import DeliveryId
from kvflow.state.ledger import Ledger
from kvflow.wire.messages import Failure, PeerId

__all__ = ["Acquaintances", "Ending"]

MAX_ENDINGS = 4_096
"""Ended generations that are remembered for each decode rank, so that late messages of them are recognised."""


class Ending(NamedTuple):
    """How a delivery ended; None for a success."""

    failure: Failure | None


class _Acquaintance(NamedTuple):
    owed: tuple[str, ...]
    endings: Ledger[Ending]


class Acquaintances:
    """Decode ranks, what this rank has for each, and what became of their grants."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, _Acquaintance] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def greeted(self, peer: PeerId, owed: tuple[str, ...]) -> None:
        """Remember of which components there is something for a decode rank; what it asked for before stays known."""
        before = self._peers.get(peer)
        self._peers[peer] = _Acquaintance(owed, before.endings if before else Ledger(MAX_ENDINGS))

    def forget(self, peer: PeerId) -> None:
        """Drop a decode rank."""
        self._peers.pop(peer, None)

    def owed(self, peer: PeerId) -> tuple[str, ...]:
        """Components of which there is something for a decode rank."""
        return self._peers[peer].owed

    def end(self, delivery_id: DeliveryId, failure: Failure | None) -> None:
        """Note how a delivery ended; the first word counts."""
        if delivery_id.peer in self._peers:
            self._peers[delivery_id.peer].endings.end(delivery_id.generation, Ending(failure))

    def is_over(self, peer: PeerId, generation: int) -> bool:
        """Say whether a generation of a decode rank has ended, or is so old that it must have."""
        return self._peers[peer].endings.is_over(generation)

    def ending(self, peer: PeerId, generation: int) -> Ending | None:
        """How a generation of a decode rank ended, if that is remembered."""
        return self._peers[peer].endings.find(generation)
