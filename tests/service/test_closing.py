"""Opening and closing of ranks in every order, by any task, with or without open transfers."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext

import anyio
import pytest
from typing_extensions import override

import kvflow
from kvflow.backends.base import Backend, OnBroken, OnEvents, PostEnded
from kvflow.backends.memory import MemoryBackend
from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from kvflow.control.channel import ZmqControl
from kvflow.errors import BackendError, ConfigError, FailureReason, LocalProtocolError, RankBroken, TransferFailed
from kvflow.geometry.plan import Descriptors
from kvflow.state.quarantine import ProofKind
from kvflow.state.tables import Memory, Outcome
from tests.support.failures import catch, catch_into
from tests.support.faulty_memory import FaultScript, FaultyMemoryBackend
from tests.support.instances import (
    BACKENDS,
    QUICK,
    SOON_QUARANTINED,
    Deployment,
    Request,
    decode_config,
    deploy,
    make_pool,
    prefill_config,
)
from tests.support.ports import is_free, unused_port
from tests.support.slow import on_backends
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ORDERS = list(itertools.permutations(["prefill", "decode", "registry"]))


@pytest.mark.parametrize(("backend", "first", "second", "third"), on_backends(ORDERS[-2:], ORDERS))
async def test_every_order_in_one_task(backend: str, first: str, second: str, third: str) -> None:
    registry = kvflow.Registry()
    await registry.__aenter__()
    source, target = make_pool(), make_pool()  # kept: dropping a pool frees memory that is written to
    prefill = kvflow.PrefillRank(prefill_config(registry.endpoint, backend=backend), source.layout)
    decode = kvflow.DecodeRank(decode_config(registry.endpoint, backend=backend), target.layout)
    await prefill.__aenter__()
    await decode.__aenter__()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: _send(prefill))
        tasks.start_soon(lambda: _receive(decode))
    parts: dict[str, AbstractAsyncContextManager[object]] = {"prefill": prefill, "decode": decode, "registry": registry}
    for name in (first, second, third):
        await parts[name].__aexit__(None, None, None)


async def test_opened_by_one_task_and_closed_by_another() -> None:
    async with kvflow.Registry() as registry:
        stack = AsyncExitStack()
        rank = kvflow.PrefillRank(prefill_config(registry.endpoint), make_pool().layout)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stack.enter_async_context, rank)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stack.aclose)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_closing_ends_what_is_open_on_both_sides(backend: str, first: str) -> None:
    async with deploy(backend) as deployment:
        request = deployment.request(1, 12)
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch_into, failures, "prefill", lambda: _send_a_part(deployment, request))
            tasks.start_soon(catch_into, failures, "decode", request.receive)
            await until(lambda: request.num_written() == 4 * 192)
            await deployment.close(deployment.prefill[0] if first == "prefill" else deployment.decode[0])
        for failure in failures.values():
            assert (failure.reason, failure.detected_by) == (FailureReason.PEER_CLOSED, f"{first}/0")
            assert not failure.quarantined


async def test_closing_the_sender_fences_writes_that_hang() -> None:
    """Closing the transport ends a hanging write for certain, and both sides can continue."""
    async with deploy(timeouts=Timeouts(drain_s=0.2, lease_s=5.0)) as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].hold()
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch_into, failures, "prefill", request.send)
            tasks.start_soon(catch_into, failures, "decode", request.receive)
            await until(lambda: deployment.faults[0].posted)
            await deployment.close(deployment.prefill[0])
        assert request.num_written() == 0
        assert deployment.prefill[0].quarantined() == []
        await until(lambda: not deployment.decode[0].quarantined())


async def test_cancelled_engine_closes_everything() -> None:
    """Cancelling the task that owns the ranks, with open transfers, leaves nothing behind."""
    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            async with deploy() as deployment:
                request = deployment.request(1, 8)
                async with deployment.prefill[0].send(1), request.receiver():
                    started.set()
                    await anyio.sleep_forever()

        started = anyio.Event()
        tasks.start_soon(serve)
        await started.wait()
        tasks.cancel_scope.cancel()


class LingeringBackend(MemoryBackend):
    """A transport whose writes fail, and may still land afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.on_events: OnEvents | None = None
        self.num_ended = 0

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        await super().open(agent_name, on_events, on_broken)
        self.on_events = on_events

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._fail, post_id)

    def _fail(self, post_id: int) -> None:
        assert self.on_events is not None
        self.on_events([PostEnded(post_id, "scripted failure", lingers=True)])
        self.num_ended += 1


