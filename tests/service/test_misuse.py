"""Misuse by engines and shortage of resources: each raises at once, and affects no more than it has to."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

import kvflow
from kvflow import blocking
from kvflow.backends import BackendEvent, OnBroken, OnEvents, PostEnded, PostInDoubt
from kvflow.backends.memory import MemoryBackend
from kvflow.bounds import Bounds
from kvflow.errors import ConfigError, FailureReason, LocalProtocolError, RankBroken, TransferFailed
from kvflow.stages.planning import Planning
from kvflow.state.tables import Memory, Outcome
from tests.observe.lines import printed
from tests.support.failures import catch, catch_into, undisturbed
from tests.support.faulty_memory import FaultScript, FaultyMemoryBackend
from tests.support.instances import (
    SOON_QUARANTINED,
    Deployment,
    Request,
    decode_config,
    deploy,
    make_pool,
    prefill_config,
)
from tests.support.registries import registry_in_thread
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SIDES = ("prefill", "decode")
ADDRESS = "tcp://127.0.0.1:1"
TOKENS = (0, 8)
PAGES = {"kv": [5, 2]}


def rank_of(deployment: Deployment, side: str) -> kvflow.PrefillRank | kvflow.DecodeRank:
    return deployment.prefill[0] if side == "prefill" else deployment.decode[0]


# Settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "config", "found", "wanted"),
    [
        (kvflow.PrefillRank, decode_config(ADDRESS), "DecodeConfig", "PrefillConfig"),
        (kvflow.DecodeRank, prefill_config(ADDRESS), "PrefillConfig", "DecodeConfig"),
        (kvflow.PrefillRank, None, "NoneType", "PrefillConfig"),
        (kvflow.DecodeRank, {"instance": "d"}, "dict", "DecodeConfig"),
    ],
    ids=["decode on prefill", "prefill on decode", "none", "dict"],
)
def test_settings_of_the_other_role_are_refused(make: Any, config: object, found: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(config, make_pool().layout)
    assert caught.value.values == {"argument": "config", "found": found, "wanted": wanted}


@pytest.mark.parametrize(
    ("make", "config"),
    [(kvflow.PrefillRank, prefill_config(ADDRESS)), (kvflow.DecodeRank, decode_config(ADDRESS, digest_every=1))],
)
@pytest.mark.parametrize("layout", [None, {"k": []}], ids=["none", "tensors"])
def test_what_is_no_layout_is_refused(make: Any, config: object, layout: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make(config, layout)
    assert caught.value.values == {"argument": "layout", "found": type(layout).__name__, "wanted": "KVLayout"}


# Other event loops and threads -------------------------------------------------------------------------------------


async def elsewhere(act: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run a coroutine function on an event loop of another thread."""
    await anyio.to_thread.run_sync(lambda: asyncio.run(act()))


@pytest.mark.parametrize("side", SIDES)
async def test_a_rank_is_used_on_its_own_event_loop_only(side: str) -> None:
    async with deploy() as deployment:
        rank, request = rank_of(deployment, side), deployment.request(1, 8)

        async def begin() -> None:
            transfer = deployment.prefill[0].send(1) if side == "prefill" else request.receiver()
            await transfer.__aenter__()

        async def leave() -> None:
            await rank.__aexit__(None, None, None)

        for act in (begin, rank.drain, leave):
            with pytest.raises(LocalProtocolError, match="event loop"):
                await elsewhere(act)
        with pytest.raises(LocalProtocolError, match="event loop"):
            await anyio.to_thread.run_sync(rank.start_drain)
        await undisturbed(deployment)


async def test_a_transfer_is_used_on_its_own_event_loop_only() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        request.compute(0, 8)
        async with request.receiver() as receiver, deployment.prefill[0].send(1) as sender:

            async def give_chunk() -> None:
                await sender.chunk((0, 4), request.src_pages(0, (0, 4)))

            async def leave_sender() -> None:
                await sender.__aexit__(None, None, None)

            async def leave_receiver() -> None:
                await receiver.__aexit__(None, None, None)

            for act in (give_chunk, sender.delivered, receiver.done, leave_sender, leave_receiver):
                with pytest.raises(LocalProtocolError, match="event loop"):
                    await elsewhere(act)
            for call in (sender.abort, receiver.abort):
                with pytest.raises(LocalProtocolError, match="event loop"):
                    await anyio.to_thread.run_sync(call)
            assert sender.outcome is receiver.outcome is Outcome.PENDING
            await sender.finish((0, 8), request.src_pages(0, (0, 8)))
            await receiver.done()
        request.assert_arrived()


