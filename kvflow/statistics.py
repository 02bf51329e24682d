"""What a rank counts."""

from typing import NamedTuple

from kvflow.observe.times import StageTimes

__all__ = ["RankStatistics"]


class RankStatistics(NamedTuple):
    """Counts at one moment. The first seven go back to zero when nothing is open.

    Attributes:
        rooms: Transfers that are open.
        quarantined: Ended transfers whose pages are not proved quiet.
        quarantined_pages: Their pages.
        quarantined_bytes: Bytes of those.
        waiting_grants: Grants for rooms that are not open (prefill).
        queued_chunks: Granted chunks, or pieces of them, that wait for their data, turn or credit (prefill).
        posted: Writes that have begun and not ended (prefill).
        deadlines: Deadlines that are set; each known peer has one or two.
        peers: Peers that are known.
        oddities: Ignored messages, by kind.
        times: How long each stage took so far.
    """

    rooms: int
    quarantined: int
    quarantined_pages: int
    quarantined_bytes: int
    waiting_grants: int
    queued_chunks: int
    posted: int
    deadlines: int
    peers: int
    oddities: dict[str, int]
    times: StageTimes
