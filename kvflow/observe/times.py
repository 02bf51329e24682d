"""Durations of each stage. Pure."""

from dataclasses import dataclass, field

from kvflow.errors import Stage
from kvflow.observe.histograms import Histogram

__all__ = ["StageTimes"]


@dataclass
class StageTimes:
    """Durations by stage, in seconds.

    What is measured: `bootstrap` checking a Hello (prefill) or compiling routes (decode); `enqueue` the wait of a piece
    for its turn; `planning` one plan; `submit` one post, from the call to its end, less the time for which the engine
    kept the event loop from running; `aggregate` from the first to the last notice of a transfer, and scattering a
    packed piece.
    """

    stages: dict[Stage, Histogram] = field(default_factory=lambda: {stage: Histogram() for stage in Stage})

    def copied(self) -> "StageTimes":
        """Return a copy that does not change any more."""
        return StageTimes({stage: times.copied() for stage, times in self.stages.items()})
