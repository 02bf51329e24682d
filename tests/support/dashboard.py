"""Generator of deploy/grafana/kvflow.json, the dashboard of docs/metrics.md. `make docs` runs it.

Every query of it is put to a real Prometheus by tests/service/test_prometheus.py.
"""

from pathlib import Path
from typing import Final, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

__all__ = ["PAGE", "PANELS", "Panel", "build_dashboard", "main"]

PAGE: Final = Path(__file__).parents[2] / "deploy/grafana/kvflow.json"

WHICH: Final = '{instance_name=~"$instance_name"}'
RANK: Final = "role, instance_name, engine_rank"
NAMED: Final = "{{instance_name}}/{{engine_rank}}"


class Panel(NamedTuple):
    """A panel: its row, what it answers, the unit of its axis, and its queries by legend."""

    row: str
    title: str
    description: str
    unit: str
    queries: dict[str, str]


def _quantiles(series: str, *, by: str = "") -> dict[str, str]:
    """Return queries of the median and the 99th percentile, for each value of a label if one is given."""
    labels, legend = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    rates = f"sum by ({labels}) (rate({series}_bucket{WHICH}[$__rate_interval]))"
    return {f"{legend}{name}": f"histogram_quantile({q}, {rates})" for name, q in (("p50", 0.5), ("p99", 0.99))}


def _rate(series: str, by: str, *, label: str = "") -> str:
    chosen = WHICH if not label else WHICH.replace("}", f", {label}}}")
    return f"sum by ({by}) (rate({series}{chosen}[$__rate_interval]))"


def _now(series: str, by: str = RANK) -> str:
    return f"sum by ({by}) ({series}{WHICH})"


HANDOVERS: Final = "Handovers"
TRANSPORT: Final = "Transport"
RANKS: Final = "Ranks"
MEMORY: Final = "Memory and quarantine"

