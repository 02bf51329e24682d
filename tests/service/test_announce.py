"""Announcements of rooms before decode has pages for them: prefill waits as long as the decode engine lives."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

import kvflow
from benchmarks.processes import ChildProcess
from kvflow import blocking
from kvflow.blocking import Memory, Outcome
from kvflow.bounds import Bounds
from kvflow.cli.tasks import open_tasks
from kvflow.config import Timeouts
from kvflow.errors import (
    ConfigError,
    FailureReason,
    LocalProtocolError,
    PagesInUse,
    PlanError,
    RankDraining,
    TransferFailed,
)
from tests.observe.lines import printed
from tests.support.decode_process import DecodeOptions
from tests.support.failures import catch
from tests.support.instances import BACKENDS, Deployment, decode_config, deploy, make_pool, prefill_config
from tests.support.pools import Pool
from tests.support.prefill_process import PAGES, TOKENS
from tests.support.registries import registry_in_thread
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SHORT = Timeouts(handshake_s=15.0, transfer_s=30.0, grant_s=0.2, drain_s=0.5, lease_s=2.0)
PAST_S = 0.5
"""Longer than `grant_s` of `SHORT`."""


def announce(ranks: Deployment, room: int = 1, rank: int = 0, **changes: Any) -> kvflow.RoomReceiver:
    return ranks.decode[rank].announce(room, prefill="prefill", **changes)


async def announced(ranks: Deployment, count: int = 1) -> None:
    """Wait until every prefill rank has `count` announced rooms."""
    await until(lambda: {rank.statistics().announced for rank in ranks.prefill} == {count})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 3)])
async def test_pages_may_come_later_than_prefill_would_wait(backend: str, prefill_tp: int, decode_tp: int) -> None:
    async with deploy(backend, prefill_tp=prefill_tp, decode_tp=decode_tp, timeouts=SHORT) as ranks:
        request = ranks.request(1, 40)

        async def receive(rank: int) -> None:
            async with announce(ranks, rank=rank) as receiver:
                assert (receiver.memory, receiver.is_announced) == (Memory.SAFE, True)
                await announced(ranks, decode_tp)
                for number in range(prefill_tp if rank == 0 else 0):
                    tasks.start_soon(request.send, number)
                await anyio.sleep(PAST_S)
                receiver.grant(tokens=(0, 40), pages=request.dst_pages(rank, (0, 40)))
                assert (receiver.memory, receiver.is_announced) == (Memory.HELD, False)
                await receiver.done()

        async with anyio.create_task_group() as tasks:
            for rank in range(decode_tp):
                tasks.start_soon(receive, rank)
        request.assert_arrived()
        assert {statistics.announced for statistics in ranks.statistics()} == {0}


async def test_without_it_prefill_waits_for_its_own_time() -> None:
    async with deploy(timeouts=SHORT) as ranks:
        assert (await catch(ranks.request(1, 8).send)).reason is FailureReason.NOT_GRANTED


@pytest.mark.parametrize("is_open", [True, False])
async def test_prefill_learns_at_once_that_it_is_given_up(is_open: bool) -> None:
    async with deploy() as ranks:
        request = ranks.request(1, 8)
        async with announce(ranks) as receiver, anyio.create_task_group() as tasks:
            await announced(ranks)
            if is_open:
                tasks.start_soon(catch, request.send)
                await until(lambda: 0 in request.senders and request.senders[0].memory is Memory.HELD)
            receiver.abort()
            assert (receiver.outcome, receiver.memory) == (Outcome.ABORTED, Memory.SAFE)
            await announced(ranks, 0)
        if not is_open:
            assert (await catch(request.send)).reason is FailureReason.ABORTED
        assert request.senders[0].failure is not None
        assert request.senders[0].failure.reason is FailureReason.ABORTED


@pytest.mark.parametrize("is_open", [True, False])
async def test_decode_learns_at_once_that_prefill_gives_it_up(is_open: bool) -> None:
    async with deploy() as ranks, announce(ranks) as receiver:
        await announced(ranks)
        if is_open:
            async with ranks.prefill[0].send(1) as sender:
                sender.abort()
        else:
            ranks.prefill[0].start_drain()
        assert (await catch(receiver.done)).reason is (FailureReason.ABORTED if is_open else FailureReason.PEER_CLOSED)
        assert receiver.memory is Memory.SAFE
        with pytest.raises(TransferFailed):
            receiver.grant(tokens=TOKENS, pages=PAGES)


async def test_it_ends_when_no_pages_come() -> None:
    async with deploy() as ranks, announce(ranks, timeout_s=PAST_S) as receiver:
        request = ranks.request(1, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            failed = await catch(receiver.done)
        assert (failed.reason, failed.detected_by, receiver.memory) == (
            FailureReason.NOT_GRANTED,
            "decode/0",
            Memory.SAFE,
        )
        assert request.senders[0].failure == receiver.failure


async def test_a_rank_that_drains_waits_for_it_and_takes_no_other() -> None:
    async with deploy() as ranks:
        request = ranks.request(1, 8)
        async with announce(ranks) as receiver, anyio.create_task_group() as tasks:
            await announced(ranks)
            ranks.decode[0].start_drain()
            assert not ranks.decode[0].is_drained
            with pytest.raises(RankDraining):
                announce(ranks, 2)._open_room()
            tasks.start_soon(request.send)
            receiver.grant(tokens=(0, 8), pages=request.dst_pages(0, (0, 8)))
            await receiver.done()
        assert ranks.decode[0].is_drained


async def test_a_rank_that_is_closed_gives_it_up() -> None:
    async with deploy() as ranks:
        receiver = announce(ranks)
        receiver._open_room()
        await announced(ranks)
        await ranks.close(ranks.decode[0])
        assert (receiver.outcome, receiver.memory) == (Outcome.ABORTED, Memory.SAFE)
        await announced(ranks, 0)


async def test_a_rank_that_has_no_room_for_it_says_so() -> None:
    async with deploy(limits=Bounds(pending_grants=1)) as ranks, announce(ranks, 1):
        await announced(ranks)
        async with announce(ranks, 2) as second:
            assert (await catch(second.done)).reason is FailureReason.CAPACITY


async def test_misuse_is_told_and_costs_nothing() -> None:
    async with deploy() as ranks:
        for settings in ({"num_ranks": 0}, {"timeout_s": 0}, {"timeout_s": "1"}, {"priority": 8}):
            with pytest.raises(ConfigError):
                announce(ranks, **settings)
        for room in (None, -1, "", 1.0):
            with pytest.raises(LocalProtocolError):
                announce(ranks, room)  # type: ignore[arg-type]
        receiver, request = announce(ranks), ranks.request(1, 8)
        pages = request.dst_pages(0, (0, 8))
        with pytest.raises(LocalProtocolError, match="enter the transfer"):
            receiver.grant(tokens=(0, 8), pages=pages)
        async with receiver, anyio.create_task_group() as tasks:
            with pytest.raises(LocalProtocolError, match="being received"):
                announce(ranks)._open_room()
            with pytest.raises(PlanError):
                receiver.grant(tokens=(0, 8), pages={"kv": [1]})
            with pytest.raises(ConfigError):
                receiver.grant(tokens=(0, 8), pages=pages, timeout_s=-1)
            with pytest.raises(ConfigError):
                receiver.grant(tokens=(0, 8), pages=pages, digest="yes")  # type: ignore[arg-type]
            async with ranks.decode[0].receive(2, prefill="prefill", tokens=(0, 8), pages=pages) as other:
                with pytest.raises(PagesInUse):
                    receiver.grant(tokens=(0, 8), pages=pages)
                assert (receiver.memory, receiver.is_announced) == (Memory.SAFE, True)
                with pytest.raises(LocalProtocolError, match="already has pages"):
                    other.grant(tokens=(0, 8), pages=request.dst_pages(0, (0, 8)))
                other.abort()
            tasks.start_soon(request.send)
            receiver.grant(tokens=(0, 8), pages=pages)
            with pytest.raises(LocalProtocolError, match="already has pages"):
                receiver.grant(tokens=(0, 8), pages=pages)
            await receiver.done()
        with pytest.raises(LocalProtocolError, match="already has pages"):
            receiver.grant(tokens=(0, 8), pages=pages)
        request.assert_arrived()


# For a synchronous scheduler ---------------------------------------------------------------------------------------


@contextmanager
def blocking_ranks(**changes: Any) -> Iterator[tuple[blocking.PrefillRank, blocking.DecodeRank, Pool]]:
    source, target = make_pool(), make_pool()
    with (
        registry_in_thread() as endpoint,
        blocking.PrefillRank(prefill_config(endpoint, **changes), source.layout) as prefill,
        blocking.DecodeRank(decode_config(endpoint, **changes), target.layout) as decode,
    ):
        yield prefill, decode, target


def test_a_scheduler_announces_and_grants_without_waiting() -> None:
    with blocking_ranks(timeouts=SHORT) as (prefill, decode, _):
        receiver = decode.announce(1, prefill="prefill")
        assert (receiver.outcome, receiver.memory, receiver.is_announced) == (Outcome.PENDING, Memory.SAFE, True)
        sender = prefill.send(1)
        sender.finish(TOKENS, PAGES, metadata=b"token")
        while not prefill.statistics().announced:
            time.sleep(1e-3)
        time.sleep(PAST_S)
        assert (decode.completed(), sender.outcome) == ([], Outcome.PENDING)
        receiver.grant(tokens=TOKENS, pages=PAGES)
        assert (receiver.memory, receiver.is_announced) in {(Memory.HELD, False), (Memory.SAFE, False)}
        assert (receiver.wait(), receiver.result().metadata) == (Outcome.SUCCESS, b"token")
        assert decode.completed()[-1].memory is Memory.SAFE


def test_pages_are_held_from_the_call_on() -> None:
    """The pages are held even before the event loop handles the call."""
    with blocking_ranks() as (_, decode, _):
        receiver = decode.announce(1, prefill="prefill")
        with _loop_is_busy(decode):
            receiver.grant(tokens=TOKENS, pages=PAGES)
            assert receiver.memory is Memory.HELD
        receiver.abort()
        assert (receiver.wait(), receiver.memory) == (Outcome.ABORTED, Memory.SAFE)


@contextmanager
def _loop_is_busy(decode: blocking.DecodeRank) -> Iterator[None]:
    """Block the event loop within the block."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        over.wait(10)

    decode._call_soon(hold)
    begun.wait(10)
    try:
        yield
    finally:
        over.set()


