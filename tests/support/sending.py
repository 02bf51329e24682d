"""A prefill rank's core, and what its engine and its transport say to it."""

from kvflow.state import events as ev
from kvflow.state.effects import Effect, EnqueueChunk, PostPlan
from kvflow.state.events import Chunk, DeliveryId
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.wire.messages import Notice, PeerId
from tests.support.cores import DECODE, CoreDriver

__all__ = ["DELIVERY", "ROOM", "chunk", "delivery", "enqueued", "post", "settle"]

ROOM = 7
DELIVERY = DeliveryId(ROOM, DECODE, 1)


def delivery(to: PeerId, room: int = ROOM, generation: int = 1) -> DeliveryId:
    return DeliveryId(room, to, generation)


def chunk(
    start: int,
    stop: int,
    *,
    room: int = ROOM,
    last: bool = False,
    metadata: bytes = b"",
    footprint: Footprint = NO_MEMORY,
) -> ev.ChunkOffered:
    return ev.ChunkOffered(room, Chunk((start, stop), {"kv": (start, stop)}, last=last, metadata=metadata), footprint)


def enqueued(effects: list[Effect]) -> list[tuple[int, tuple[int, int]]]:
    """Sequence number and tokens of each part that was put on its way."""
    return [(effect.seq, effect.ranges["kv"]) for effect in effects if isinstance(effect, EnqueueChunk)]


def post(core: CoreDriver, seq: int, num_bytes: int = 16, delivery: DeliveryId = DELIVERY) -> Notice:
    """Have a part planned and posted; give its notice."""
    (effect,) = core(ev.PlanFinished(delivery, seq, num_bytes))
    assert isinstance(effect, PostPlan)
    return effect.notice


def settle(core: CoreDriver, seq: int, delivery: DeliveryId = DELIVERY) -> list[Effect]:
    """Have a post end well."""
    return core(ev.PostSettled(delivery, seq, None))
