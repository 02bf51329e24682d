"""Flow control: the order of rooms without credit, and which rooms wait for which."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
from typing_extensions import override

import kvflow
from kvflow.backends.memory import MemoryBackend
from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.errors import FailureReason
from kvflow.geometry import Descriptors
from kvflow.state.tables import Outcome
from tests.support.failures import undisturbed
from tests.support.instances import Deployment, Request, decode_config, deploy, make_pool, prefill_config
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

BYTES_PER_TOKEN = 192


@pytest.mark.parametrize("num_rooms", [1, 20], ids=["of one room", "of many rooms"])
async def test_urgent_room_overtakes_what_waits_for_credit(num_rooms: int) -> None:
    """Twenty chunks of low priority wait behind a write that hangs; the urgent one comes last and is posted next."""
    async with deploy(limits=Bounds(posts_per_peer=1, ageing_s=3600.0)) as deployment:
        (prefill,), (faults,) = deployment.prefill, deployment.faults
        lazy = [deployment.request(room, 21 // num_rooms) for room in range(num_rooms)]
        urgent = deployment.request(99, 3)
        faults.hold()
        async with anyio.create_task_group() as tasks:
            for request in lazy:
                tasks.start_soon(lambda r: r.hand_over(chunk=1, priority=7), request)
            num_waiting = sum(request.num_tokens for request in lazy) - 1
            await until(lambda: prefill.statistics().queued_chunks == num_waiting)
            tasks.start_soon(urgent.hand_over)
            await until(lambda: prefill.statistics().queued_chunks == num_waiting + 1)
            faults.release()
        sizes = [num_bytes // BYTES_PER_TOKEN for _, num_bytes in faults.posted]
        assert sizes == [1, 3, *[1] * num_waiting]
        for request in (*lazy, urgent):
            request.assert_arrived()


async def test_credit_counts_descriptors_that_are_not_planned_yet() -> None:
    async with deploy(limits=Bounds(descriptors_per_peer=1)) as deployment:
        requests = [deployment.request(room, 8) for room in range(4)]
        (prefill,), (faults,) = deployment.prefill, deployment.faults
        faults.hold()
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(request.hand_over)
            await until(lambda: prefill.statistics().queued_chunks == 3)
            await anyio.wait_all_tasks_blocked()
            assert len(faults.posted) == 1
            faults.release()
        for request in requests:
            request.assert_arrived()


async def test_a_room_in_the_background_gives_way_to_others() -> None:
    """Its second piece is posted when the others have ended, although it was there first."""
    limits = Bounds(bytes_per_background_post=4 * BYTES_PER_TOKEN)
    async with deploy(limits=limits) as deployment:
        (prefill,), (faults,) = deployment.prefill, deployment.faults
        background = deployment.request(1, 12)
        others = [deployment.request(room, 6) for room in range(2, 6)]
        faults.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: background.hand_over(background=True))
            await until(lambda: prefill.statistics().queued_chunks == 2)
            for request in others:
                tasks.start_soon(request.hand_over)
            await until(lambda: len(faults.posted) == 1 + len(others))
            assert prefill.statistics().queued_chunks == 2
            faults.release()
        assert [num_bytes // BYTES_PER_TOKEN for _, num_bytes in faults.posted] == [4, *[6] * len(others), 4, 4]
        for request in (background, *others):
            request.assert_arrived()


class Authorizer(MemoryBackend):
    """A transport that holds the posts to one instance until a test opens it."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self.instance: str | None = instance
        self.kept: list[tuple[int, str, Descriptors, bytes]] = []

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        if self.instance is not None and peer.startswith(f"{self.instance}/"):
            self.kept.append((post_id, peer, descriptors, notice))
        else:
            super().post(post_id, peer, descriptors, notice)

    def open_gate(self) -> None:
        self.instance = None
        for post in self.kept:
            self.post(*post)


@dataclass
class TwoInstances:
    """One prefill rank and two decode instances; posts to `slow` wait until the gate is opened."""

    quick: Deployment
    slow: Deployment
    gate: Authorizer
    failures: dict[int, FailureReason] = field(default_factory=dict)

    @property
    def prefill(self) -> kvflow.PrefillRank:
        return self.quick.prefill[0]

    async def send(self, request: Request) -> None:
        """Send token by token; record why `chunk` failed."""
        async with self.prefill.send(request.room) as sender:
            request.senders[0] = sender
            request.compute(0, request.num_tokens)

            async def chunk_by_chunk() -> None:
                for token in range(request.num_tokens - 1):
                    await sender.chunk((token, token + 1), request.src_pages(0, (token, token + 1)))

            try:
                await chunk_by_chunk()
            except kvflow.TransferFailed as error:
                self.failures[request.room] = error.reason
                return
            last = (request.num_tokens - 1, request.num_tokens)
            await sender.finish(last, request.src_pages(0, last))


@asynccontextmanager
async def two_instances(limits: Limits) -> AsyncIterator[TwoInstances]:
    async with deploy(limits=limits) as quick:
        gate, pool = Authorizer("slow"), make_pool()
        await quick.close(quick.prefill[0])
        config = prefill_config(quick.registry.endpoint, limits=limits)
        async with (
            kvflow.PrefillRank(config, quick.sources[0].layout, gate) as prefill,
            kvflow.DecodeRank(decode_config(quick.registry.endpoint, instance="slow"), pool.layout) as decode,
        ):
            quick.prefill[0] = prefill
            slow = Deployment(
                quick.registry, quick.prefill, [decode], quick.sources, [pool], rng=quick.rng, free=quick.free
            )
            yield TwoInstances(quick, slow, gate)


async def test_slow_decode_instance_does_not_hold_up_rooms_that_go_elsewhere() -> None:
    """Its window and queue are full, and its sender waits; five rooms to the other instance succeed meanwhile."""
    async with two_instances(Bounds(posts_per_peer=2, queued_chunks=3)) as both:
        stuck = both.slow.request(1, 12)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stuck.receive)
            await until(lambda: both.prefill.statistics().waiting_grants)
            tasks.start_soon(both.send, stuck)
            await until(lambda: both.prefill.statistics().queued_chunks == 3)
            for room in range(2, 7):
                request = both.quick.request(room, 12)
                await request.hand_over(chunk=1)
                request.assert_arrived()
            assert len(both.gate.kept) == 2
            assert both.prefill.statistics().queued_chunks == 3
            assert stuck.senders[0].outcome is Outcome.PENDING
            both.gate.open_gate()
        stuck.assert_arrived()


async def test_engine_that_waits_for_room_hears_at_once_that_its_own_room_has_failed() -> None:
    """The chunks that fill the queue belong to another room and stay."""
    async with two_instances(Bounds(posts_per_peer=1, queued_chunks=2)) as both:
        stuck, given_up = both.slow.request(1, 3), both.slow.request(2, 4)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stuck.receive)
            await until(lambda: both.prefill.statistics().waiting_grants)
            tasks.start_soon(both.send, stuck)
            await until(lambda: both.prefill.statistics().queued_chunks == 2)
            async with given_up.receiver():
                await until(lambda: both.prefill.statistics().waiting_grants)
                tasks.start_soon(both.send, given_up)
                await until(lambda: given_up.senders)
                await anyio.wait_all_tasks_blocked()
                assert both.prefill.statistics().queued_chunks == 2
            await until(lambda: both.failures)
            assert both.failures == {2: FailureReason.ABORTED}
            assert both.prefill.statistics().queued_chunks == 2
            assert len(both.gate.kept) == 1
            both.gate.open_gate()
        stuck.assert_arrived()
        await undisturbed(both.quick)
