"""Exports the metrics of ranks to Prometheus; needs `kvflow[prometheus]`."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from threading import Lock, Thread
from typing import Any, Final, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import REGISTRY, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from kvflow.admin.messages import Health
from kvflow.errors import LocalProtocolError
from kvflow.metrics import SERIES, Kind, Metric
from kvflow.observe.histograms import Histogram

__all__ = ["RankCollector", "make_app", "start_server"]

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

FAMILIES: Final[dict[Kind, type[Family]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


PROBES: Final = {"/livez": "live", "/readyz": "ready"}
"""Paths of probes, and the field of `Health` that decides."""

WORST: Final = ("broken", "degraded", "ok")

NO_RANK: Final = Health(transfer="degraded", reason="there is no rank", live=True, ready=False)

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class HasMetrics(Protocol):
    """A rank of `kvflow` or `kvflow.blocking`."""

    def health(self) -> Health:
        """Return whether it can transfer; raise LocalProtocolError or TimeoutError if it cannot tell."""

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

    def health(self) -> Health:
        """Return the health of the worst rank; live and ready are those of all."""
        with self._lock:
            ranks = list(self._ranks)
        found = [_health_of(rank) for rank in ranks]
        worst = min(found, key=lambda one: WORST.index(one.transfer), default=NO_RANK)
        is_live, is_ready = all(one.live for one in found), bool(found) and all(one.ready for one in found)
        return Health(transfer=worst.transfer, reason=worst.reason, live=is_live, ready=is_ready)

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


def make_app(collector: RankCollector, registry: Collector = REGISTRY) -> WsgiApp:
    """Return a WSGI application for metrics and for probes.

    `/livez` and `/readyz` answer 200, or 503 if a rank is broken, or is not ready; the body is JSON: the state of the
    worst rank ("ok", "degraded" or "broken") as `transfer`, and its `reason`. All other paths are the metrics.

    Args:
        collector: Has the ranks that probes are about.
        registry: What is exported; `collector` should be registered with it.
    """
    metrics: WsgiApp = make_wsgi_app(registry)

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        decides = PROBES.get(environ["PATH_INFO"])
        if decides is None:
            return metrics(environ, start_response)
        health = collector.health()
        status = "200 OK" if getattr(health, decides) else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [msgspec.json.encode(health)]

    return serve


def start_server(port: int, collector: RankCollector, host: str = "", registry: Collector = REGISTRY) -> WSGIServer:
    """Serve `make_app` in a daemon thread; call `shutdown` and `server_close` of the result to end it.

    Args:
        port: TCP port; 0 for a free one.
        collector: As for `make_app`.
        host: Address to bind; by default, all.
        registry: As for `make_app`.
    """
    app = make_app(collector, registry)
    server = make_server(host, port, app, ThreadingWSGIServer, handler_class=SilentHandler)
    Thread(target=server.serve_forever, name="kvflow-metrics", daemon=True).start()
    return server


class SilentHandler(WSGIRequestHandler):
    """Handles a request without a line on standard error."""

    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass


def _health_of(rank: HasMetrics) -> Health:
    try:
        return rank.health()
    except LocalProtocolError as error:
        return Health(transfer="degraded", reason=str(error), live=True, ready=False)
    except TimeoutError:
        reason = "its event loop has not answered within 10 s"
        return Health(transfer="broken", reason=reason, live=False, ready=False)


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
