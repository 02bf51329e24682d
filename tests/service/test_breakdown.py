"""Where the time of a transfer went: real ranks whose clocks are an hour apart, and what each part is blamed for."""

import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
import pytest

import kvflow
from kvflow.observe.totals import SLOWEST
from kvflow.observe.trace import MAX_LINES
from kvflow.ports import Ports
from kvflow.system import system_ports
from tests.observe.lines import printed
from tests.support.instances import BACKENDS, Deployment, Request, deploy
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

HOUR: Final = 3_600.0

LONG_S: Final = 0.9
"""A delay that is made by moving both clocks, longer than a busy machine takes for the rest, less than a lease."""


@dataclass
class Clocks:
    """The clocks of two hosts: both may be moved on, and that of prefill is an hour ahead."""

    moved_s: float = 0.0
    ports: Ports = field(default_factory=system_ports)

    def decode(self) -> float:
        return time.monotonic() + self.moved_s

    def prefill(self) -> float:
        return self.decode() + HOUR


@asynccontextmanager
async def deploy_apart(
    backend: str, *, prefill_tp: int = 1, **options: object
) -> AsyncIterator[tuple[Deployment, Clocks]]:
    clocks = Clocks()
    own = dataclasses.replace
    async with deploy(
        backend,
        prefill_tp=prefill_tp,
        ports=(own(clocks.ports, now=clocks.prefill), own(clocks.ports, now=clocks.decode)),
        **options,  # type: ignore[arg-type] # as in `deploy`
    ) as deployment:
        yield deployment, clocks


def check(handover: kvflow.Handover, at_most_s: float) -> kvflow.Breakdown:
    """Check that the parts are as long as the whole, which is known from other clocks' readings."""
    found = handover.breakdown
    assert found is not None
    assert sum(found.parts.values()) == found.total_s
    assert found.total_s - found.engine_noticed_s == pytest.approx(handover.elapsed_s, rel=0.01)
    assert handover.elapsed_s <= found.total_s <= at_most_s
    assert min(found.parts.values()) >= 0
    assert found.clock_error_s <= found.total_s
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [None, 4], ids=["one chunk", "page chunks"])
async def test_parts_add_up_with_clocks_an_hour_apart(backend: str, chunk: int | None) -> None:
    async with deploy_apart(backend, prefill_tp=2) as (deployment, clocks):
        for room in (1, 2):
            began = clocks.decode()
            (handover,) = await deployment.request(room, 29).hand_over(chunk=chunk)
            found = check(handover, clocks.decode() - began)
            assert found.engine_rank in (0, 1)
            assert found.engine_noticed_s > 0


async def test_last_chunk_without_tokens_has_parts_too() -> None:
    async with deploy_apart("memory") as (deployment, clocks):
        request, began = deployment.request(1, 8), clocks.decode()

        async def send() -> None:
            async with deployment.prefill[0].send(1) as sender:
                request.compute(0, 8)
                await sender.chunk((0, 8), request.src_pages(0, (0, 8)))
                await sender.finish((8, 8), {"kv": []}, metadata=b"first token")
                await sender.delivered()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            handover = await request.receive()
        check(handover, clocks.decode() - began)


async def test_packed_pieces_and_digests_have_parts_too() -> None:
    packed = {"packing": "always"}
    async with deploy_apart("memory", sending=packed, digest_every=1) as (deployment, clocks):
        began = clocks.decode()
        (handover,) = await deployment.request(1, 29).hand_over(chunk=8)
        assert sum(statistics.staging.packed_posts for statistics in deployment.statistics())
        check(handover, clocks.decode() - began)


async def hand_over_late(deployment: Deployment, clocks: Clocks, late: str, room: int) -> kvflow.Breakdown:
    """Hand over a room on open connections, and move the clocks on at one moment."""
    request, (prefill,) = deployment.request(room, 8), deployment.prefill
    handovers = []

    async def receive() -> None:
        async with request.receiver() as receiver:
            await receiver.done() if late != "engine noticed" else await until(lambda: receiver.handover is not None)
            if late == "engine noticed":
                clocks.moved_s += LONG_S
            handovers.append(await receiver.done())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await until(lambda: prefill.statistics().waiting_grants == 1)
        if late == "opened":
            clocks.moved_s += LONG_S
        async with prefill.send(room) as sender:
            if late == "computed":
                clocks.moved_s += LONG_S
            request.compute(0, 8)
            await sender.finish((0, 8), request.src_pages(0, (0, 8)), metadata=b"first token")
            await sender.delivered()
    found = handovers[0].breakdown
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("late", "part"),
    [("opened", "wait_for_data"), ("computed", "wait_for_data"), ("engine noticed", "engine_noticed")],
)
async def test_part_that_took_long_is_named(late: str, part: str) -> None:
    async with deploy_apart("memory") as (deployment, clocks):
        await hand_over_late(deployment, clocks, "never", 1)
        found = await hand_over_late(deployment, clocks, late, 2)
        assert found.slowest == part
        assert found.parts[part] >= LONG_S


async def test_wait_of_a_prefill_rank_that_is_not_there_is_one_for_the_grant() -> None:
    async with deploy_apart("memory") as (deployment, clocks):
        request = deployment.request(1, 8)
        async with anyio.create_task_group() as tasks, request.receiver() as receiver:
            clocks.moved_s += LONG_S  # before the handshake
            tasks.start_soon(request.send)
            found = (await receiver.done()).breakdown
        assert found is not None
        assert found.slowest == "wait_for_grant"


async def test_what_was_not_sent_has_no_parts() -> None:
    async with deploy_apart("memory") as (deployment, _):
        request = Request(deployment, 1, 8, [[0, 1]], [[0, 1]])
        (handover,) = await request.hand_over(start=8)
        assert handover.num_bytes == 0
        assert handover.breakdown is None or handover.breakdown.total_s >= 0


async def test_slow_receives_name_their_slowest_part() -> None:
    async with deploy_apart("memory") as (deployment, clocks):
        for number in range(SLOWEST + 1):
            request = deployment.request(number, 8)
            await request.hand_over()
            deployment.give_back(request)
        decode = deployment.decode[0]
        assert decode.statistics().transfers.handover_s.count == SLOWEST + 1
        with printed(level=logging.DEBUG) as printed_lines:
            found = await hand_over_late(deployment, clocks, "computed", 999)
        parts = decode.statistics().transfers.parts_s
        assert all(times.count == SLOWEST + 2 for times in parts.values())
        assert parts["wait_for_data"].maximum == found.wait_for_data_s
    (slow,) = [line for line in printed_lines.named("receive_slow") if line["room"] == 999]
    (finished,) = printed_lines.named("receive_finished")
    assert slow["slowest"] == "wait_for_data"
    assert slow["slowest_ms"] >= LONG_S * 1e3
    assert slow["slowest_ms"] == finished["wait_for_data_ms"]
    assert {"wire_ms", "clock_error_ms"} <= finished.keys()


async def test_more_slow_receives_than_are_logged_are_no_anomaly() -> None:
    """On a busy machine, all that are under way at once may take longer than any before."""
    async with deploy_apart("memory") as (deployment, _):
        decode = deployment.decode[0]
        decode._totals.slow_s = -1.0
        with printed(level=logging.INFO) as printed_lines:
            for number in range(MAX_LINES + 4):
                request = deployment.request(number, 8)
                await request.hand_over()
                deployment.give_back(request)
    assert printed_lines.named("receive_slow")
    assert "log_lines_omitted" not in decode.statistics().anomalies