PANELS: Final = (
    Panel(
        HANDOVERS,
        "Handovers per second",
        "Transfers that ended on decode ranks, by outcome.",
        "ops",
        {"{{outcome}}": _rate("kvflow_transfers_total", "outcome", label='role="decode"')},
    ),
    Panel(
        HANDOVERS,
        "Time of a handover",
        "From the start of a receive to its last notice. It includes the time in which prefill computes the prompt.",
        "s",
        _quantiles("kvflow_handover_seconds"),
    ),
    Panel(
        HANDOVERS,
        "Parts of a handover",
        "On average: what the last piece of a receive waited for, on both sides. docs/tracing.md explains the parts.",
        "s",
        {
            "{{part}}": _rate("kvflow_handover_part_seconds_sum", "part")
            + " / "
            + _rate("kvflow_handover_part_seconds_count", "part")
        },
    ),
    Panel(
        HANDOVERS,
        "Where the time goes",
        "Mean of each part of a handover, of both sides; docs/tracing.md says what makes each part long.",
        "s",
        {
            "{{part}}": f"{_rate('kvflow_handover_part_seconds_sum', 'part')}"
            f" / {_rate('kvflow_handover_part_seconds_count', 'part')}"
        },
    ),
    Panel(
        HANDOVERS,
        "Failures by reason",
        "Per second, as each side sees them. docs/failure-model.md explains the reasons.",
        "ops",
        {"{{role}} {{reason}}": _rate("kvflow_failed_transfers_total", "role, reason") + " > 0"},
    ),
    Panel(
        HANDOVERS,
        "Wait for grants",
        "From the start of a send until every decode rank had granted its pages: decode was late, or had no pages.",
        "s",
        _quantiles("kvflow_grant_wait_seconds"),
    ),
    Panel(
        TRANSPORT,
        "Bytes received per second",
        "By successful receives, as written into the pages of decode ranks.",
        "Bps",
        {"{{instance_name}}": _rate("kvflow_handover_bytes_sum", "instance_name")},
    ),
    Panel(
        TRANSPORT,
        "Goodput of single writes",
        "Bytes of a write divided by its time. Small writes are bound by latency, so compare equal sizes.",
        "Bps",
        _quantiles("kvflow_write_goodput_bytes_per_second"),
    ),
    Panel(
        TRANSPORT,
        "Descriptors of a write",
        "Many small pieces are slow on every transport; docs/packing.md says what helps.",
        "short",
        _quantiles("kvflow_write_descriptors"),
    ),
    Panel(
        TRANSPORT,
        "Peers by transport path",
        "TCP between two hosts with RDMA cards, or within one host, is a mistake in the settings of the transport.",
        "short",
        {"{{path}}": _now("kvflow_transport_path", "path")},
    ),
    Panel(
        RANKS,
        "Time of each stage",
        "Stages overlap; `submit` is one write, and `aggregate` mostly the time in which the model computes.",
        "s",
        _quantiles("kvflow_stage_seconds", by="stage"),
    ),
    Panel(
        RANKS,
        "Open rooms and the queue",
        "Transfers that are open, chunks that wait for data, turn or credit, and writes in flight.",
        "short",
        {
            "rooms, {{role}}": _now("kvflow_rooms", "role"),
            "queued chunks": _now("kvflow_queued_chunks", "role"),
            "writes in flight": _now("kvflow_writes_in_flight", "role"),
            "waiting grants": _now("kvflow_waiting_grants", "role"),
        },
    ),
    Panel(
        RANKS,
        "Peers by state",
        "A silent or unproved peer keeps pages in quarantine.",
        "short",
        {"{{role}} {{state}}": _now("kvflow_peers", "role, state")},
    ),
    Panel(
        RANKS,
        "Event loop: share of time late",
        "The engine's event loop was busy, or its thread had no CPU or no GIL. kvflow cannot run meanwhile.",
        "percentunit",
        {NAMED: _rate("kvflow_event_loop_lag_seconds_sum", RANK)},
    ),
    Panel(
        RANKS,
        "Anomalies and postponed messages",
        "Per second. docs/log-events.md explains the kinds.",
        "ops",
        {
            "{{kind}}": _rate("kvflow_anomalies_total", "kind"),
            "postponed {{kind}}": _rate("kvflow_postponed_messages_total", "kind"),
        },
    ),
    Panel(
        MEMORY,
        "Bytes in quarantine",
        "Pages that no proof has freed yet. `kvflow quarantine list` names the missing proofs.",
        "bytes",
        {NAMED: _now("kvflow_quarantined_bytes")},
    ),
    Panel(
        MEMORY,
        "Age of the oldest transfer in quarantine",
        "It grows while the process that could write to the pages is neither reached nor known to have ended.",
        "s",
        {NAMED: f"max by ({RANK}) (kvflow_oldest_quarantine_seconds{WHICH})"},
    ),
    Panel(
        MEMORY,
        "Staging memory",
        "Slots on prefill and windows on decode, which packed transfers use.",
        "short",
        {
            "slots {{state}}": _now("kvflow_staging_slots", "state"),
            "windows {{state}}": _now("kvflow_staging_windows", "state"),
        },
    ),
    Panel(
        MEMORY,
        "File descriptors left",
        "That the process of a rank may still open (`ulimit -n`).",
        "short",
        {NAMED: f"min by ({RANK}) (kvflow_file_descriptors_left{WHICH})"},
    ),
)


def build_dashboard() -> str:
    """Return the dashboard as JSON that Grafana imports."""
    source = DataSourceRef(type_val="prometheus", uid="$datasource")
    instances = (
        dashboard.QueryVariable("instance_name")
        .label("Instance")
        .datasource(source)
        .query("label_values(kvflow_rooms, instance_name)")
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
    )
    board = (
        dashboard.Dashboard("kvflow")
        .uid("kvflow")
        .tags(["kvflow"])
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(instances)
    )
    row = ""
    for panel in PANELS:
        if panel.row != row:
            row = panel.row
            board = board.with_row(dashboard.Row(row))
        board = board.with_panel(_drawn(panel, source))
    return f"{JSONEncoder(sort_keys=True, indent=2).encode(board.build())}\n"


def _drawn(panel: Panel, source: DataSourceRef) -> timeseries.Panel:
    drawn = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(source)
        .unit(panel.unit)
        .min(0)
        .legend(common.VizLegendOptions().show_legend(show_legend=True))
    )
    for letter, (legend, query) in zip("ABCD", panel.queries.items(), strict=False):
        drawn = drawn.with_target(prometheus.Dataquery().ref_id(letter).expr(query).legend_format(legend))
    return drawn


def main() -> None:
    """Write the dashboard."""
    PAGE.write_text(build_dashboard())


if __name__ == "__main__":
    main()
