"""Transfer metrics that vLLM logs and exports: its NIXL series, filled by kvflow, and some of kvflow's own."""

from typing import Any, Final

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from kvflow import FailureReason, Outcome
from kvflow.blocking import BlockingReceiver, BlockingSender

__all__ = ["Metrics", "Stats"]

FAILURES: Final = "kvflow_failures"
ABORTED: Final = "kvflow_aborted_transfers"
HELD: Final = "kvflow_held_blocks"
FREED: Final = "kvflow_freed_blocks"
COUNTERS: Final = {
    ABORTED: "Transfers of KV caches that one side gave up.",
    HELD: "Blocks kept out of the pool until nothing can be written to them any more.",
    FREED: "Such blocks that are back in the pool.",
}
OWN: Final = (FAILURES, *COUNTERS)


class Stats(NixlKVConnectorStats):
    """Statistics since the last step, as lists, so that vLLM can send and concatenate them."""

    @override
    def reset(self) -> None:
        super().reset()
        self.data |= {name: [] for name in OWN}

    @override
    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data[name] for name in OWN)

    def note(self, transfer: BlockingSender | BlockingReceiver) -> None:
        """Record a transfer that has ended."""
        if transfer.outcome is not Outcome.SUCCESS:
            reason = "unknown" if transfer.failure is None else str(transfer.failure.reason.value)
            if reason == FailureReason.ABORTED.value:  # the client has left, or decode had the prompt itself
                self.data[ABORTED].append(1)
                return
            self.data[FAILURES].append(reason)
            self.data["num_failed_transfers"].append(1)
            if reason == "not_granted":
                self.data["num_kv_expired_reqs"].append(1)
        elif isinstance(transfer, BlockingReceiver):
            handover = transfer.result()
            self.data["transfer_duration"].append(handover.elapsed_s)
            self.data["post_duration"].append(handover.first_notice_s)
            self.data["bytes_transferred"].append(handover.num_bytes)
            self.data["num_descriptors"].append(handover.num_notices)

    def note_blocks(self, *, held: int, freed: int) -> None:
        """Record blocks that are newly held until they are safe, and held blocks that were freed."""
        self.data[HELD] += [held] if held else []
        self.data[FREED] += [freed] if freed else []

    @override
    def reduce(self) -> dict[str, Any]:
        reduced: dict[str, Any] = dict(super().reduce())
        reasons = sorted(set(self.data[FAILURES]))
        return reduced | ({"Failures": " ".join(reasons)} if reasons else {}) | {"Blocks held": sum(self.data[HELD])}

    @classmethod
    def of(cls, data: dict[str, Any] | None) -> KVConnectorStats:
        """Create statistics from what another process sent."""
        return cls(data=data) if data else cls()


class Metrics(NixlPromMetrics):
    """Prometheus series."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        failures = self._counter_cls(
            name="vllm:kvflow_failed_transfers",
            documentation="Transfers of KV caches that failed, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._failures, self._labelvalues = failures, labelvalues
        self._counters = {
            series: create_metric_per_engine(
                self._counter_cls(name=f"vllm:{series}", documentation=text, labelnames=labelnames),
                self.per_engine_labelvalues,
            )
            for series, text in COUNTERS.items()
        }

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for reason in transfer_stats_data.get(FAILURES, ()):
            self._failures.labels(*self._labelvalues[engine_idx], reason).inc()
        for series, counter in self._counters.items():
            counter[engine_idx].inc(sum(transfer_stats_data.get(series, ())))