def test_a_grant_that_the_rank_refuses_fails_the_transfer() -> None:
    with blocking_ranks() as (prefill, decode, _):
        first = decode.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES)
        second = decode.announce(2, prefill="prefill")
        second.grant(tokens=TOKENS, pages=PAGES)
        assert (second.wait(), second.memory) == (Outcome.FAILED, Memory.SAFE)
        assert second.failure is not None
        assert second.failure.reason is FailureReason.PAGES_IN_USE
        sender = prefill.send(2)
        assert sender.wait() is Outcome.FAILED, "prefill knows"
        prefill.send(1).finish(TOKENS, PAGES)
        assert first.wait() is Outcome.SUCCESS


def test_misuse_by_a_scheduler_is_told_at_once() -> None:
    with blocking_ranks() as (prefill, decode, _):
        with pytest.raises(ConfigError):
            decode.announce(1, prefill="prefill", priority=8)
        with pytest.raises(LocalProtocolError):
            decode.announce(prefill="prefill")
        receiver = decode.announce(1, prefill="prefill")
        with pytest.raises(PlanError):
            receiver.grant(tokens=TOKENS, pages={"kv": [1]})
        with pytest.raises(LocalProtocolError, match="transfer has not ended"):
            receiver.result()
        receiver.grant(tokens=TOKENS, pages=PAGES)
        with pytest.raises(LocalProtocolError, match="already has pages"):
            receiver.grant(tokens=TOKENS, pages=PAGES)
        receiver.abort()
        receiver.wait()
        with pytest.raises(TransferFailed):
            receiver.grant(tokens=TOKENS, pages=PAGES)
        again = decode.announce(1, prefill="prefill")
        sender = prefill.send(1)
        again.grant(tokens=TOKENS, pages=PAGES)
        sender.finish(TOKENS, PAGES)
        assert again.wait() is Outcome.SUCCESS
        late = decode.announce(3, prefill="prefill")
    assert late.outcome is Outcome.ABORTED
    with pytest.raises((LocalProtocolError, TransferFailed)):
        late.grant(tokens=TOKENS, pages=PAGES)
    with pytest.raises(LocalProtocolError, match="not open"):
        decode.announce(4, prefill="prefill")


