"""What the transfers and writes of a rank add up to. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from kvflow.errors import FailureReason
from kvflow.observe.histograms import BYTES, BYTES_PER_SECOND, DESCRIPTORS, Histogram
from kvflow.state.tables import Outcome

__all__ = ["TransferTotals", "WriteTotals"]


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
    """

    ended: Counter[tuple[Outcome, FailureReason | None]] = field(default_factory=Counter)
    refused: Counter[FailureReason] = field(default_factory=Counter)
    granted_s: Histogram = field(default_factory=Histogram)
    handover_s: Histogram = field(default_factory=Histogram)
    first_notice_s: Histogram = field(default_factory=Histogram)
    received_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))

    def copied(self) -> "TransferTotals":
        """Return a copy that does not change any more."""
        return TransferTotals(
            self.ended.copy(),
            self.refused.copy(),
            self.granted_s.copied(),
            self.handover_s.copied(),
            self.first_notice_s.copied(),
            self.received_bytes.copied(),
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
