"""All of `kvflow bench scale`."""

from collections.abc import Callable

from kvflow.cli.bench.rows import Row
from kvflow.cli.bench.scale.cost import CostSettings, measure_in_flight, measure_peers, measure_standing
from kvflow.cli.bench.scale.memory import measure_memory

__all__ = ["measure_scale"]


async def measure_scale(settings: CostSettings, waiting: int, report: Callable[[Row], None]) -> list[Row]:
    """Measure costs and memory.

    Args:
        settings: Of the costs.
        waiting: Transfers that wait, for their memory.
        report: Told of each row.
    """
    return [
        *await measure_memory(waiting, report),
        *await measure_in_flight(settings, report),
        *await measure_peers(settings, report),
        *await measure_standing(settings, report),
    ]
