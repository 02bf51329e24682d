"""Who is registered, for how long, and who waits for whom. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass

from kvflow.state.deadlines import Deadlines
from kvflow.wire.messages import Card, Cards, PeerId, RankId

__all__ = ["Answer", "RegistryTable", "is_complete"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Send `cards` to whoever asked over `connection`."""

    connection: bytes
    cards: Cards


@dataclass(frozen=True, slots=True)
class _Lease:
    rank: RankId


@dataclass(frozen=True, slots=True)
class _Wait:
    instance: str
    connection: bytes


class RegistryTable:
    """Cards by rank, each under a lease; lookups wait until their instance is complete or their time is up."""

    def __init__(self) -> None:
        self.deadlines: Deadlines[Hashable] = Deadlines()
        self._cards: dict[RankId, Card] = {}
        self._waiting: dict[str, dict[bytes, None]] = {}

    @property
    def num_ranks(self) -> int:
        """Ranks that are registered."""
        return len(self._cards)

    def register(self, card: Card, lease_s: float, now: float) -> list[Answer]:
        """Note a rank; a later life of a rank replaces the earlier one."""
        self._cards[card.peer.rank] = card
        self.deadlines.set(_Lease(card.peer.rank), now + lease_s)
        instance = card.peer.rank.instance
        cards = self._instance(instance)
        if not is_complete(cards):
            return []
        return [self._answer(instance, connection) for connection in list(self._waiting.get(instance, ()))]

    def unregister(self, peer: PeerId) -> None:
        """Forget a rank, unless a later life of it has registered."""
        card = self._cards.get(peer.rank)
        if card is not None and card.peer == peer:
            del self._cards[peer.rank]
            self.deadlines.clear(_Lease(peer.rank))

    def lookup(self, instance: str, timeout_s: float, connection: bytes, now: float) -> list[Answer]:
        """Answer now if the instance is complete, else when it is, or when the time is up."""
        self._waiting.setdefault(instance, {})[connection] = None
        if is_complete(self._instance(instance)):
            return [self._answer(instance, connection)]
        self.deadlines.set(_Wait(instance, connection), now + timeout_s)
        return []

    def expire(self, now: float) -> list[Answer]:
        """Forget ranks whose lease is over, and answer lookups whose time is up with what there is."""
        answers = []
        while (key := self.deadlines.pop_due(now)) is not None:
            match key:
                case _Lease(rank):
                    del self._cards[rank]
                case _Wait(instance, connection):
                    answers.append(self._answer(instance, connection))
        return answers

    def _answer(self, instance: str, connection: bytes) -> Answer:
        self.deadlines.clear(_Wait(instance, connection))
        del self._waiting[instance][connection]
        if not self._waiting[instance]:
            del self._waiting[instance]
        return Answer(connection, Cards(instance=instance, cards=self._instance(instance)))

    def _instance(self, instance: str) -> tuple[Card, ...]:
        cards = [card for rank, card in self._cards.items() if rank.instance == instance]
        return tuple(sorted(cards, key=lambda card: card.peer.rank.engine_rank))


def is_complete(cards: tuple[Card, ...]) -> bool:
    """Every rank of an instance is there, in order; `num_ranks` is a claim, so nothing of that size is made."""
    is_whole = bool(cards) and len(cards) == cards[0].num_ranks
    return is_whole and all(card.peer.rank.engine_rank == rank for rank, card in enumerate(cards))
