"""What the transfers and writes of a rank add up to. Pure."""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

from kvflow.errors import FailureReason
from kvflow.observe.breakdown import PARTS, Timeline
from kvflow.observe.histograms import BYTES, BYTES_PER_SECOND, DESCRIPTORS, Histogram
from kvflow.state.tables import Outcome

__all__ = ["RECEIVED_AT_ONCE", "Received", "TransferTotals", "WriteTotals"]

RECEIVED_AT_ONCE: Final = 32
"""Receives that are counted together, in half a millisecond."""

SLOWEST: Final = 100
"""One in so many receives is called slow."""

NOTICED: Final = "engine_noticed"
"""The part that ends after the receive."""


class Received(NamedTuple):
    """What is counted of a `Handover` later, off the way of a transfer. Fields are as there."""

    elapsed_s: float
    first_notice_s: float
    num_bytes: int
    timeline: Timeline | None


@dataclass
class TransferTotals:
    """Transfers so far.

    Attributes:
        ended: How many have ended, by outcome and, unless it is SUCCESS, reason.
        refused: How many were refused when they were entered, by reason.
        granted_s: Seconds from the start of a transfer until every decode rank had granted (prefill).
        handover_s: `Handover.elapsed_s` (decode).
        first_notice_s: `Handover.first_notice_s` (decode).
        received_bytes: `Handover.num_bytes` (decode).
        parts_s: The parts of `Handover.breakdown`, by name (decode).
        slow_s: At most one in a hundred receives has taken longer than this; infinite until there were a hundred.
        received: Receives that are not counted yet (decode).
        noticed_s: The part "engine_noticed" of receives that are not counted yet; added to from any thread (decode).
    """

    ended: Counter[tuple[Outcome, FailureReason | None]] = field(default_factory=Counter)
    refused: Counter[FailureReason] = field(default_factory=Counter)
    granted_s: Histogram = field(default_factory=Histogram)
    handover_s: Histogram = field(default_factory=Histogram)
    first_notice_s: Histogram = field(default_factory=Histogram)
    received_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))
    parts_s: dict[str, Histogram] = field(default_factory=lambda: {part: Histogram() for part in PARTS})
    slow_s: float = math.inf
    received: list[Received] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)

    def count_received(self) -> None:
        """Count the receives since the last call: together, so that few transfers wait for it."""
        for received in self.received:
            self.handover_s.add(received.elapsed_s)
            self.first_notice_s.add(received.first_notice_s)
            self.received_bytes.add(received.num_bytes)
            breakdown = None if received.timeline is None else received.timeline.break_down()
            for part, part_s in ({} if breakdown is None else breakdown.parts).items():
                if part != NOTICED:
                    self.parts_s[part].add(part_s)
        self.received.clear()
        while self.noticed_s:
            self.parts_s[NOTICED].add(self.noticed_s.pop())  # another thread may add to it
        total = self.handover_s.count
        if total >= SLOWEST:
            up_to = zip((*self.handover_s.bounds, math.inf), accumulate(self.handover_s.counts), strict=True)
            self.slow_s = next(bound for bound, count in up_to if (total - count) * SLOWEST <= total)

    def copied(self) -> "TransferTotals":
        """Return a copy that does not change any more."""
        self.count_received()
        return TransferTotals(
            self.ended.copy(),
            self.refused.copy(),
            self.granted_s.copied(),
            self.handover_s.copied(),
            self.first_notice_s.copied(),
            self.received_bytes.copied(),
            {part: times.copied() for part, times in self.parts_s.items()},
            self.slow_s,
        )


@dataclass
class WriteTotals:
    """Writes so far (prefill).

    Attributes:
        descriptors: Descriptors of each write that has ended.
        bytes_per_second: Bytes of each write that succeeded, divided by the time that it took.
    """

    descriptors: Histogram = field(default_factory=lambda: Histogram(DESCRIPTORS))
    bytes_per_second: Histogram = field(default_factory=lambda: Histogram(BYTES_PER_SECOND))

    def copied(self) -> "WriteTotals":
        """Return a copy that does not change any more."""
        return WriteTotals(self.descriptors.copied(), self.bytes_per_second.copied())