async def test_a_room_cannot_be_opened_from_within_a_callback() -> None:
    """The core is handling an event at that time: it refuses the call, and the rank keeps working."""
    async with deploy() as deployment:
        request, others = deployment.request(1, 8), []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.receive)
            async with deployment.prefill[0].send(1) as sender:

                def open_another() -> None:
                    others.append(deployment.prefill[0].send(2))
                    with pytest.raises(LocalProtocolError, match="callback"):
                        others[-1]._open_room()

                sender.on_change = open_another
                await sender.finish((0, 8), request.src_pages(0, (0, 8)))
        assert others
        assert {other.memory for other in others} == {Memory.SAFE}
        await undisturbed(deployment, room=2)


async def test_a_transfer_can_be_given_up_from_within_a_callback() -> None:
    async with deploy() as deployment:
        first, second = deployment.request(1, 8), deployment.request(2, 8)
        async with second.receiver() as other, first.receiver() as receiver:
            receiver.on_change = other.abort
            receiver.abort()
            await until(lambda: other.memory is Memory.SAFE)
            assert other.outcome is Outcome.ABORTED
        await undisturbed(deployment)


# Chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_delivered", [False, True], ids=["under way", "delivered"])
async def test_no_chunk_follows_the_last_one(is_delivered: bool) -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        async with anyio.create_task_group() as tasks, deployment.prefill[0].send(1) as sender:
            await sender.finish((0, 8), request.src_pages(0, (0, 8)))
            if is_delivered:
                tasks.start_soon(request.receive)
                await sender.delivered()
            for give in (sender.chunk, sender.finish):
                with pytest.raises(LocalProtocolError, match="finish"):
                    await give((8, 8), {"kv": []})
            if not is_delivered:
                tasks.start_soon(request.receive)
        assert sender.outcome is Outcome.SUCCESS


async def test_a_chunk_for_a_room_that_is_over_does_not_reach_the_next_transfer_of_that_room() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        await request.hand_over()
        old = request.senders[0]
        async with deployment.prefill[0].send(1) as sender:
            with pytest.raises(LocalProtocolError, match="finish"):
                await old.chunk((0, 4), request.src_pages(0, (0, 4)))
            assert deployment.prefill[0].statistics().queued_chunks == 0
            sender.abort()
        await undisturbed(deployment)


class Pair:
    """Both blocking ranks, with control over their writes."""

    def __init__(self, prefill: blocking.PrefillRank, decode: blocking.DecodeRank, faults: FaultScript) -> None:
        self.prefill = prefill
        self.decode = decode
        self.faults = faults

    def receive(self, room: int) -> blocking.BlockingReceiver:
        return self.decode.receive(room, prefill="prefill", tokens=TOKENS, pages=PAGES)


@contextmanager
def blocking_pair() -> Iterator[Pair]:
    faults = FaultScript()
    with ExitStack() as stack:
        endpoint = stack.enter_context(registry_in_thread())
        prefill = blocking.PrefillRank(prefill_config(endpoint), make_pool().layout, FaultyMemoryBackend(faults=faults))
        decode = blocking.DecodeRank(decode_config(endpoint), make_pool().layout)
        yield Pair(stack.enter_context(prefill), stack.enter_context(decode), faults)


def wait_until(condition: Callable[[], object]) -> None:
    anyio.run(until, condition)


def test_no_chunk_follows_the_last_one_of_a_scheduler() -> None:
    with blocking_pair() as pair:
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        sender.finish(TOKENS, PAGES)
        for _ in range(2):
            for give in (sender.chunk, sender.finish):
                with pytest.raises(LocalProtocolError, match="finish"):
                    give((8, 8), {"kv": []})
            assert sender.wait() is receiver.wait() is Outcome.SUCCESS


def test_a_scheduler_hears_why_it_need_not_go_on() -> None:
    with blocking_pair() as pair:
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        sender.chunk((0, 4), {"kv": [5]})
        wait_until(lambda: pair.faults.posted)
        receiver.abort()
        assert sender.wait() is Outcome.FAILED
        for give in (sender.chunk, sender.finish):
            with pytest.raises(TransferFailed) as caught:
                give((4, 8), {"kv": [2]})
            assert (caught.value.reason, caught.value.detected_by) == (FailureReason.ABORTED, "decode/0")


# Shortage of threads -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def without_threads(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let every start of a thread fail."""

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        yield


