"""Metrics: each transfer and failure moves the documented series, and no others; Prometheus reads them."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from urllib.error import HTTPError
from urllib.request import urlopen

import anyio
import anyio.to_thread
import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

import kvflow
from kvflow.admin.messages import Health
from kvflow.backends.memory import MemoryBackend
from kvflow.blocking import DecodeRank as BlockingDecodeRank
from kvflow.blocking import LoopThread
from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, LocalProtocolError, PagesInUse
from kvflow.metrics import SERIES, Metric
from kvflow.observe.breakdown import PARTS
from kvflow.observe.histograms import Histogram
from kvflow.prometheus import RankCollector, start_server
from tests.service.test_closing import crash, leave_broken
from tests.support.failures import catch, undisturbed
from tests.support.instances import PAGE_SIZE, PATIENT, QUICK, Deployment, decode_config, deploy, make_pool
from tests.support.ports import unused_port
from tests.support.waiting import until

AT_ANY_TIME = {("kvflow_event_loop_lag_seconds", ""), ("kvflow_anomalies_total", "event_loop_starved")}
"""Move with each timer, and on a busy machine."""

Side = kvflow.PrefillRank | kvflow.DecodeRank

Point = tuple[str, str]
"""A series, and the value of the label that tells its values apart; empty if it has none."""

CONSTANT = {"role", "instance_name", "engine_rank"}


def point_of(name: str, labels: dict[str, str]) -> Point:
    return name, "".join(value for label, value in labels.items() if label not in CONSTANT)


def counts_of(metrics: tuple[Metric, ...]) -> dict[Point, float]:
    """Return the value of each counter, and the number of values in each histogram."""
    return {
        point_of(metric.name, labels): value.count if isinstance(value, Histogram) else value
        for metric in metrics
        if metric.kind != "gauge"
        for labels, value in metric.samples
        if point_of(metric.name, labels) not in AT_ANY_TIME
    }


def gauge(rank: Side, name: str, label: str = "") -> float:
    (value,) = [
        value
        for metric in rank.metrics()
        for labels, value in metric.samples
        if point_of(metric.name, labels) == (name, label)
    ]
    assert not isinstance(value, Histogram)
    return value


def increases(before: dict[Point, float], after: dict[Point, float]) -> dict[Point, float]:
    return {point: value - before.get(point, 0) for point, value in after.items() if value != before.get(point, 0)}


CONNECTED: dict[Point, float] = {("kvflow_stage_seconds", "bootstrap"): 1}
GRANTED: dict[Point, float] = {("kvflow_grant_wait_seconds", ""): 1}


def wrote(num_bytes: int, num_writes: int, num_failed: int = 0) -> dict[Point, float]:
    """Return what moves on prefill when writes are posted."""
    return GRANTED | {
        ("kvflow_stage_seconds", "enqueue"): num_writes,
        ("kvflow_stage_seconds", "planning"): num_writes,
        ("kvflow_stage_seconds", "submit"): num_writes,
        ("kvflow_write_descriptors", ""): num_writes,
        **({("kvflow_write_goodput_bytes_per_second", ""): num_writes - num_failed} if num_failed < num_writes else {}),
        ("kvflow_writes_total", "pages"): num_writes,
        ("kvflow_written_bytes_total", "pages"): num_bytes,
    }


RECEIVED: dict[Point, float] = {
    ("kvflow_handover_seconds", ""): 1,
    ("kvflow_first_notice_seconds", ""): 1,
    ("kvflow_handover_bytes", ""): 1,
    ("kvflow_stage_seconds", "aggregate"): 1,
    **{("kvflow_handover_part_seconds", part): 1 for part in PARTS},
}


def ended(outcome: str, reason: str = "") -> dict[Point, float]:
    failed: dict[Point, float] = {("kvflow_failed_transfers_total", reason): 1} if reason else {}
    return {("kvflow_transfers_total", outcome): 1} | failed


def refused(reason: str) -> dict[Point, float]:
    return {("kvflow_refused_transfers_total", reason): 1}


@pytest.mark.anyio
async def test_a_transfer_moves_the_series_that_describe_it_and_no_others() -> None:
    async with deploy() as deployment:
        (prefill,), (decode,) = deployment.prefill, deployment.decode
        ranks: list[Side] = [prefill, decode]
        before = [counts_of(rank.metrics()) for rank in ranks]
        request = deployment.request(7, 8)
        (handover,) = await request.hand_over(chunk=4)
        await deployment.settle()
        sent, received = (increases(old, counts_of(rank.metrics())) for old, rank in zip(before, ranks, strict=True))
        assert sent == CONNECTED | wrote(handover.num_bytes, 2) | ended("success")
        assert received == CONNECTED | RECEIVED | ended("success")
        totals = decode.statistics().transfers
        assert totals.received_bytes.total == handover.num_bytes
        assert (totals.handover_s.total, totals.first_notice_s.total) == (handover.elapsed_s, handover.first_notice_s)
        assert gauge(prefill, "kvflow_peers", "connected") == gauge(decode, "kvflow_peers", "connected") == 1


async def fail_a_write(deployment: Deployment) -> None:
    deployment.faults[0].plan.append("fail")
    request = deployment.request(1, PAGE_SIZE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, request.send)
        tasks.start_soon(catch, request.receive)


async def abort_on_decode(deployment: Deployment) -> None:
    async with deployment.prefill[0].send(1) as sender, deployment.request(1, PAGE_SIZE).receiver() as receiver:
        await sender.granted()
        receiver.abort()
        await catch(sender.delivered)


async def abort_on_prefill(deployment: Deployment) -> None:
    async with deployment.prefill[0].send(1) as sender, deployment.request(1, PAGE_SIZE).receiver() as receiver:
        await sender.granted()
        sender.abort()
        await catch(receiver.done)


async def ask_for_nothing(deployment: Deployment) -> None:
    await catch(deployment.request(1, PAGE_SIZE).send)


async def open_nothing(deployment: Deployment) -> None:
    await catch(deployment.request(1, PAGE_SIZE).receive)


async def compute_nothing(deployment: Deployment) -> None:
    receiver = deployment.request(1, PAGE_SIZE).receiver(timeout_s=2.0)
    async with deployment.prefill[0].send(1) as sender, receiver:
        await catch(receiver.done)
        await catch(sender.delivered)


async def ask_a_stranger(deployment: Deployment) -> None:
    receiver = deployment.decode[0].receive(1, prefill="nobody", tokens=(0, 4), pages={"kv": [0]})
    async with receiver:
        await catch(receiver.done)


async def leave(deployment: Deployment) -> None:
    async with deployment.prefill[0].send(1) as sender, deployment.request(1, PAGE_SIZE).receiver() as receiver:
        await sender.granted()
        await deployment.close(deployment.prefill[0])
        await catch(receiver.done)
        await catch(sender.delivered)


async def use_pages_twice(deployment: Deployment) -> None:
    request = deployment.request(1, PAGE_SIZE)
    async with request.receiver() as receiver:
        other = deployment.decode[0].receive(2, prefill="prefill", tokens=(0, 4), pages=request.dst_pages(0, (0, 4)))
        with pytest.raises(PagesInUse):
            await other.__aenter__()
        receiver.abort()


async def use_a_room_twice(deployment: Deployment) -> None:
    async with deployment.prefill[0].send(1) as sender:
        with pytest.raises(LocalProtocolError, match="room"):
            await deployment.prefill[0].send(1).__aenter__()
        sender.abort()


async def open_too_many(deployment: Deployment) -> None:
    prefill = deployment.prefill[0]
    async with prefill.send(1) as one, prefill.send(2) as other:
        with pytest.raises(CapacityExceeded):
            await prefill.send(3).__aenter__()
        one.abort()
        other.abort()


@dataclass
class Fault:
    """How to make a transfer fail, and what that moves on each side."""

    stage: Callable[[Deployment], Awaitable[None]]
    prefill: dict[Point, float]
    decode: dict[Point, float]
    timeouts: Timeouts = PATIENT
    are_connected: bool = True


FAULTS = (
    Fault(
        fail_a_write,
        wrote(768, 1, num_failed=1) | ended("failed", "write_failed"),
        ended("failed", "write_failed"),
    ),
    Fault(abort_on_decode, GRANTED | ended("failed", "aborted"), ended("aborted")),
    Fault(abort_on_prefill, GRANTED | ended("aborted"), ended("failed", "aborted")),
    Fault(ask_for_nothing, ended("failed", "not_granted"), {}, replace(PATIENT, grant_s=0.3), are_connected=False),
    Fault(open_nothing, {}, ended("failed", "unknown_room"), replace(PATIENT, open_s=2.0)),
    Fault(compute_nothing, GRANTED | ended("failed", "deadline"), ended("failed", "deadline")),
    Fault(ask_a_stranger, {}, ended("failed", "unreachable"), replace(PATIENT, handshake_s=0.3), are_connected=False),
    Fault(leave, GRANTED | ended("aborted"), ended("failed", "peer_closed")),
    Fault(use_pages_twice, {}, ended("aborted") | refused("pages_in_use")),
    Fault(use_a_room_twice, ended("aborted") | refused("protocol"), {}),
    Fault(open_too_many, {("kvflow_transfers_total", "aborted"): 2} | refused("capacity"), {}),
)


@pytest.mark.anyio
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.stage.__name__)
async def test_a_failure_moves_the_series_that_describe_it_and_no_others(fault: Fault) -> None:
    async with deploy(timeouts=fault.timeouts, limits=Limits(transfers=2)) as deployment:
        if fault.are_connected:
            await undisturbed(deployment)
        ranks: list[Side] = [deployment.prefill[0], deployment.decode[0]]
        before = [counts_of(rank.metrics()) for rank in ranks]
        await fault.stage(deployment)
        await deployment.settle()
        sent, received = (increases(old, counts_of(rank.metrics())) for old, rank in zip(before, ranks, strict=True))
        assert (sent, received) == (fault.prefill, fault.decode)


@pytest.mark.anyio
async def test_quarantine_shows_in_its_gauges_until_it_is_released() -> None:
    names = ("transfers", "pages", "bytes")
    async with deploy(timeouts=replace(QUICK, drain_s=0.1)) as deployment:
        deployment.faults[0].plan.append("doubt")
        request = deployment.request(1, 2 * PAGE_SIZE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            tasks.start_soon(catch, request.receive)
        sides: list[Side] = [deployment.prefill[0], deployment.decode[0]]
        for rank in sides:
            (record,) = rank.quarantined()
            assert [gauge(rank, f"kvflow_quarantined_{name}") for name in names] == [1, 2, record.num_bytes]
            await until(lambda rank=rank: gauge(rank, "kvflow_oldest_quarantine_seconds") > 0)  # type: ignore[misc]
            rank.release(1)
            assert [gauge(rank, f"kvflow_quarantined_{name}") for name in names] == [0, 0, 0]
            assert gauge(rank, "kvflow_oldest_quarantine_seconds") == 0


def families_of(text: str) -> dict[str, Family]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def labels_of(families: dict[str, Family]) -> dict[str, set[tuple[str, str]]]:
    """Return, for each family, the roles and the labels of its samples besides those of every histogram and rank."""
    known = {*CONSTANT, "le"}
    return {
        family.name: {
            (sample.labels["role"], label)
            for sample in family.samples
            for label in sorted(sample.labels.keys() - known) or [""]
        }
        for family in families.values()
    }


@pytest.mark.anyio
async def test_prometheus_reads_the_table_from_ranks_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each series has the type, roles and label of the table; all of them are there."""
    monkeypatch.setattr(MemoryBackend, "observed_paths", {"TCP": 1})  # it has none of its own
    port = unused_port()
    async with deploy() as deployment:
        (prefill,), (decode,) = deployment.prefill, deployment.decode
        await undisturbed(deployment)
        for rank in (prefill, decode):
            rank._anomalies.count("late_notice")
            rank._anomalies.postpone("hello_over_budget")
        registry = CollectorRegistry(auto_describe=True)
        registry.register(RankCollector(prefill, decode))
        server, thread = start_http_server(port, "127.0.0.1", registry)
        text = await anyio.to_thread.run_sync(read, f"http://127.0.0.1:{port}/metrics")
        await anyio.to_thread.run_sync(server.shutdown)
        server.server_close()
        thread.join()
    families = families_of(text)
    assert {name: family.type for name, family in families.items()} == {
        series.name.removesuffix("_total"): series.kind for series in SERIES
    }
    assert labels_of(families) == {
        series.name.removesuffix("_total"): {(role, series.label) for role in series.roles} for series in SERIES
    }
    buckets = {
        sample.labels["le"]: sample.value
        for sample in families["kvflow_handover_seconds"].samples
        if sample.name == "kvflow_handover_seconds_bucket"
    }
    assert buckets["+Inf"] == decode.statistics().transfers.handover_s.count == 1
    assert sorted(buckets.values()) == list(buckets.values()), "buckets are cumulative"
    (total,) = [it.value for it in families["kvflow_handover_bytes"].samples if it.name == "kvflow_handover_bytes_sum"]
    assert total == decode.statistics().transfers.received_bytes.total


