"""Whole transfers: every byte arrives in its place with any split, order and chunks."""

from dataclasses import replace

import anyio
import pytest
from typing_extensions import override

import kvflow
from kvflow.backends.memory import MemoryBackend
from kvflow.bounds import Bounds
from kvflow.geometry import Descriptors
from kvflow.state.tables import Memory, Outcome
from tests.support.instances import (
    BACKENDS,
    HEAD_BYTES,
    NUM_HEADS,
    NUM_LAYERS,
    PAGE_SIZE,
    deploy,
    is_settled,
    prefill_config,
)
from tests.support.slow import MOONCAKE_SLOWLY, on_backends, slow_except
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

BYTES_PER_TOKEN = 2 * NUM_LAYERS * NUM_HEADS * HEAD_BYTES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [None, 4, 7], ids=["one chunk", "page chunks", "odd chunks"])
async def test_every_cell_arrives(backend: str, chunk: int | None) -> None:
    async with deploy(backend) as deployment:
        request = deployment.request(7, 29)
        (handover,) = await request.hand_over(chunk=chunk)
        request.assert_arrived()
        assert handover.metadata == b"from 0"
        assert handover.num_bytes == 29 * BYTES_PER_TOKEN == request.num_written()
        assert handover.num_notices == -(-29 // (chunk or 29))
        assert 0 < handover.first_notice_s <= handover.elapsed_s
        await deployment.settle()
        assert all(is_settled(statistics) for statistics in deployment.statistics())


@pytest.mark.parametrize("backend", MOONCAKE_SLOWLY)
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    slow_except([(3, 1), (1, 3), (2, 3)], [(3, 1), (1, 3), (3, 3), (2, 3), (12, 6), (6, 12)]),
    ids=lambda tp: f"tp{tp}",
)
async def test_any_tensor_parallel_size_to_any(backend: str, prefill_tp: int, decode_tp: int) -> None:
    async with deploy(backend, prefill_tp=prefill_tp, decode_tp=decode_tp) as deployment:
        request = deployment.request(9, 21)
        handovers = await request.hand_over(chunk=8)
        request.assert_arrived()
        heads_held = max(NUM_HEADS, decode_tp)  # with more ranks than heads, heads are replicated
        assert sum(handover.num_bytes for handover in handovers) == 21 * BYTES_PER_TOKEN * heads_held // NUM_HEADS