PACKING = {"staging_bytes": 2**14, "staging_slot_bytes": 2**10}


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, {"prefill": 0, "decode": 1}),
        ({"limits": Bounds(descriptors_planned_inline=1)}, {"prefill": 1, "decode": 1}),
        ({"digest_every": 1}, {"prefill": 1, "decode": 2}),
        (
            {
                "limits": Bounds(bytes_per_post=1),
                "sending": {"packing": "always", **PACKING},
                "receiving": {"staging_slots": 4, **PACKING},
            },
            {"prefill": 0, "decode": 2},
        ),
    ],
    ids=["routes", "plans", "digests", "scattering"],
)
async def test_what_threads_would_do_is_done_on_the_event_loop_if_there_are_none(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], least: dict[str, int]
) -> None:
    async with deploy(**changes) as deployment, without_threads(monkeypatch):
        request = deployment.request(1, 30)
        await request.hand_over(chunk=10)
        request.assert_arrived()
        await deployment.settle()
        for side in SIDES:
            assert rank_of(deployment, side).statistics().anomalies.get("thread_shortage", 0) >= least[side]


class Happened:
    """A device event that has already completed."""

    def synchronize(self) -> None:
        return


async def test_a_device_that_no_thread_can_wait_for_fails_its_transfer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deploy() as deployment:
        async with without_threads(monkeypatch):
            await undisturbed(deployment)
            request = deployment.request(1, 4)

            async def send() -> None:
                async with deployment.prefill[0].send(1) as sender:
                    await sender.finish((0, 4), request.src_pages(0, (0, 4)), ready=Happened())

            failures: list[TransferFailed] = []

            async def receive() -> None:
                failures.append(await catch(request.receive))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                failures.append(await catch(send))
            for failure in failures:
                assert (failure.reason, failure.detected_by) == (FailureReason.NOT_READY, "prefill/0")
                assert failure.memory is Memory.SAFE
        await undisturbed(deployment, room=901)


# Errors within -----------------------------------------------------------------------------------------------------


async def test_an_effect_that_raises_breaks_the_rank_and_says_what_was_left_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        prefill, first, second = deployment.prefill[0], deployment.request(1, 8), deployment.request(2, 8)
        failures: dict[str, TransferFailed] = {}

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with printed() as lines:
            async with anyio.create_task_group() as tasks:
                for request in (first, second):
                    tasks.start_soon(catch_into, failures, f"decode {request.room}", request.receive)
                await until(lambda: prefill.statistics().waiting_grants == 2)
                bystander = prefill.send(2)
                async with anyio.create_task_group() as sending:
                    sending.start_soon(catch_into, failures, "prefill 2", lambda: idle(bystander))
                    await until(lambda: bystander.memory is Memory.HELD)
                    monkeypatch.setattr(Planning, "post_piece", fail)
                    failures["prefill 1"] = await catch(first.send)
        assert set(failures) == {"decode 1", "decode 2", "prefill 1", "prefill 2"}
        for failure in failures.values():
            assert (failure.reason, failure.detected_by) == (FailureReason.BROKEN, "prefill/0")
            assert "ZeroDivisionError" in failure.detail
        (failed,), (broken,) = lines.named("event_failed"), lines.named("rank_broken")
        assert failed["level"] == broken["level"] == "error"
        assert (failed["event_type"], failed["effects_left"][0]) == ("ChunkOffered", "PostPiece")
        with pytest.raises(RankBroken):
            await prefill.drain()
        with pytest.raises(BaseExceptionGroup) as raised:
            await deployment.close(prefill)
        assert raised.group_contains(ZeroDivisionError)


async def idle(sender: kvflow.RoomSender) -> None:
    async with sender:
        await sender.delivered()


# Failure is visible at once ----------------------------------------------------------------------------------------


NOT_QUIET = (Memory.DRAINING, Memory.QUARANTINED)
"""States of pages while a write hangs, in order."""


async def test_a_failure_is_told_before_the_pages_are_quiet() -> None:
    async with deploy() as deployment:
        request, (faults,) = deployment.request(1, 8), deployment.faults
        faults.hold()
        async with anyio.create_task_group() as tasks:
            sender = deployment.prefill[0].send(1)
            tasks.start_soon(finish, request, sender)
            async with request.receiver() as receiver:
                await until(lambda: faults.posted)
                sender.abort()
                assert (sender.outcome, sender.memory) == (Outcome.ABORTED, Memory.DRAINING)  # without any await
                assert sender.failure is not None
                assert sender.failure.reason is FailureReason.ABORTED
                failure = await catch(receiver.done)
                assert failure.reason is FailureReason.ABORTED
                assert receiver.outcome is Outcome.FAILED
                assert failure.memory is receiver.memory
                assert receiver.memory in NOT_QUIET
                assert receiver.failure is not None
                assert receiver.failure.reason is FailureReason.ABORTED
                faults.release()
            assert receiver.memory is failure.memory is Memory.SAFE
        await undisturbed(deployment)