def read(address: str) -> str:
    with urlopen(address, timeout=30) as answer:  # noqa: S310 - a server of this test
        text: str = answer.read().decode()
    return text


def test_prometheus_reads_blocking_ranks_while_they_are_open_and_one_loop_has_several() -> None:
    with LoopThread() as loop:
        ranks = [
            BlockingDecodeRank(decode_config(None, engine_rank, 2), make_pool().layout, loop=loop)
            for engine_rank in range(2)
        ]
        registry, collector = CollectorRegistry(auto_describe=True), RankCollector(ranks[0])
        registry.register(collector)
        collector.add_rank(ranks[1])
        assert ranks_in(registry) == set()
        for rank in ranks:
            rank.open()
        assert ranks_in(registry) == {"0", "1"}
        ranks[0].close()
        assert ranks_in(registry) == {"1"}
        collector.remove_rank(ranks[1])
        assert ranks_in(registry) == set()
        ranks[1].close()


def ranks_in(registry: CollectorRegistry) -> set[str]:
    families = families_of(generate_latest(registry).decode())
    return {sample.labels["engine_rank"] for family in families.values() for sample in family.samples}


def test_a_registry_takes_the_names_once() -> None:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(RankCollector())
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(RankCollector())


def test_names_say_what_they_count_as_prometheus_wants() -> None:
    assert len({series.name for series in SERIES}) == len(SERIES)
    for series in SERIES:
        assert series.name.startswith("kvflow_")
        assert series.name.endswith("_total") == (series.kind == "counter")
        unit = series.unit.replace(" ", "_")
        if unit in ("seconds", "bytes", "bytes_per_second"):
            assert series.name.removesuffix("_total").endswith(unit)


