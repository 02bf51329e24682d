"""Figures that both sides report."""

from collections.abc import Sequence

from kvflow import RankStatistics

__all__ = ["slowest_rank"]


def slowest_rank(ranks: Sequence[RankStatistics]) -> dict[str, float]:
    """For each stage, the most seconds that one rank spent in it."""
    times = [statistics.times.stages for statistics in ranks]
    return {stage.value: max(stages[stage].total_s for stages in times) for stage in times[0]}
