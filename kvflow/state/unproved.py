"""Deliveries that are over here, while their bytes may still land at the decode rank. Pure.

The source pages are free: the transport reads them no more, or an operator has taken them back. That proves nothing
about the destination. Its decode rank is told Drained when the last post has ended in a way that proves it, and never
before; if there is no such way, only the end of one of the two processes is a proof.
"""

from collections.abc import Iterable, Iterator

from kvflow.state.effects import Effect
from kvflow.state.events import DeliveryId
from kvflow.state.sender import Delivery
from kvflow.wire.messages import PeerId

__all__ = ["Unproved"]


class Unproved:
    """Kept until there is a proof, or until the decode rank says goodbye or another life of it says hello.

    So of a decode rank that died and never returns, each delivery of which a write failed stays, without its pages.
    """

    def __init__(self) -> None:
        self._deliveries: dict[DeliveryId, Delivery] = {}

    def __len__(self) -> int:
        return len(self._deliveries)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self._deliveries.values())

    def keep(self, deliveries: Iterable[Delivery]) -> None:
        """Remember those of a room that are not proved."""
        for delivery in deliveries:
            if not delivery.is_proved:
                delivery.forget_pages()
                self._deliveries[delivery.id] = delivery

    def find(self, delivery_id: DeliveryId) -> Delivery | None:
        """The delivery, while something of it may still land."""
        return self._deliveries.get(delivery_id)

    def post_settled(self, delivery: Delivery, seq: int, *, lingers: bool) -> list[Effect]:
        """Note that a post has ended; the last one is the proof that the decode rank waits for, unless it lingers."""
        effects = delivery.post_settled(seq, is_written=False, lingers=lingers)
        if delivery.is_proved:
            del self._deliveries[delivery.id]
        return effects

    def outlived(self, peer: PeerId) -> None:
        """Forget earlier lives of a decode rank: their pages are nobody's any more."""
        self._drop([key for key in self._deliveries if key.peer.rank == peer.rank and key.peer != peer])

    def ended(self, peer: PeerId) -> None:
        """Forget a life of a decode rank that is over."""
        self._drop([key for key in self._deliveries if key.peer == peer])

    def _drop(self, keys: list[DeliveryId]) -> None:
        for key in keys:
            del self._deliveries[key]
