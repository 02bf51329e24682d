"""Exports the metrics of ranks to Prometheus; needs `kvflow[prometheus]`."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from threading import Lock
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from kvflow.errors import LocalProtocolError
from kvflow.metrics import SERIES, Kind, Metric
from kvflow.observe.histograms import Histogram

__all__ = ["RankCollector"]

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

FAMILIES: Final[dict[Kind, type[Family]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class HasMetrics(Protocol):
    """A rank of `kvflow` or `kvflow.blocking`."""

    def metrics(self) -> tuple[Metric, ...]:
        """Return its series with their current values; raise LocalProtocolError or TimeoutError if it cannot."""


class RankCollector(Collector):
    """Collects the metrics of ranks when Prometheus asks for them, see docs/metrics.md.

    Register one in a process, for all of its ranks: `REGISTRY.register(RankCollector(rank))`. It can be asked in any
    thread, and waits for the event loop of each rank. A rank that is not open, or whose event loop does not answer
    within 10 s, has no samples.

    Args:
        ranks: Ranks of `kvflow` or `kvflow.blocking`, open or not.
    """

    def __init__(self, *ranks: HasMetrics) -> None:
        self._ranks = list(ranks)
        self._lock = Lock()

    def add_rank(self, rank: HasMetrics) -> None:
        """Collect the metrics of another rank, too. May be called from any thread."""
        with self._lock:
            self._ranks.append(rank)

    def remove_rank(self, rank: HasMetrics) -> None:
        """Stop collecting the metrics of a rank. May be called from any thread.

        Raises:
            ValueError: Its metrics are not collected.
        """
        with self._lock:
            self._ranks.remove(rank)

    def describe(self) -> Iterable[Family]:
        """Return all families without samples, by which a registry finds that names are taken."""
        return [FAMILIES[series.kind](series.name, series.meaning) for series in SERIES]

    @override
    def collect(self) -> Iterator[Family]:
        with self._lock:
            ranks = list(self._ranks)
        families: dict[str, Family] = {}
        for rank in ranks:
            for metric in _metrics_of(rank):
                family = families.get(metric.name)
                if family is None:
                    family = families[metric.name] = FAMILIES[metric.kind](metric.name, metric.meaning)
                _add_samples(family, metric)
        yield from families.values()


def _metrics_of(rank: HasMetrics) -> Iterable[Metric]:
    try:
        return rank.metrics()
    except (LocalProtocolError, TimeoutError):  # not open, or its event loop is stuck
        return ()


def _add_samples(family: Family, metric: Metric) -> None:
    for labels, value in metric.samples:
        if not isinstance(value, Histogram):
            name = f"{family.name}_total" if metric.kind == "counter" else family.name
            family.add_sample(name, labels, value)
            continue
        bounds = [*map(floatToGoString, value.bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(value.counts), strict=True):
            family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, count)
        family.add_sample(f"{family.name}_count", labels, value.count)
        family.add_sample(f"{family.name}_sum", labels, value.total)
