"""Durations of each stage. Pure."""

from dataclasses import dataclass, field

from kvflow.errors import Stage

__all__ = ["Duration", "StageTimes"]


@dataclass
class Duration:
    """Count, sum and maximum of durations, in seconds."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Add one duration."""
        self.count += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)


@dataclass
class StageTimes:
    """Durations by stage.

    What is measured: `bootstrap` checking a Hello (prefill) or compiling routes (decode); `enqueue` the wait of a piece
    for its turn; `planning` one plan; `submit` one post, from the call to its end, less the time for which the engine
    kept the event loop from running; `aggregate` from the first to the last notice of a transfer, and scattering a
    packed piece.
    """

    stages: dict[Stage, Duration] = field(default_factory=lambda: {stage: Duration() for stage in Stage})