def asked(port: int, path: str) -> tuple[int, dict[str, object]]:
    """Return the status of a probe over HTTP, and its answer."""
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=100) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.anyio
async def test_metrics_port_answers_probes() -> None:
    async with deploy() as deployment:
        collector, registry = RankCollector(*deployment.prefill, *deployment.decode), CollectorRegistry()
        registry.register(collector)
        server = start_server(0, collector, "127.0.0.1", registry)
        try:
            ok = {"transfer": "ok", "reason": "", "live": True, "ready": True}
            for path in ("/livez", "/readyz"):
                assert await anyio.to_thread.run_sync(asked, server.server_port, path) == (200, ok)
            text = await anyio.to_thread.run_sync(read, f"http://127.0.0.1:{server.server_port}/metrics")
            assert "kvflow_rooms{" in text

            deployment.prefill[0].start_drain()
            draining = {"transfer": "degraded", "reason": "the rank is draining", "live": True, "ready": False}
            assert await anyio.to_thread.run_sync(asked, server.server_port, "/livez") == (200, draining)
            assert await anyio.to_thread.run_sync(asked, server.server_port, "/readyz") == (503, draining)

            await crash(deployment.decode[0])
            status, health = await anyio.to_thread.run_sync(asked, server.server_port, "/livez")
            assert (status, health["transfer"], health["live"]) == (503, "broken", False)
            assert "ZeroDivisionError" in str(health["reason"])
        finally:
            await anyio.to_thread.run_sync(server.shutdown)
            server.server_close()
        await leave_broken(deployment, deployment.decode[0])


def test_process_without_an_open_rank_is_live_and_not_ready() -> None:
    assert RankCollector().health().reason == "there is no rank"
    rank = kvflow.DecodeRank(decode_config(None), make_pool().layout)
    health = RankCollector(rank).health()
    assert (health.live, health.ready) == (True, False)
    assert "rank is not open" in health.reason


def test_rank_whose_event_loop_is_stuck_is_not_live() -> None:
    class Stuck:
        def metrics(self) -> tuple[Metric, ...]:
            raise TimeoutError

        def health(self) -> Health:
            raise TimeoutError

    health = RankCollector(Stuck()).health()
    assert (health.transfer, health.live) == ("broken", False)
    assert "has not answered" in health.reason