async def finish(request: Request, sender: kvflow.RoomSender) -> None:
    async with sender:
        await sender.finish((0, request.num_tokens), request.src_pages(0, (0, request.num_tokens)))


def test_a_scheduler_sees_a_failure_before_the_pages_are_quiet() -> None:
    with blocking_pair() as pair:
        pair.faults.hold()
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        sender.finish(TOKENS, PAGES)
        wait_until(lambda: pair.faults.posted)
        sender.abort()
        wait_until(lambda: receiver.outcome is not Outcome.PENDING)
        for transfer in (receiver, sender):
            assert transfer.failure is not None
            assert transfer.failure.reason is FailureReason.ABORTED
            assert transfer.memory in NOT_QUIET
            with pytest.raises(TransferFailed):
                transfer.result()
        assert (receiver.outcome, sender.outcome) == (Outcome.FAILED, Outcome.ABORTED)
        pair.faults.release()
        wait_until(lambda: receiver.memory is sender.memory is Memory.SAFE)


# Draining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
async def test_a_drain_is_polled_while_the_engine_goes_on_with_its_chunks(side: str) -> None:
    async with deploy() as deployment:
        rank, request = rank_of(deployment, side), deployment.request(1, 8)
        request.compute(0, 8)
        assert not rank.is_drained
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.receive)
            async with deployment.prefill[0].send(1) as sender:
                await sender.chunk((0, 4), request.src_pages(0, (0, 4)))
                await until(lambda: deployment.faults[0].posted)
                rank.start_drain()
                rank.start_drain()  # the second call does nothing
                assert not rank.is_drained
                await sender.finish((4, 8), request.src_pages(0, (4, 8)))
                assert not rank.is_drained
        await until(lambda: rank.is_drained)
        request.assert_arrived()


@pytest.mark.parametrize("side", SIDES)
def test_a_scheduler_goes_on_with_its_chunks_while_a_rank_drains(side: str) -> None:
    with blocking_pair() as pair:
        rank = pair.prefill if side == "prefill" else pair.decode
        receiver, sender = pair.receive(1), pair.prefill.send(1)
        sender.chunk((0, 4), {"kv": [5]})
        wait_until(lambda: pair.faults.posted)
        assert not rank.is_drained
        rank.start_drain()
        assert not rank.is_drained
        sender.finish((4, 8), {"kv": [2]})
        assert sender.wait() is receiver.wait() is Outcome.SUCCESS
        wait_until(lambda: rank.is_drained)
        assert rank.drain(0.0)


# Rooms without a receiver ------------------------------------------------------------------------------------------


async def test_a_room_whose_receive_was_given_up_before_it_was_opened_fails_at_once() -> None:
    """The room does not wait for `grant_s`, which would exceed the time limit of this test."""
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        async with request.receiver():
            await until(lambda: deployment.prefill[0].statistics().waiting_grants)
        await until(lambda: not deployment.prefill[0].statistics().waiting_grants)
        sender = deployment.prefill[0].send(1)
        async with sender:
            assert sender.outcome is Outcome.FAILED
            failure = await catch(sender.delivered)
        assert (failure.reason, failure.detected_by) == (FailureReason.ABORTED, "decode/0")
        assert sender.memory is Memory.SAFE
        await undisturbed(deployment, room=1)


def test_a_scheduler_hears_at_once_that_nobody_waits_for_its_room() -> None:
    with blocking_pair() as pair:
        receiver = pair.receive(1)
        wait_until(lambda: pair.prefill.statistics().waiting_grants)
        receiver.abort()
        wait_until(lambda: not pair.prefill.statistics().waiting_grants)
        assert pair.prefill.send(1).wait() is Outcome.FAILED


# Transports --------------------------------------------------------------------------------------------------------


async def test_a_transport_that_reports_a_post_twice_or_one_that_never_was_costs_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = MemoryBackend.open

    async def open_garrulous(backend: MemoryBackend, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        def repeat(events: Sequence[BackendEvent]) -> None:
            ends = [event for event in events if isinstance(event, PostEnded)]
            doubts = [PostInDoubt(end.post_id, "perhaps") for end in ends]
            on_events([*events, *ends, *doubts, *(PostEnded(end.post_id + 1_000, None) for end in ends)])

        await real(backend, agent_name, repeat, on_broken)

    monkeypatch.setattr(MemoryBackend, "open", open_garrulous)
    async with deploy() as deployment:
        for room in (1, 2):
            request = deployment.request(room, 8)
            await request.hand_over()
            request.assert_arrived()
        counts = deployment.prefill[0].statistics()
        assert counts.posted == 0
        assert counts.anomalies["end_of_unknown_post"] == 2 * counts.anomalies["doubt_of_unknown_post"] > 0