# Two processes -----------------------------------------------------------------------------------------------------


async def test_another_process_may_take_longer_than_prefill_would_wait_and_not_if_it_is_killed() -> None:
    source = make_pool()
    with printed() as lines:
        async with (
            kvflow.Registry() as registry,
            kvflow.PrefillRank(
                prefill_config(registry.endpoint, backend="nixl", timeouts=SHORT), source.layout
            ) as prefill,
            open_tasks() as tasks,
            ChildProcess("decode", "tests.support.decode_process", DecodeOptions(registry.endpoint), tasks) as decode,
        ):
            await decode.expect("ready")
            for room in (1, 2):
                await decode.tell("announce", room=room)
                await until(lambda: prefill.statistics().announced == 1)
                sender = prefill.send(room)
                if room == 1:
                    async with sender:
                        await sender.finish(TOKENS, PAGES)
                        await anyio.sleep(PAST_S)
                        await decode.tell("grant")
                        await sender.delivered()
                    await decode.expect("received", room)
                else:
                    sender._open_room()
                    await sender.finish(TOKENS, PAGES)
                    decode.send_signal(signal.SIGKILL)
                    assert (await catch(sender.delivered)).reason is FailureReason.PEER_LOST
                    assert sender.memory is Memory.SAFE
    lost = lines.named("message_lost")
    assert lost
    for line in lost:
        assert str(line["peer"]).startswith("decode/0@")
        assert "stage" not in line
