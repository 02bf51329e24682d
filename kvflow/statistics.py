"""Counters of a rank."""

from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from kvflow.observe.histograms import Histogram
from kvflow.observe.times import StageTimes
from kvflow.observe.totals import TransferTotals, WriteTotals
from kvflow.observe.trace import AnomalyLog
from kvflow.state.counts import CoreCounts
from kvflow.state.tables import PeerState

__all__ = ["Observed", "PostCounts", "RankStatistics", "StagingStatistics"]

NO_WRITES: Final = WriteTotals()


class PostCounts(NamedTuple):
    """Writes that are under way, and those so far; see `StagingStatistics`."""

    posted: int = 0
    packed_posts: int = 0
    packed_bytes: int = 0
    direct_posts: int = 0
    direct_bytes: int = 0
    writes: WriteTotals = NO_WRITES


class Observed(NamedTuple):
    """What the shell of a rank has measured; see `RankStatistics`."""

    times: StageTimes
    transfers: TransferTotals
    loop_lag: Histogram
    oldest_quarantine_s: float
    paths: Mapping[str, int]


class StagingStatistics(NamedTuple):
    """Packing counters so far, and the current use of staging memory (docs/packing.md).

    Attributes:
        packed_posts: Writes that went through staging memory (prefill).
        packed_bytes: Bytes of these writes.
        direct_posts: Writes that went to the pages directly (prefill).
        direct_bytes: Bytes of these writes.
        slots_taken: Slots of this rank that are in use (prefill).
        slots_lost: Slots (this rank's and decode ranks') that are unusable because a write may still touch them
            (prefill).
        windows_taken: Windows assigned to an incarnation of a prefill rank, including dead ones without a proof
            (decode).
        windows_free: Windows that are not assigned (decode).
    """

    packed_posts: int = 0
    packed_bytes: int = 0
    direct_posts: int = 0
    direct_bytes: int = 0
    slots_taken: int = 0
    slots_lost: int = 0
    windows_taken: int = 0
    windows_free: int = 0


class RankStatistics(NamedTuple):
    """A snapshot of a rank's counters. The first eight return to zero when nothing is open.

    Attributes:
        rooms: Open transfers.
        quarantined: Ended transfers whose pages are not proved safe.
        quarantined_pages: Pages of these transfers.
        quarantined_bytes: Bytes of these pages.
        announced: Rooms that are announced and have no pages yet; on prefill, the number of announcements by decode
            ranks.
        waiting_grants: Grants for rooms that are not open (prefill).
        queued_chunks: Granted chunks, or pieces of them, that wait for their data, turn or credit (prefill).
        posted: Writes that have started and not ended (prefill).
        timers: Active timers; each known peer has one or two.
        peers: Known peers.
        peers_by_state: The same, by state.
        oldest_quarantine_s: How long pages have been in quarantine at most, in seconds; 0 if none are.
        anomalies: Ignored messages, by kind.
        postponed: Messages over a budget, by kind. Their senders repeat them: this is load, not abuse.
        times: How long each stage has taken so far.
        transfers: Transfers that have ended or were refused, and how long they took.
        writes: Sizes and rates of writes (prefill).
        loop_lag: How late the rank's timers ran, in seconds. Large values mean that the event loop is starved by a
            callback, by a thread that holds the GIL, or by another process on its CPU.
        paths: How many peers are written to over each path of the transport, as far as that is known (prefill; see
            docs/log-events.md).
        staging: Packing counters.
    """

    rooms: int
    quarantined: int
    quarantined_pages: int
    quarantined_bytes: int
    announced: int
    waiting_grants: int
    queued_chunks: int
    posted: int
    timers: int
    peers: int
    peers_by_state: dict[PeerState, int]
    oldest_quarantine_s: float
    anomalies: dict[str, int]
    postponed: dict[str, int]
    times: StageTimes
    transfers: TransferTotals
    writes: WriteTotals
    loop_lag: Histogram
    paths: Mapping[str, int]
    staging: StagingStatistics

    @classmethod
    def from_counts(cls, counts: CoreCounts, posts: PostCounts, anomalies: AnomalyLog, observed: Observed) -> Self:
        """Put together the counters of the parts of a rank."""
        found = counts._asdict() | posts._asdict()
        staging = StagingStatistics(**{name: found.pop(name) for name in StagingStatistics._fields})
        return cls(
            **found,
            **observed._asdict(),
            anomalies=dict(anomalies.counts),
            postponed=dict(anomalies.postponed),
            staging=staging,
        )