@pytest.mark.parametrize("breaks", [False, True])
async def test_the_port_of_a_rank_that_has_left_is_refused_unless_bytes_may_still_land(breaks: bool) -> None:
    """A refused port proves that nothing can land: a rank with a lingering write keeps its port open."""
    is_refused = ZmqControl().is_refused
    async with (
        kvflow.Registry() as registry,
        kvflow.DecodeRank(decode_config(registry.endpoint), make_pool().layout) as decode,
    ):

        async def write_and_leave(room: int, backend: Backend, has_written: Callable[[], object]) -> str:
            instance, source = f"prefill-{room}", make_pool()
            rank = kvflow.PrefillRank(prefill_config(registry.endpoint, instance=instance), source.layout, backend)
            await rank.__aenter__()

            async def send() -> None:
                async with rank.send(room) as sender:
                    await sender.finish((0, 4), {"kv": [room]})

            async def receive() -> None:
                async with decode.receive(room, prefill=instance, tokens=(0, 4), pages={"kv": [room]}) as receiver:
                    await receiver.done()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(catch, send)
                tasks.start_soon(catch, receive)
                await until(has_written)
                if breaks:
                    await crash(rank)
                with pytest.RaisesGroup(ZeroDivisionError) if breaks else nullcontext():
                    await rank.__aexit__(None, None, None)
            return rank.endpoint

        lingering, faults = LingeringBackend(), FaultScript()
        faults.hold()
        kept = await write_and_leave(1, lingering, lambda: lingering.num_ended)
        given_up = await write_and_leave(2, FaultyMemoryBackend(faults=faults), lambda: faults.posted)
        while not await is_refused(given_up, 5.0):  # noqa: ASYNC110 - as in `until`
            await anyio.sleep(0.01)
        assert not await is_refused(kept, 5.0)  # which had longer
        await until(lambda: [transfer.room for transfer in decode.quarantined()] == [1])
        with pytest.raises(ConfigError, match="cannot be bound"):
            await kvflow.PrefillRank(prefill_config(registry.endpoint, bind=kept), make_pool().layout).__aenter__()


class BrokenBackend(MemoryBackend):
    """A transport that a test can break."""

    def __init__(self) -> None:
        super().__init__()
        self.on_broken: OnBroken | None = None

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        await super().open(agent_name, on_events, on_broken)
        self.on_broken = on_broken

    def break_down(self) -> None:
        assert self.on_broken is not None
        self.on_broken(BackendError("boom"))


async def test_rank_that_breaks_fails_its_transfers_and_says_why() -> None:
    async with kvflow.Registry() as registry:
        backend = BrokenBackend()
        rank = kvflow.DecodeRank(decode_config(registry.endpoint, timeouts=QUICK), make_pool().layout, backend)
        await rank.__aenter__()
        failures: list[TransferFailed] = []

        async def receive() -> None:
            failures.append(await catch(lambda: _receive(rank)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await until(lambda: rank.statistics().rooms)
            backend.break_down()
        assert failures[0].reason is FailureReason.BROKEN
        assert "BackendError: boom" in failures[0].detail
        assert failures[0].quarantined
        with pytest.raises(RankBroken) as refused:
            await _receive(rank)
        assert isinstance(refused.value.__cause__, BackendError)
        with pytest.RaisesGroup(pytest.RaisesExc(BackendError, match="boom")):
            await rank.__aexit__(None, None, None)


async def _send(rank: kvflow.PrefillRank) -> None:
    async with rank.send(1) as sender:
        await sender.finish((0, 4), {"kv": [1]})


async def _receive(rank: kvflow.DecodeRank) -> None:
    async with rank.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}) as receiver:
        await receiver.done()


async def _send_a_part(deployment: Deployment, request: Request) -> None:
    async with deployment.prefill[0].send(1) as sender:
        request.compute(0, 4)
        await sender.chunk((0, 4), request.src_pages(0, (0, 4)))
        await sender.delivered()


async def test_rank_that_breaks_lets_go_who_waits_for_room() -> None:
    async with deploy(limits=Bounds(posts_per_peer=1, queued_chunks=1)) as deployment:
        request = deployment.request(1, 40)
        deployment.faults[0].hold()
        prefill = deployment.prefill[0]
        failures: list[TransferFailed] = []

        async def send() -> None:
            failures.append(await catch(lambda: request.send(chunk=2)))

        async def receive() -> None:
            failures.append(await catch(request.receive))

        def crash() -> None:
            raise ZeroDivisionError("boom")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            tasks.start_soon(send)
            await until(lambda: prefill.statistics().queued_chunks)
            await anyio.wait_all_tasks_blocked()
            prefill._context.start_task(anyio.to_thread.run_sync, crash)
            await until(lambda: failures)
            with pytest.RaisesGroup(pytest.RaisesExc(ZeroDivisionError)):
                await prefill.__aexit__(None, None, None)
            deployment.closers[prefill].pop_all()
        assert [(failure.reason, failure.detected_by) for failure in failures] == [
            (FailureReason.BROKEN, "prefill/0")
        ] * 2


async def crash(rank: kvflow.PrefillRank | kvflow.DecodeRank) -> None:
    """Make a task of a rank fail."""

    async def fail() -> None:
        raise ZeroDivisionError("boom")

    rank._context.start_task(fail)
    await until(lambda: rank._error)


async def leave_broken(deployment: Deployment, rank: kvflow.PrefillRank | kvflow.DecodeRank) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ZeroDivisionError)):
        await rank.__aexit__(None, None, None)
    deployment.closers[rank].pop_all()


