"""Cards of ranks that do not exist."""

from kvflow.wire.messages import Card, PeerId, RankId
from tests.support.pools import Pool, PoolShape

__all__ = ["card"]

LAYOUT = Pool(PoolShape(4, 2, (0, 1), 8, 1), 0).layout


def card(instance: str = "prefill", engine_rank: int = 0, num_ranks: int = 1, *, life: int = 1) -> Card:
    peer = PeerId(RankId(instance, engine_rank), life)
    return Card(peer=peer, num_ranks=num_ranks, endpoint="tcp://127.0.0.1:1", backend="memory", layout=LAYOUT)
