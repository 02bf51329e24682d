"""Draining: a rank finishes open rooms, accepts no new ones, and disappears from the registry."""

import signal

import anyio
import pytest

import kvflow
from kvflow.config import Timeouts
from kvflow.errors import FailureReason, LocalProtocolError, RankDraining
from kvflow.state.tables import Memory, Outcome
from tests.support.failures import catch, undisturbed
from tests.support.instances import Deployment, decode_config, deploy, make_pool
from tests.support.prefill_client import prefill_process, receive
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

Side = kvflow.PrefillRank | kvflow.DecodeRank


class Draining:
    """A drain in a task, and its result."""

    def __init__(self, rank: Side, timeout_s: float | None = None) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self.result: bool | None = None

    async def __call__(self) -> None:
        self.result = await self._rank.drain(self._timeout_s)


def side(deployment: Deployment, name: str) -> Side:
    return deployment.prefill[0] if name == "prefill" else deployment.decode[0]


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_what_runs_is_finished_before_drain_returns(name: str) -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].hold()
        draining = Draining(side(deployment, name))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.send)
            tasks.start_soon(request.receive)
            await until(lambda: deployment.faults[0].posted)
            tasks.start_soon(draining)
            await anyio.wait_all_tasks_blocked()
            assert draining.result is None
            deployment.faults[0].release()
        assert draining.result is True
        request.assert_arrived()
        assert request.senders[0].outcome is Outcome.SUCCESS


async def test_drain_waits_for_the_ack_of_the_decode_rank() -> None:
    """Everything is written, but the notice was lost: leaving now would fail a transfer that has all its bytes."""
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].plan.append("lose_notice")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.send)
            tasks.start_soon(request.receive)
            await until(lambda: request.senders and request.senders[0].memory is Memory.SAFE)
            before = request.senders[0].outcome
            assert await deployment.prefill[0].drain()
            assert (before, request.senders[0].outcome) == (Outcome.PENDING, Outcome.SUCCESS)


async def test_nothing_new_begins_on_a_draining_prefill_rank_and_its_peers_are_told() -> None:
    async with deploy() as deployment:
        await undisturbed(deployment)
        assert await deployment.prefill[0].drain()
        with pytest.raises(RankDraining):
            await deployment.request(1, 8).send()
        failure = await catch(deployment.request(2, 8).receive)
        assert (failure.reason, failure.detected_by) == (FailureReason.PEER_CLOSED, "prefill/0")
        assert not failure.quarantined


async def test_who_waits_for_a_room_is_told_when_the_drain_begins() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        async with anyio.create_task_group() as tasks:

            async def wait_in_vain() -> None:
                failure = await catch(request.receive)
                assert (failure.reason, failure.detected_by) == (FailureReason.PEER_CLOSED, "prefill/0")

            tasks.start_soon(wait_in_vain)
            await until(lambda: deployment.prefill[0].statistics().waiting_grants)
            assert await deployment.prefill[0].drain()


async def test_nothing_new_begins_on_a_draining_decode_rank() -> None:
    async with deploy() as deployment:
        assert await deployment.decode[0].drain()
        receiver = deployment.request(1, 8).receiver()
        with pytest.raises(RankDraining):
            await receiver.__aenter__()
        assert receiver.memory is Memory.SAFE
        assert deployment.decode[0].statistics().rooms == 0


async def test_a_draining_prefill_rank_is_not_found_any_more() -> None:
    async with deploy() as deployment:
        await undisturbed(deployment)
        assert await deployment.prefill[0].drain()
        await until(lambda: deployment.registry._directory.table.num_ranks == 0)
        settings = decode_config(deployment.registry.endpoint, instance="late", timeouts=Timeouts(handshake_s=1.5))
        async with kvflow.DecodeRank(settings, make_pool().layout) as late:
            failure = await catch(lambda: receive(late, 1))
        assert failure.reason is FailureReason.UNREACHABLE
        assert "none of its ranks is registered" in failure.detail


async def test_drain_gives_up_after_its_time_and_the_transfer_goes_on() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.send)
            tasks.start_soon(request.receive)
            await until(lambda: deployment.faults[0].posted)
            assert not await deployment.prefill[0].drain(0.05)
            deployment.faults[0].release()
        request.assert_arrived()
        assert await deployment.prefill[0].drain()


async def test_everybody_who_drains_a_rank_learns_when_it_is_done() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].hold()
        drains = [Draining(deployment.prefill[0]) for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.send)
            tasks.start_soon(request.receive)
            await until(lambda: deployment.faults[0].posted)
            for drain in drains:
                tasks.start_soon(drain)
            await anyio.wait_all_tasks_blocked()
            deployment.faults[0].release()
        assert [drain.result for drain in drains] == [True, True, True]


async def test_a_drain_ends_when_the_rank_is_closed_over_it() -> None:
    async with deploy(timeouts=Timeouts(drain_s=0.1, lease_s=2.0)) as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].hold()
        draining = Draining(deployment.prefill[0])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, request.send)
            tasks.start_soon(catch, request.receive)
            await until(lambda: deployment.faults[0].posted)
            tasks.start_soon(draining)
            await anyio.wait_all_tasks_blocked()
            await deployment.close(deployment.prefill[0])
        assert draining.result is True


async def test_only_an_open_rank_can_be_drained() -> None:
    async with deploy() as deployment:
        prefill = deployment.prefill[0]
        await deployment.close(prefill)
        with pytest.raises(LocalProtocolError, match="not open"):
            await prefill.drain()


async def test_a_process_that_is_told_to_end_finishes_its_transfer_first() -> None:
    pool = make_pool()
    async with (
        kvflow.Registry() as registry,
        kvflow.DecodeRank(decode_config(registry.endpoint, backend="nixl"), pool.layout) as decode,
        prefill_process(registry.endpoint, 0) as prefill,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(receive, decode, 1)
        await prefill.tell("send", room=1)
        await prefill.expect("half", 1)
        prefill.send_signal(signal.SIGTERM)

        async def is_refused() -> bool:
            failure = await catch(lambda: receive(decode, 2, pages={"kv": [1, 2]}))
            return (failure.reason, failure.detected_by) == (FailureReason.PEER_CLOSED, "prefill/0")

        assert await is_refused()
        await prefill.tell("finish")
        await prefill.expect("drained")
