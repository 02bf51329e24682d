"""What a prefill rank says of a delivery when it ends without success. Pure."""

from kvflow.state.events import DeliveryId
from kvflow.wire.messages import Drained, Failed, Failure, PeerId

__all__ = ["drained", "failed"]


def drained(delivery: DeliveryId, me: PeerId, failure: Failure | None) -> Drained:
    """The promise that nothing of a delivery can be written any more."""
    engine_rank = me.rank.engine_rank
    return Drained(room=delivery.room, generation=delivery.generation, engine_rank=engine_rank, failure=failure)


def failed(delivery: DeliveryId, me: PeerId, failure: Failure, *, drained: bool) -> Failed:
    """The word that a delivery will not succeed."""
    return Failed(
        room=delivery.room,
        generation=delivery.generation,
        engine_rank=me.rank.engine_rank,
        failure=failure,
        drained=drained,
    )
