"""Counters of a rank."""

import dataclasses
from typing import NamedTuple, Self

from kvflow.observe.times import Duration, StageTimes
from kvflow.observe.trace import AnomalyLog
from kvflow.state.counts import CoreCounts

__all__ = ["PostCounts", "RankStatistics", "StagingStatistics"]


class PostCounts(NamedTuple):
    """Writes that are under way, and those so far; see `StagingStatistics`."""

    posted: int = 0
    packed_posts: int = 0
    packed_bytes: int = 0
    direct_posts: int = 0
    direct_bytes: int = 0


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
        anomalies: Ignored messages, by kind.
        postponed: Messages over a budget, by kind. Their senders repeat them: this is load, not abuse.
        times: How long each stage has taken so far.
        loop_lag: How late the rank's timers ran. Large values mean that the event loop is starved by a callback, by a
            thread that holds the GIL, or by another process on its CPU.
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
    anomalies: dict[str, int]
    postponed: dict[str, int]
    times: StageTimes
    loop_lag: Duration
    staging: StagingStatistics

    @classmethod
    def from_counts(
        cls, counts: CoreCounts, posts: PostCounts, anomalies: AnomalyLog, times: StageTimes, loop_lag: Duration
    ) -> Self:
        """Put together the counters of the parts of a rank."""
        found = counts._asdict() | posts._asdict()
        staging = StagingStatistics(**{name: found.pop(name) for name in StagingStatistics._fields})
        return cls(
            **found,
            anomalies=dict(anomalies.counts),
            postponed=dict(anomalies.postponed),
            times=times,
            loop_lag=dataclasses.replace(loop_lag),
            staging=staging,
        )
