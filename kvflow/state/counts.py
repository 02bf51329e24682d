"""What a core counts. Pure."""

from typing import NamedTuple

from kvflow.state.tables import PeerState

__all__ = ["CoreCounts"]


class CoreCounts(NamedTuple):
    """Counters of a core at one moment; those that one kind of core does not have are 0. See `RankStatistics`."""

    rooms: int
    quarantined: int
    quarantined_pages: int
    quarantined_bytes: int
    announced: int
    timers: int
    peers: int
    peers_by_state: dict[PeerState, int]
    waiting_grants: int = 0
    queued_chunks: int = 0
    slots_taken: int = 0
    slots_lost: int = 0
    windows_taken: int = 0
    windows_free: int = 0
