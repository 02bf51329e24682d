"""Deliveries whose source pages an operator has taken back while writes were on their way. Pure.

The room is over for the engine, but not for the decode ranks: what was posted may still land in their pages. They are
told Drained when it has ended, and not before.
"""

from collections.abc import Iterable, Iterator

from kvflow.state.effects import Effect
from kvflow.state.events import DeliveryId
from kvflow.state.sender import Delivery

__all__ = ["Unproved"]


class Unproved:
    """At most as many as there are posts that have not ended."""

    def __init__(self) -> None:
        self._deliveries: dict[DeliveryId, Delivery] = {}

    def __len__(self) -> int:
        return len(self._deliveries)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self._deliveries.values())

    def keep(self, deliveries: Iterable[Delivery]) -> None:
        """Remember those of a released room that have posts."""
        self._deliveries.update({delivery.id: delivery for delivery in deliveries if delivery.has_posts})

    def find(self, delivery_id: DeliveryId) -> Delivery | None:
        """The delivery, while something of it may still land."""
        return self._deliveries.get(delivery_id)

    def post_settled(self, delivery: Delivery, seq: int) -> list[Effect]:
        """Note that a post has ended; the last one is the proof that the decode rank waits for."""
        effects = delivery.post_settled(seq, is_written=False)
        if not delivery.has_posts:
            del self._deliveries[delivery.id]
        return effects