@pytest.mark.parametrize(("backend", "chunk"), on_backends([11], [None, 11]))
async def test_large_chunks_go_in_pieces(backend: str, chunk: int | None) -> None:
    limits = Bounds(bytes_per_post=2 * PAGE_SIZE * BYTES_PER_TOKEN // 2)
    async with deploy(backend, prefill_tp=2, decode_tp=1, limits=limits, digest_every=1) as deployment:
        request = deployment.request(7, 29)
        (handover,) = await request.hand_over(chunk=chunk, start=2)
        request.assert_arrived(2)
        request.assert_untouched(2)
        assert handover.metadata == b"from 0"
        assert handover.num_bytes == 27 * BYTES_PER_TOKEN
        pieces = 4 if chunk is None else 2 + 2 + 1
        assert handover.num_notices == 2 * pieces
        await deployment.settle()


@pytest.mark.parametrize(("backend", "start"), on_backends([10], [4, 10, 28]))  # pages have 4 tokens
async def test_a_prefix_that_decode_has_is_not_sent(backend: str, start: int) -> None:
    async with deploy(backend, prefill_tp=2) as deployment:
        request = deployment.request(3, 29)
        (handover,) = await request.hand_over(chunk=8, start=start)
        request.assert_arrived(start)
        request.assert_untouched(start)
        assert handover.num_bytes == (29 - start) * BYTES_PER_TOKEN


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_full_prefix_hit_still_brings_the_metadata(backend: str) -> None:
    async with deploy(backend) as deployment:
        request = deployment.request(3, 12)
        (handover,) = await request.hand_over(chunk=4, start=12)
        assert (handover.metadata, handover.num_bytes, request.num_written()) == (b"from 0", 0, 0)


async def test_decode_may_ask_long_before_prefill_starts_and_the_other_way_round() -> None:
    async with deploy() as deployment:
        early, late = deployment.request(1, 8), deployment.request(2, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(early.receive)
            tasks.start_soon(late.send)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(early.send)
            tasks.start_soon(late.receive)
        early.assert_arrived()
        late.assert_arrived()


async def test_facts_of_a_transfer_can_be_read_at_any_time() -> None:
    async with deploy() as deployment:
        request = deployment.request(5, 8)
        async with anyio.create_task_group() as tasks, request.receiver() as receiver:
            assert (receiver.outcome, receiver.memory) == (Outcome.PENDING, Memory.HELD)
            tasks.start_soon(request.send)
            await receiver.done()
            assert (receiver.outcome, receiver.memory) == (Outcome.SUCCESS, Memory.SAFE)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_many_transfers_share_the_ranks(backend: str) -> None:
    async with deploy(backend, prefill_tp=2, decode_tp=3) as deployment:
        requests = [deployment.request(room, 5 + room % 9) for room in range(16)]
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(lambda r: r.hand_over(chunk=3), request)
        for request in requests:
            request.assert_arrived()


async def test_nothing_waits_for_another_transfer_to_end() -> None:
    """While the transport holds writes, every transfer still posts, up to the credit."""
    async with deploy(limits=Bounds(posts_per_peer=10)) as deployment:
        requests = [deployment.request(room, 8) for room in range(10)]
        (faults,) = deployment.faults
        faults.hold()
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(request.hand_over)
            await until(lambda: len(faults.posted) == len(requests))
            assert deployment.prefill[0].statistics().posted == len(requests)
            assert requests[0].num_written() == 0
            faults.release()
        for request in requests:
            request.assert_arrived()


async def test_credit_bounds_what_is_posted() -> None:
    async with deploy(limits=Bounds(posts_per_peer=3)) as deployment:
        requests = [deployment.request(room, 8) for room in range(8)]
        (faults,) = deployment.faults
        faults.hold()
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(request.hand_over)
            await anyio.wait_all_tasks_blocked()
            await until(lambda: deployment.prefill[0].statistics().queued_chunks == len(requests) - 3)
            assert len(faults.posted) == 3
            faults.release()
        for request in requests:
            request.assert_arrived()


async def test_a_full_queue_holds_the_engine_back() -> None:
    """With writes held, `chunk` waits once the queue is full, and continues when it drains."""
    async with deploy(limits=Bounds(posts_per_peer=1, queued_chunks=2)) as deployment:
        request = deployment.request(1, 40)
        (faults,) = deployment.faults
        faults.hold()
        offered = []

        async def send() -> None:
            async with deployment.prefill[0].send(1) as sender:
                for start in range(0, 36, 4):
                    request.compute(start, start + 4)
                    await sender.chunk((start, start + 4), request.src_pages(0, (start, start + 4)))
                    offered.append(start)
                request.compute(36, 40)
                await sender.finish((36, 40), request.src_pages(0, (36, 40)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.receive)
            await until(lambda: deployment.prefill[0].statistics().waiting_grants)
            tasks.start_soon(send)
            await until(lambda: faults.posted)
            await anyio.wait_all_tasks_blocked()
            assert len(offered) < 9
            faults.release()
        assert len(offered) == 9
        request.assert_arrived()


async def test_every_engine_that_waits_for_room_goes_on() -> None:
    """More rooms wait than fit into the queue, and each of them is woken."""
    async with deploy(limits=Bounds(posts_per_peer=1, queued_chunks=2)) as deployment:
        requests = [deployment.request(room, 12) for room in range(8)]
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(lambda r: r.hand_over(chunk=2), request)
        for request in requests:
            request.assert_arrived()


async def test_chunk_that_is_cancelled_while_it_waits_was_not_offered() -> None:
    async with deploy(limits=Bounds(posts_per_peer=1, queued_chunks=1)) as deployment:
        request = deployment.request(1, 16)
        (faults,) = deployment.faults
        faults.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.receive)
            await until(lambda: deployment.prefill[0].statistics().waiting_grants)
            async with deployment.prefill[0].send(1) as sender:
                request.compute(0, 16)
                start = 0
                while not deployment.prefill[0].statistics().queued_chunks:
                    await sender.chunk((start, start + 1), request.src_pages(0, (start, start + 1)))
                    start += 1
                    await anyio.wait_all_tasks_blocked()
                with anyio.move_on_after(0.01) as scope:
                    await sender.chunk((start, start + 1), request.src_pages(0, (start, start + 1)))
                assert scope.cancelled_caught
                faults.release()
                await sender.finish((start, 16), request.src_pages(0, (start, 16)))
        request.assert_arrived()


class NarrowBackend(MemoryBackend):
    """A transport with a descriptor limit below a page, which rules out blocks."""

    capabilities = replace(MemoryBackend.capabilities, max_descriptor_bytes=100, prepared_lists=True)

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        self.longest = max(self.longest, int(descriptors.src[:, 1].max()))
        super().post(post_id, peer, descriptors, notice)


async def test_no_descriptor_is_longer_than_the_transport_takes() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 12)
        narrow = NarrowBackend()
        await deployment.close(deployment.prefill[0])
        config = prefill_config(deployment.registry.endpoint)
        async with kvflow.PrefillRank(config, deployment.sources[0].layout, narrow) as prefill:
            deployment.prefill[0] = prefill
            await request.hand_over()
        request.assert_arrived()
        assert narrow.longest == 100