async def test_a_peer_of_a_rank_that_breaks_learns_at_once_why() -> None:
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        request = deployment.request(1, 8)
        failures: list[TransferFailed] = []

        async def receive() -> None:
            failures.append(await catch(request.receive))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await until(lambda: deployment.prefill[0].statistics().waiting_grants)
            await crash(deployment.prefill[0])
        assert (failures[0].reason, failures[0].detected_by) == (FailureReason.BROKEN, "prefill/0")
        assert "ZeroDivisionError: boom" in failures[0].detail
        await leave_broken(deployment, deployment.prefill[0])


async def test_a_sender_whose_pages_are_free_does_not_wait_for_a_broken_rank() -> None:
    """Everything is written, and only the Ack is missing, which a broken rank never receives."""
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].plan.append("lose_notice")
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch_into, failures, "prefill", request.send)
            tasks.start_soon(catch_into, failures, "decode", request.receive)
            await until(lambda: request.senders and request.senders[0].memory is Memory.SAFE)
            await crash(deployment.prefill[0])
        assert failures["prefill"].reason is failures["decode"].reason is FailureReason.BROKEN
        assert not failures["prefill"].quarantined
        await leave_broken(deployment, deployment.prefill[0])


async def test_what_a_broken_decode_rank_could_not_prove_stays_in_quarantine_when_it_is_left() -> None:
    async with deploy() as deployment:
        decode, receiver = deployment.decode[0], deployment.request(1, 8).receiver()
        async with anyio.create_task_group() as tasks:

            async def receive() -> None:
                async with receiver:
                    await receiver.done()

            tasks.start_soon(catch, receive)
            await until(lambda: deployment.prefill[0].statistics().waiting_grants)
            await crash(decode)
        await leave_broken(deployment, decode)
        (record,) = decode.quarantined()
        assert [proof.awaited for proof in record.missing] == [ProofKind.BROKEN]
        assert (receiver.outcome, receiver.memory) == (Outcome.FAILED, Memory.QUARANTINED)
        decode.release(record)
        assert (receiver.outcome, receiver.memory) == (Outcome.FAILED, Memory.SAFE)
        assert decode.quarantined() == []


async def test_leaving_a_broken_prefill_rank_fences_its_writes_and_frees_its_pages() -> None:
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            tasks.start_soon(catch, request.receive)
            await until(lambda: deployment.faults[0].posted)
            await crash(deployment.prefill[0])
        sender = request.senders[0]
        assert [record.room for record in deployment.prefill[0].quarantined()] == [sender.room]
        await leave_broken(deployment, deployment.prefill[0])
        assert deployment.prefill[0].quarantined() == []
        assert (sender.outcome, sender.memory) == (Outcome.FAILED, Memory.SAFE)


async def test_a_fault_within_a_call_of_the_engine_breaks_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining effects of the call are lost, and the state of the rank is no longer reliable."""
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        prefill, request = deployment.prefill[0], deployment.request(1, 8)
        failures: list[TransferFailed] = []

        async def receive() -> None:
            failures.append(await catch(request.receive))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await until(lambda: prefill.statistics().waiting_grants)
            with monkeypatch.context() as patch:
                patch.setattr(prefill._planning, "prepare", lambda job: 1 // 0)
                failures.append(await catch(request.send))
        assert [failure.reason for failure in failures] == [FailureReason.BROKEN] * 2
        assert "ZeroDivisionError" in failures[0].detail
        with pytest.raises(RankBroken) as refused:
            await _send(prefill)
        assert isinstance(refused.value.__cause__, ZeroDivisionError)
        await leave_broken(deployment, prefill)


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_a_broken_rank_says_so_to_whoever_drains_it(name: str) -> None:
    async with deploy() as deployment:
        rank = deployment.prefill[0] if name == "prefill" else deployment.decode[0]
        await crash(rank)
        with pytest.raises(RankBroken):
            await rank.drain()
        await leave_broken(deployment, rank)


async def test_a_rank_is_opened_only_once() -> None:
    async with kvflow.Registry() as registry:
        rank = kvflow.PrefillRank(prefill_config(registry.endpoint), make_pool().layout)
        async with rank:
            pass
        with pytest.raises(LocalProtocolError, match="only once"):
            await rank.__aenter__()


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.05])
async def test_cancelled_opening_leaves_no_thread(after_s: float) -> None:
    async with kvflow.Registry() as registry:
        before = {thread.name for thread in threading.enumerate()}
        with anyio.move_on_after(after_s):
            async with kvflow.PrefillRank(prefill_config(registry.endpoint, backend="nixl"), make_pool().layout):
                await anyio.sleep_forever()
        left = {thread.name for thread in threading.enumerate()} - before
        assert not [name for name in left if "nixl" in name]


async def test_cancelled_registry_leaves_its_port() -> None:
    port = unused_port()
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with kvflow.Registry(f"tcp://127.0.0.1:{port}"):
            await anyio.sleep_forever()
    await until(lambda: is_free(port))
