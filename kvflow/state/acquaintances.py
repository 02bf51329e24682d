"""What a prefill rank remembers of the decode ranks that have said hello. Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from kvflow.geometry.cutting import Cutting
from kvflow.state.events import DeliveryId
from kvflow.state.ledger import Ledger
from kvflow.wire.messages import Failure, PeerId, RankId

__all__ = ["Acquaintances", "Ending"]

MAX_ENDINGS = 4_096
"""Ended generations that are remembered for each decode rank, so that late messages of them are recognised."""

MAX_PARTINGS = 4_096
"""Decode ranks that were parted with and are remembered, one number each, in case the same life says hello again."""


class Ending(NamedTuple):
    """How a delivery ended; None for a success."""

    failure: Failure | None


class _Parting(NamedTuple):
    """What is remembered of a life that was parted with: everything below `floor` was over then, for this reason."""

    peer: PeerId
    floor: int
    failure: Failure


@dataclass(slots=True)
class _Acquaintance:
    owed: tuple[str, ...]
    cutting: Cutting | None
    endings: Ledger[Ending]
    floor: int
    parting: _Parting | None


class Acquaintances:
    """Decode ranks, what this rank has for each, and what became of their grants."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, _Acquaintance] = {}
        self._partings: OrderedDict[RankId, _Parting] = OrderedDict()

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def greeted(self, peer: PeerId, owed: tuple[str, ...], cutting: Cutting | None = None) -> None:
        """Remember what there is for a decode rank and how it is cut; what it asked for before stays known.

        That holds also for a life that was parted with and says hello again: it grants nothing anew under a generation
        that it has used.
        """
        if peer in self._peers:
            self._peers[peer].owed, self._peers[peer].cutting = owed, cutting
            return
        parting = self._partings.pop(peer.rank, None)
        if parting is not None and parting.peer != peer:
            parting = None
        floor = parting.floor if parting else 0
        self._peers[peer] = _Acquaintance(owed, cutting, Ledger(MAX_ENDINGS, floor), floor, parting)

    def forget(self, peer: PeerId, failure: Failure) -> None:
        """Drop a decode rank; whatever it asked for is over, for this reason."""
        acquaintance = self._peers.pop(peer, None)
        if acquaintance is None:
            return
        self._partings[peer.rank] = _Parting(peer, acquaintance.floor, failure)
        while len(self._partings) > MAX_PARTINGS:
            self._partings.popitem(last=False)

    def asked(self, peer: PeerId, generation: int) -> None:
        """Note that a decode rank has used a generation."""
        acquaintance = self._peers[peer]
        acquaintance.floor = max(acquaintance.floor, generation + 1)

    def owed(self, peer: PeerId) -> tuple[str, ...]:
        """Components of which there is something for a decode rank."""
        return self._peers[peer].owed

    def cutting(self, peer: PeerId) -> Cutting | None:
        """How chunks for a decode rank are cut."""
        return self._peers[peer].cutting

    def end(self, delivery_id: DeliveryId, failure: Failure | None) -> None:
        """Note how a delivery ended; the first word counts."""
        if delivery_id.peer in self._peers:
            self.asked(delivery_id.peer, delivery_id.generation)
            self._peers[delivery_id.peer].endings.end(delivery_id.generation, Ending(failure))

    def is_over(self, peer: PeerId, generation: int) -> bool:
        """Say whether a generation of a decode rank has ended, or is so old that it must have."""
        return self._peers[peer].endings.is_over(generation)

    def ending(self, peer: PeerId, generation: int) -> Ending | None:
        """How a generation of a decode rank ended, if that is remembered."""
        return self._peers[peer].endings.find(generation)

    def parting(self, peer: PeerId, generation: int) -> Failure | None:
        """Why a decode rank was parted with after it had used a generation, if it was and has returned."""
        parting = self._peers[peer].parting
        return parting.failure if parting is not None and generation < parting.floor else None
