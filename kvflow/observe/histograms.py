"""Histograms of durations, sizes and rates. Pure."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Final, Self

__all__ = ["BYTES", "BYTES_PER_SECOND", "DESCRIPTORS", "SECONDS", "Histogram"]

SECONDS: Final = (*(factor * 10.0**power for power in range(-5, 2) for factor in (1.0, 2.5, 5.0)), 100.0)
"""10 us to 100 s."""

BYTES: Final = tuple(4.0**power for power in range(5, 18))
"""1 KiB to 16 GiB."""

DESCRIPTORS: Final = tuple(4.0**power for power in range(10))
"""1 to 262,144."""

BYTES_PER_SECOND: Final = tuple(factor * 10.0**power for power in range(6, 12) for factor in (1.0, 2.5, 5.0))
"""1 MB/s to 500 GB/s."""


@dataclass(slots=True)
class Histogram:
    """How many values fell into each of a fixed set of buckets. Adding a value allocates nothing.

    Attributes:
        bounds: Upper bounds of the buckets, ascending. A value equal to a bound is in its bucket.
        counts: Number of values in each bucket. One bucket more than bounds: the last has no upper bound.
        total: Sum of all values.
        maximum: The greatest value; 0 if there is none.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    maximum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.maximum = max(self.maximum, value)

    def copied(self) -> Self:
        """Return a copy that does not change any more."""
        return replace(self, counts=self.counts.copy())
