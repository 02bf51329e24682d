"""All of `kvflow bench scale`."""

from collections.abc import Callable, Sequence

from kvflow.cli.bench.rows import Row
from kvflow.cli.bench.scale.cost import CostSettings, measure_in_flight, measure_peers, measure_standing
from kvflow.cli.bench.scale.memory import measure_memory

__all__ = ["CASES", "measure_scale"]

CASES = ("memory", "in-flight", "peers", "waiting")


async def measure_scale(
    settings: CostSettings, waiting: int, cases: Sequence[str], report: Callable[[Row], None]
) -> list[Row]:
    """Measure costs and memory.

    Args:
        settings: Of the costs.
        waiting: Transfers that wait, for their memory.
        cases: Some of `CASES`.
        report: Told of each row.
    """
    rows: list[Row] = []
    if "memory" in cases:
        rows += await measure_memory(waiting, report)
    for case, measure in (("in-flight", measure_in_flight), ("peers", measure_peers), ("waiting", measure_standing)):
        if case in cases:
            rows += await measure(settings, report)
    return rows
