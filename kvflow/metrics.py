"""The series that a rank exports: one table, from which `rank.metrics()` and docs/metrics.md are made.

Names, units and types follow the conventions of Prometheus; nothing here depends on it.
"""

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

from kvflow.errors import FailureReason
from kvflow.observe.histograms import Histogram
from kvflow.resources import num_descriptors_left
from kvflow.state.tables import Outcome
from kvflow.statistics import RankStatistics

__all__ = ["SERIES", "Kind", "Metric", "Role", "Sample", "Series", "Value", "collect_metrics"]

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["prefill", "decode"]
Value = float | Histogram


class Sample(NamedTuple):
    """One value of a series.

    Attributes:
        labels: What it is about. `role`, `instance_name` and `engine_rank` name the rank; some series have one more.
        value: A number, or the `Histogram` if that is the kind of the series.
    """

    labels: dict[str, str]
    value: Value


class Metric(NamedTuple):
    """A series of a rank with its current values.

    Attributes:
        name: As in docs/metrics.md, like "kvflow_handover_seconds".
        kind: "counter", "gauge" or "histogram".
        meaning: What it counts or measures.
        samples: Its values, one for each set of labels.
    """

    name: str
    kind: Kind
    meaning: str
    samples: tuple[Sample, ...]


class Series(NamedTuple):
    """A row of the table.

    Attributes:
        roles: Ranks that have it.
        unit: What values are measured in; for a number of things, what is counted.
        label: Label that tells its values apart; empty if there is one value.
        read: Returns the value, or the values by label; None if it is unknown.
    """

    name: str
    kind: Kind
    roles: tuple[Role, ...]
    unit: str
    label: str
    meaning: str
    read: Callable[[RankStatistics], Value | Mapping[str, Value] | None]


BOTH: Final[tuple[Role, ...]] = ("prefill", "decode")
PREFILL: Final[tuple[Role, ...]] = ("prefill",)
DECODE: Final[tuple[Role, ...]] = ("decode",)


def _ended_by_outcome(found: RankStatistics) -> Mapping[str, Value]:
    counts: dict[str, Value] = {}
    for outcome in (Outcome.SUCCESS, Outcome.FAILED, Outcome.ABORTED):
        counts[outcome.value] = sum(count for (known, _), count in found.transfers.ended.items() if known is outcome)
    return counts


def _failed_by_reason(found: RankStatistics) -> Mapping[str, Value]:
    return {reason.value: found.transfers.ended[Outcome.FAILED, reason] for reason in FailureReason}


