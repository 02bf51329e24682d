"""Transfer metrics that vLLM logs and exports, in series of kvflow's own.

vLLM's `vllm:nixl_*` series are not filled: they describe one read that decode posts for a request, which kvflow does
not have.
"""

from collections import Counter
from typing import Any, Final

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvflow import FailureReason, Outcome
from kvflow.blocking import BlockingReceiver, BlockingSender

__all__ = ["Metrics", "Stats"]

SECONDS: Final = "kvflow_transfer_seconds"
BYTES: Final = "kvflow_transfer_bytes"
FAILURES: Final = "kvflow_failed_transfers"
PARTS: Final = "kvflow_handover_part_seconds"
RECOMPUTED: Final = "kvflow_recomputed_tokens"
ABORTED: Final = "kvflow_aborted_transfers"
HELD: Final = "kvflow_held_blocks"
FREED: Final = "kvflow_freed_blocks"
COUNTERS: Final = {
    ABORTED: "Transfers of KV caches that one side gave up.",
    HELD: "Blocks kept out of the pool until nothing can be written to them any more.",
    FREED: "Such blocks that are back in the pool.",
}
TIMES: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
HISTOGRAMS: Final = {
    SECONDS: (
        "Time from decode's request for a KV cache until it had arrived, including the time until it was computed.",
        TIMES,
    ),
    BYTES: ("Bytes received per transfer.", tuple(2.0 ** (10 + 2 * power) for power in range(13))),
}
SERIES: Final = (FAILURES, RECOMPUTED, PARTS, *COUNTERS, *HISTOGRAMS)


class Stats(KVConnectorStats):
    """Statistics since the last step, as lists, so that vLLM can send and concatenate them."""

    def __init__(self, data: dict[str, list[Any]] | None = None) -> None:
        super().__init__(data or {name: [] for name in SERIES})

    @override
    def reset(self) -> None:
        self.data: dict[str, list[Any]] = {name: [] for name in SERIES}

    @override
    def is_empty(self) -> bool:
        return not any(self.data.values())

    @override
    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, values in other.data.items():
            self.data[name] += values
        return self

    def take_values(self) -> "Stats":
        """Return the statistics, and begin anew."""
        taken = Stats(self.data)
        self.reset()
        return taken

    def note(self, transfer: BlockingSender | BlockingReceiver) -> None:
        """Record a transfer that has ended."""
        if transfer.outcome is not Outcome.SUCCESS:
            reason = "unknown" if transfer.failure is None else str(transfer.failure.reason.value)
            if reason == FailureReason.ABORTED.value:  # the client has left, or decode had the prompt itself
                self.data[ABORTED].append(1)
            else:
                self.data[FAILURES].append(reason)
        elif isinstance(transfer, BlockingReceiver):
            handover = transfer.result()
            self.data[SECONDS].append(handover.elapsed_s)
            self.data[BYTES].append(handover.num_bytes)
            if (breakdown := handover.breakdown) is not None:
                self.data[PARTS].append(breakdown.parts)

    def note_recomputed(self, reason: str, num_tokens: int) -> None:
        """Record tokens that this server computes although it takes prompts over."""
        self.data[RECOMPUTED].append((reason, num_tokens))

    def note_blocks(self, held: int, freed: int) -> None:
        """Record blocks that are newly held until they are safe, and held blocks that were freed."""
        self.data[HELD] += [held] if held else []
        self.data[FREED] += [freed] if freed else []

    @override
    def reduce(self) -> dict[str, Any]:
        seconds, reasons = self.data[SECONDS], sorted(set(self.data[FAILURES]))
        slowest = Counter(max(parts, key=parts.__getitem__) for parts in self.data[PARTS]).most_common(1)
        return {
            "Received": len(seconds),
            "MB": round(sum(self.data[BYTES]) / 1e6, 1),
            "Mean s": round(sum(seconds) / max(1, len(seconds)), 3),
            **({"Mostly": slowest[0][0]} if slowest else {}),
            "Blocks held": sum(self.data[HELD]),
            **({"Failures": " ".join(reasons)} if reasons else {}),
        }


class Metrics(KVConnectorPromMetrics):
    """Prometheus series."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._labelvalues = labelvalues
        self._failures = self._counter_cls(
            name="vllm:kvflow_failed_transfers",
            documentation="Transfers of KV caches that failed, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._parts = self._histogram_cls(
            name=f"vllm:{PARTS}",
            documentation="Parts of the time of a received KV cache, from decode's request to vLLM's notice.",
            buckets=TIMES,
            labelnames=[*labelnames, "part"],
        )
        self._recomputed = self._counter_cls(
            name=f"vllm:{RECOMPUTED}",
            documentation="Tokens of prompts that a decode server computed itself, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._counters = {
            series: create_metric_per_engine(
                self._counter_cls(name=f"vllm:{series}", documentation=text, labelnames=labelnames), labelvalues
            )
            for series, text in COUNTERS.items()
        }
        self._histograms = {
            series: create_metric_per_engine(
                self._histogram_cls(name=f"vllm:{series}", documentation=text, buckets=buckets, labelnames=labelnames),
                labelvalues,
            )
            for series, (text, buckets) in HISTOGRAMS.items()
        }

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for reason in transfer_stats_data.get(FAILURES, ()):
            self._failures.labels(*self._labelvalues[engine_idx], reason).inc()
        for parts in transfer_stats_data.get(PARTS, ()):
            for part, seconds in parts.items():
                self._parts.labels(*self._labelvalues[engine_idx], part).observe(seconds)
        for reason, num_tokens in transfer_stats_data.get(RECOMPUTED, ()):
            self._recomputed.labels(*self._labelvalues[engine_idx], reason).inc(num_tokens)
        for series, counter in self._counters.items():
            counter[engine_idx].inc(sum(transfer_stats_data.get(series, ())))
        for series, histogram in self._histograms.items():
            for value in transfer_stats_data.get(series, ()):
                histogram[engine_idx].observe(value)
