"""Quarantined pages as engines and operators see them; peers that fail repeatedly, or have died."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import numpy as np
import pytest

import kvflow
from benchmarks.processes import ChildProcess
from kvflow.config import Limits, Proofs, Timeouts
from kvflow.errors import (
    CapacityExceeded,
    ConfigError,
    FailureReason,
    LocalProtocolError,
    PagesInUse,
    Stage,
    TransferFailed,
)
from kvflow.state.decode.core import DecodeCore
from kvflow.state.events import MessageArrived, ProbeFinished
from kvflow.state.prefill import peers
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.quarantine import ProofKind
from kvflow.state.tables import Memory
from kvflow.wire.messages import Cancel
from tests.observe.lines import Lines, printed
from tests.support.device import memory_at
from tests.support.failures import catch, undisturbed
from tests.support.instances import Deployment, Request, decode_config, deploy, make_pool, prefill_config
from tests.support.ports import unused_port
from tests.support.prefill_client import hand_over, prefill_process
from tests.support.prefill_process import FILL, PAGES, TOKENS
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

QUICK_DRAIN = Timeouts(drain_s=0.1, lease_s=2.0)


def watch_core(
    monkeypatch: pytest.MonkeyPatch, core: type[PrefillCore | DecodeCore], is_meant: Callable[[object], bool]
) -> list[object]:
    """Return a list that collects the matching events from now on."""
    seen: list[object] = []
    handle: Callable[..., Any] = core._handle

    def watched(self: PrefillCore | DecodeCore, event: object, now: float) -> object:
        if is_meant(event):
            seen.append(event)
        return handle(self, event, now)

    monkeypatch.setattr(core, "_handle", watched)  # the dispatcher has looked `handle` up already
    return seen


def is_cancel(event: object) -> bool:
    return isinstance(event, MessageArrived) and isinstance(event.message, Cancel)


def is_answered_probe(event: object) -> bool:
    return isinstance(event, ProbeFinished) and not event.is_gone


async def doubt(deployment: Deployment, room: int, num_tokens: int = 8) -> Request:
    """Run a transfer whose write ends in doubt."""
    request = deployment.request(room, num_tokens)
    deployment.faults[0].plan.append("doubt")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, request.send)
        tasks.start_soon(catch, request.receive)
    return request


async def test_a_full_quarantine_admits_nothing_until_an_operator_releases_it() -> None:
    """Each transfer holds two pages of four tokens on each side."""
    async with deploy(timeouts=QUICK_DRAIN, limits=Limits(quarantined_bytes=4 * 4 * 192)) as deployment:
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        for room in (1, 2):
            await doubt(deployment, room)
        assert sorted(transfer.room for transfer in prefill.quarantined()) == [1, 2]
        assert sorted(transfer.room for transfer in decode.quarantined()) == [1, 2]
        other = deployment.request(3, 8)
        with pytest.raises(CapacityExceeded, match="quarantine") as on_prefill:
            await other.send()
        with pytest.raises(CapacityExceeded, match="quarantine") as on_decode:
            await other.receive()
        for refused in (on_prefill, on_decode):
            values = refused.value.values
            assert (values["pages"], values["setting"]) == (4, "limits.quarantined_bytes")
        for rank in (prefill, decode):
            (first, _) = rank.quarantined()
            rank.release(first)
            assert len(rank.quarantined()) == 1
        another = deployment.request(4, 8)
        await another.hand_over()
        another.assert_arrived()


async def test_a_record_says_what_an_operator_has_to_know() -> None:
    with printed() as lines:
        async with deploy(timeouts=QUICK_DRAIN) as deployment:
            await check_records(deployment, lines)
    closed = {line["instance"]: (line["level"], line["quarantined"]) for line in lines.named("rank_closed")}
    assert closed == {"prefill": ("info", 0), "decode": ("warning", 1)}


async def check_records(deployment: Deployment, lines: Lines) -> None:
    """Check the records of one transfer in doubt on both sides."""
    request = await doubt(deployment, 1)
    prefill, decode = deployment.prefill[0], deployment.decode[0]
    await anyio.sleep(0.01)
    for rank, pages in ((prefill, request.src_tables[0]), (decode, request.dst_tables[0])):
        (record,) = rank.quarantined()
        assert (record.room, record.num_bytes) == (1, 2 * 4 * 192)
        assert record.pages["kv"].dtype == np.int32
        assert sorted(record.pages["kv"].tolist()) == sorted(pages)
        assert 0.01 <= record.since_s < 60.0
        assert record.failure is not None
        assert record.failure.reason is FailureReason.WRITE_FAILED
        (proof,) = record.missing
        assert str(record).startswith("room 1: pages 2 of kv (1536 bytes) for 0.")
        assert str(record).endswith(proof.detail)
    assert [proof.awaited for proof in prefill.quarantined()[0].missing] == [ProofKind.WRITE_END]
    (proof,) = decode.quarantined()[0].missing
    assert (proof.peer, proof.endpoint, proof.awaited) == (str(prefill.me), prefill.endpoint, ProofKind.DRAINED)
    assert {line["room"] for line in lines.named("pages_quarantined")} == {1}
    assert [proof.detail] in [line["missing"] for line in lines.named("pages_quarantined")]


async def test_pages_in_quarantine_are_refused_and_can_be_waited_for() -> None:
    async with deploy(timeouts=QUICK_DRAIN) as deployment:
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        request = deployment.request(1, 8)
        pages = request.dst_pages(0, (0, 8))
        deployment.faults[0].plan.append("doubt")
        receiver = request.receiver()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            with pytest.raises(TransferFailed):
                async with receiver:
                    await receiver.done()
        assert receiver.memory is Memory.QUARANTINED
        early = decode.receive(2, prefill="prefill", tokens=(0, 8), pages=pages)
        with pytest.raises(PagesInUse) as refused:
            async with early:
                pass
        values = {"component": "kv", "page": request.dst_tables[0][0], "held_by": 1, "memory": "quarantined"}
        assert refused.value.values == values
        with pytest.raises(LocalProtocolError, match="was refused"):
            await early.until_safe()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deployment.close, prefill)
            assert await receiver.until_safe() is Memory.SAFE
        async with decode.receive(4, prefill="prefill", tokens=(0, 8), pages=pages) as again:
            again.abort()


async def test_whoever_waits_for_pages_learns_that_the_rank_was_left() -> None:
    async with deploy(timeouts=QUICK_DRAIN) as deployment:
        decode, request = deployment.decode[0], deployment.request(1, 8)
        deployment.faults[0].plan.append("doubt")
        receiver = request.receiver()
        with pytest.raises(LocalProtocolError, match="enter the transfer"):
            await receiver.until_safe()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            with pytest.raises(TransferFailed):
                async with receiver:
                    await receiver.done()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deployment.close, decode)
            assert await receiver.until_safe() is Memory.QUARANTINED


def test_time_is_no_proof_over_a_transport_without_queue_pairs() -> None:
    proofs = Proofs(queue_pairs_die_with_process_s=60.0)
    with pytest.raises(ConfigError, match="requires a transport with queue pairs"):
        kvflow.DecodeRank(decode_config("tcp://127.0.0.1:1", proofs=proofs), make_pool().layout)


async def test_a_release_is_for_what_is_in_quarantine_and_happens_once() -> None:
    async with deploy(timeouts=QUICK_DRAIN) as deployment:
        decode = deployment.decode[0]
        await doubt(deployment, 1)
        (record,) = decode.quarantined()
        decode.release(record)
        for again in (record, record.room):
            with pytest.raises(LocalProtocolError, match="not in quarantine"):
                decode.release(again)
        async with deployment.request(2, 8).receiver():
            with pytest.raises(LocalProtocolError, match="not in quarantine"):
                decode.release(2)
        with pytest.raises(LocalProtocolError, match="room must be"):
            decode.release(None)  # type: ignore[arg-type]
        await until(lambda: decode.statistics().quarantined == 0)  # the proof may take longer than the drain time


async def test_releasing_source_pages_proves_nothing_to_the_decode_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deploy(timeouts=Timeouts(drain_s=0.1, lease_s=0.6)) as deployment:
        request = deployment.request(1, 4)
        faults, prefill, decode = deployment.faults[0], deployment.prefill[0], deployment.decode[0]
        faults.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            async with request.receiver() as receiver:
                await until(lambda: faults.posted)
        prefill.release(prefill.quarantined()[0])
        cancels = watch_core(monkeypatch, PrefillCore, is_cancel)
        await until(lambda: len(cancels) >= 2)  # the decode rank retransmits, which an answer would prevent
        assert [record.room for record in decode.quarantined()] == [receiver.room]
        faults.release()
        await until(lambda: receiver.memory is Memory.SAFE)
        assert request.num_written() == 4 * 192
        await undisturbed(deployment)


async def test_the_end_of_a_write_in_doubt_frees_both_sides() -> None:
    """Closing the prefill rank fences its transport, which ends the write for certain."""
    async with deploy(timeouts=QUICK_DRAIN) as deployment:
        await doubt(deployment, 1)
        await deployment.close(deployment.prefill[0])
        assert deployment.prefill[0].quarantined() == []
        await until(lambda: not deployment.decode[0].quarantined())


async def test_what_is_in_quarantine_when_its_rank_is_closed_can_still_be_released() -> None:
    async with deploy(timeouts=QUICK_DRAIN) as deployment:
        decode = deployment.decode[0]
        await doubt(deployment, 1)
        await deployment.close(decode)
        (record,) = decode.quarantined()
        decode.release(record)
        assert decode.quarantined() == []
        with pytest.raises(LocalProtocolError, match="not in quarantine"):
            decode.release(record)


# Peers that fail ---------------------------------------------------------------------------------------------------


async def try_once(decode: kvflow.DecodeRank) -> FailureReason | None:
    """Receive a room; return the reason if it failed."""
    try:
        async with decode.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}) as receiver:
            await receiver.done()
    except TransferFailed as failed:
        return failed.reason
    return None


async def test_an_instance_that_never_answers_is_avoided_and_heals() -> None:
    source, target = make_pool(), make_pool()
    timeouts = Timeouts(handshake_s=0.6, lease_s=2.0)
    async with (
        kvflow.Registry() as registry,
        kvflow.DecodeRank(decode_config(registry.endpoint, timeouts=timeouts), target.layout) as decode,
    ):
        reasons = [await try_once(decode) for _ in range(5)]
        assert reasons == [FailureReason.UNREACHABLE] + [FailureReason.PEER_FAILING] * 4
        async with kvflow.PrefillRank(prefill_config(registry.endpoint), source.layout) as prefill:

            async def send() -> None:
                """Retry until a receive accepts the room: the decode rank declines rooms that it does not try."""
                with suppress(TransferFailed):
                    async with prefill.send(1) as sender:
                        await sender.finish((0, 4), {"kv": [1]})
                    return
                await send()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                reason: FailureReason | None = FailureReason.PEER_FAILING
                while reason is FailureReason.PEER_FAILING:
                    await anyio.sleep(0.05)
                    reason = await try_once(decode)
                assert reason is None, "the handshake, which goes on, succeeds"


async def test_a_decode_rank_to_which_writes_fail_connects_again_and_the_next_transfer_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "SAME_CAUSE_S", 0.0)  # each failure counts, however soon it follows another
    async with deploy(timeouts=Timeouts(lease_s=2.0, drain_s=0.5)) as deployment:
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        for room in (1, 2, 3):
            request = deployment.request(room, 4)
            deployment.faults[0].plan.append("fail")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(catch, request.send)
                tasks.start_soon(catch, request.receive)
        await until(lambda: num_hellos(prefill) == 2)  # it reconnects by itself
        await undisturbed(deployment)
        assert (prefill.statistics().peers, decode.statistics().peers) == (1, 1)
        assert num_hellos(prefill) == 2


def num_hellos(prefill: kvflow.PrefillRank) -> int:
    """Return the number of handshakes of a prefill rank."""
    return prefill.statistics().times.stages[Stage.BOOTSTRAP].count


# Processes that are gone -------------------------------------------------------------------------------------------


@asynccontextmanager
async def decode_rank(registry: str) -> AsyncIterator[kvflow.DecodeRank]:
    pool = make_pool()
    settings = decode_config(registry, backend="nixl", timeouts=Timeouts(lease_s=1.0, drain_s=0.3))
    async with kvflow.DecodeRank(settings, pool.layout) as decode:
        yield decode


def has_bytes(decode: kvflow.DecodeRank) -> bool:
    """Return whether bytes from the prefill process are in the pages."""
    region = decode.layout.components[0].regions[0]
    return FILL in memory_at(region.address, region.span)


async def stop_in_the_middle(
    decode: kvflow.DecodeRank, prefill: ChildProcess, how: signal.Signals
) -> kvflow.RoomReceiver:
    """Stop a prefill process when a part of room 1 has arrived; return the receiver once it has failed."""
    receiver = decode.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES)

    async def receive() -> None:
        async with receiver:
            await receiver.done()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, receive)
        await prefill.tell("send", room=1)
        await prefill.expect("half", 1)
        await until(lambda: has_bytes(decode))
        prefill.send_signal(how)
    return receiver


@pytest.mark.parametrize(
    "is_port_fixed",
    [pytest.param(False, id="another port"), pytest.param(True, id="same port", marks=pytest.mark.slow)],
)
async def test_death_of_a_prefill_process_ends_the_quarantine_without_a_new_room(is_port_fixed: bool) -> None:
    port = unused_port() if is_port_fixed else 0
    async with kvflow.Registry() as registry, decode_rank(registry.endpoint) as decode:
        async with prefill_process(registry.endpoint, port) as first:
            receiver = await stop_in_the_middle(decode, first, signal.SIGKILL)
            assert receiver.failure is not None
            assert receiver.failure.reason is FailureReason.PEER_LOST
        async with prefill_process(registry.endpoint, port) as second:
            await until(lambda: receiver.memory is Memory.SAFE)
            assert decode.quarantined() == []
            await hand_over(decode, second, 2)


async def test_a_process_that_hangs_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host accepts connections to its port. The pages become safe only when the process is killed."""
    async with (
        kvflow.Registry() as registry,
        decode_rank(registry.endpoint) as decode,
        prefill_process(registry.endpoint, 0) as first,
    ):
        receiver = await stop_in_the_middle(decode, first, signal.SIGSTOP)
        hung = receiver.memory
        probes = watch_core(monkeypatch, DecodeCore, is_answered_probe)
        await until(lambda: len(probes) >= 2)
        assert (hung, receiver.memory) == (Memory.QUARANTINED, Memory.QUARANTINED)
        first.send_signal(signal.SIGKILL)
        await until(lambda: receiver.memory is Memory.SAFE)