SERIES: Final[tuple[Series, ...]] = (
    Series(
        "kvflow_handover_seconds",
        "histogram",
        DECODE,
        "seconds",
        "",
        "From the start of a receive (from the grant, if the room was announced) to its last notice, including the "
        "time in which prefill computes the prompt.",
        lambda found: found.transfers.handover_s,
    ),
    Series(
        "kvflow_first_notice_seconds",
        "histogram",
        DECODE,
        "seconds",
        "",
        "From the same start to the first notice.",
        lambda found: found.transfers.first_notice_s,
    ),
    Series(
        "kvflow_handover_bytes",
        "histogram",
        DECODE,
        "bytes",
        "",
        "Bytes that a successful receive has written into the pages of this rank.",
        lambda found: found.transfers.received_bytes,
    ),
    Series(
        "kvflow_handover_part_seconds",
        "histogram",
        DECODE,
        "seconds",
        "part",
        "The [parts](tracing.md#the-parts) of these receives: what the last piece of each waited for, on both sides. "
        "Only those whose prefill rank tells its times.",
        lambda found: found.transfers.parts_s,
    ),
    Series(
        "kvflow_grant_wait_seconds",
        "histogram",
        PREFILL,
        "seconds",
        "",
        "From the start of a send until every decode rank had granted its pages.",
        lambda found: found.transfers.granted_s,
    ),
    Series(
        "kvflow_stage_seconds",
        "histogram",
        BOTH,
        "seconds",
        "stage",
        "Time taken by each stage: `bootstrap` checks a Hello (prefill) or compiles routes (decode); `enqueue` is the "
        "wait of a piece for its turn; `planning` makes one plan; `submit` is one write, from the post to its end; "
        "`aggregate` is from the first to the last notice of a transfer, or scatters a packed piece.",
        lambda found: {stage.value: times for stage, times in found.times.stages.items()},
    ),
    Series(
        "kvflow_write_descriptors",
        "histogram",
        PREFILL,
        "descriptors",
        "",
        "Descriptors of each write.",
        lambda found: found.writes.descriptors,
    ),
    Series(
        "kvflow_write_goodput_bytes_per_second",
        "histogram",
        PREFILL,
        "bytes per second",
        "",
        "Bytes of each write that succeeded, divided by the time from its post to its end. Low values of small writes "
        "are latency; compare writes of one size.",
        lambda found: found.writes.bytes_per_second,
    ),
    Series(
        "kvflow_event_loop_lag_seconds",
        "histogram",
        BOTH,
        "seconds",
        "",
        "How late the timers of the rank ran: its event loop was busy, or its thread had no CPU or no GIL.",
        lambda found: found.loop_lag,
    ),
    Series(
        "kvflow_transfers_total",
        "counter",
        BOTH,
        "transfers",
        "outcome",
        "Transfers that have ended, by [outcome](api.md#outcome).",
        _ended_by_outcome,
    ),
    Series(
        "kvflow_failed_transfers_total",
        "counter",
        BOTH,
        "transfers",
        "reason",
        "Those of them that have failed, by [reason](failure-model.md#reasons). Transfers that this engine aborted are "
        "not among them; `aborted` means the engine of the other side.",
        _failed_by_reason,
    ),
    Series(
        "kvflow_refused_transfers_total",
        "counter",
        BOTH,
        "transfers",
        "reason",
        "Transfers that this rank refused to its own engine when they were to start.",
        lambda found: {reason.value: found.transfers.refused[reason] for reason in FailureReason},
    ),
    Series(
        "kvflow_writes_total",
        "counter",
        PREFILL,
        "writes",
        "target",
        "Writes posted, to the `pages` of decode ranks or, packed, to `staging` memory ([packing](packing.md)).",
        lambda found: {"pages": found.staging.direct_posts, "staging": found.staging.packed_posts},
    ),
    Series(
        "kvflow_written_bytes_total",
        "counter",
        PREFILL,
        "bytes",
        "target",
        "Bytes of these writes.",
        lambda found: {"pages": found.staging.direct_bytes, "staging": found.staging.packed_bytes},
    ),
    Series(
        "kvflow_anomalies_total",
        "counter",
        BOTH,
        "events",
        "kind",
        "Messages that were ignored, and similar events ([kinds](log-events.md#anomalies)). A kind is listed once it "
        "has occurred.",
        lambda found: found.anomalies,
    ),
    Series(
        "kvflow_postponed_messages_total",
        "counter",
        BOTH,
        "messages",
        "kind",
        "Messages over a budget, which their senders repeat ([kinds](log-events.md#postponed-messages)). A kind is "
        "listed once it has occurred.",
        lambda found: found.postponed,
    ),
    Series("kvflow_rooms", "gauge", BOTH, "transfers", "", "Transfers that are open.", lambda found: found.rooms),
    Series(
        "kvflow_announced_rooms",
        "gauge",
        BOTH,
        "rooms",
        "",
        "Rooms that are announced and have no pages yet.",
        lambda found: found.announced,
    ),
    Series(
        "kvflow_waiting_grants",
        "gauge",
        PREFILL,
        "grants",
        "",
        "Grants for rooms that the engine has not opened yet.",
        lambda found: found.waiting_grants,
    ),
    Series(
        "kvflow_queued_chunks",
        "gauge",
        PREFILL,
        "pieces",
        "",
        "Granted chunks, or pieces of them, that wait for their data, turn or credit.",
        lambda found: found.queued_chunks,
    ),
    Series(
        "kvflow_writes_in_flight",
        "gauge",
        PREFILL,
        "writes",
        "",
        "Writes that have started and not ended.",
        lambda found: found.posted,
    ),
    Series(
        "kvflow_peers",
        "gauge",
        BOTH,
        "peers",
        "state",
        "Known peers, by [state](state-machines.md).",
        lambda found: {state.value: count for state, count in found.peers_by_state.items()},
    ),
    Series(
        "kvflow_transport_path",
        "gauge",
        PREFILL,
        "peers",
        "path",
        "Peers to which the transport writes over each path, like `TCP`. It is derived from the kernel's TCP byte "
        "counters, and known once there were [large writes](log-events.md#the-path-of-writes).",
        lambda found: found.paths,
    ),
    Series(
        "kvflow_quarantined_transfers",
        "gauge",
        BOTH,
        "transfers",
        "",
        "Ended transfers whose pages are not proved safe.",
        lambda found: found.quarantined,
    ),
    Series(
        "kvflow_quarantined_pages",
        "gauge",
        BOTH,
        "pages",
        "",
        "Pages of these transfers.",
        lambda found: found.quarantined_pages,
    ),
    Series(
        "kvflow_quarantined_bytes",
        "gauge",
        BOTH,
        "bytes",
        "",
        "Size of these pages. No transfer starts while it is at the limit `quarantined_bytes`.",
        lambda found: found.quarantined_bytes,
    ),
    Series(
        "kvflow_oldest_quarantine_seconds",
        "gauge",
        BOTH,
        "seconds",
        "",
        "How long the oldest of them has been in quarantine; 0 if there is none.",
        lambda found: found.oldest_quarantine_s,
    ),
    Series(
        "kvflow_staging_slots",
        "gauge",
        PREFILL,
        "slots",
        "state",
        "Staging slots that are `taken`, or `lost` because a write may still touch them.",
        lambda found: {"taken": found.staging.slots_taken, "lost": found.staging.slots_lost},
    ),
    Series(
        "kvflow_staging_windows",
        "gauge",
        DECODE,
        "windows",
        "state",
        "Staging windows that are `taken` by a prefill rank, or `free`.",
        lambda found: {"taken": found.staging.windows_taken, "free": found.staging.windows_free},
    ),
    Series(
        "kvflow_file_descriptors_left",
        "gauge",
        BOTH,
        "descriptors",
        "",
        "File descriptors that this process may still open (`ulimit -n`).",
        lambda _: num_descriptors_left(),
    ),
)
"""All series, in the order of docs/metrics.md."""


def collect_metrics(found: RankStatistics, labels: dict[str, str]) -> tuple[Metric, ...]:
    """Return the series of a rank.

    Args:
        found: A snapshot of its counters.
        labels: Its role and name, which become part of the labels of each sample.
    """
    return tuple(
        Metric(one.name, one.kind, one.meaning, tuple(_samples(one, one.read(found), labels)))
        for one in SERIES
        if labels["role"] in one.roles
    )


def _samples(series: Series, read: Value | Mapping[str, Value] | None, labels: dict[str, str]) -> list[Sample]:
    if read is None:
        return []
    if isinstance(read, Mapping):
        return [Sample({**labels, series.label: key}, value) for key, value in read.items()]
    return [Sample(labels, read)]
