"""Records of fictitious ranks."""

from kvflow.directory.service import seal
from kvflow.wire.messages import PeerId, RankId, RankRecord, SealedRecord
from tests.support.pools import PagedShape, Pool

__all__ = ["record", "sealed"]

LAYOUT = Pool(PagedShape(4, 2, (0, 1), 8, 1), 0).layout


def record(instance: str = "prefill", engine_rank: int = 0, num_ranks: int = 1, *, incarnation: int = 1) -> RankRecord:
    peer = PeerId(RankId(instance, engine_rank), incarnation)
    endpoint = f"tcp://10.0.0.{incarnation}:1"
    return RankRecord(peer=peer, num_ranks=num_ranks, endpoint=endpoint, backend="memory", layout=LAYOUT)


def sealed(
    instance: str = "prefill", engine_rank: int = 0, num_ranks: int = 1, *, incarnation: int = 1
) -> SealedRecord:
    """Return a record in the sealed form that a registry keeps."""
    return seal(record(instance, engine_rank, num_ranks, incarnation=incarnation))
