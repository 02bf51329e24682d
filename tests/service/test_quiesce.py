"""Preemption of a request: the engine takes the source pages back, overwrites them, and continues from others."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

import kvflow
from kvflow import blocking
from kvflow.bounds import Bounds
from kvflow.errors import FailureReason, LocalProtocolError, TransferFailed
from kvflow.state import events as ev
from tests.support.failures import catch
from tests.support.instances import (
    BACKENDS,
    NUM_PAGES,
    PAGE_SIZE,
    SOON_QUARANTINED,
    Deployment,
    decode_config,
    deploy,
    make_pool,
    prefill_config,
)
from tests.support.pools import Pool
from tests.support.prefill_client import prefill_process
from tests.support.prefill_process import FILL, MANY_PAGES
from tests.support.registries import registry_in_thread
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_TOKENS = 40
FIRST = list(range(10))
"""Pages of the first computation."""
SECOND = list(range(30, 40))
"""Pages of the recomputation."""
TARGET = list(range(50, 60))
OVERWRITTEN = 0xDD
SLOWLY = Bounds(bytes_per_post=1, posts_per_peer=1)
"""One page at a time."""
FULL = Bounds(bytes_per_post=1, posts_per_peer=1, queued_chunks=1)


def compute(pool: Pool, pages: list[int], tokens: tuple[int, int] = (0, NUM_TOKENS)) -> None:
    for name, token, cell in cells(pool, pages, tokens):
        cell[:] = 1 + (hash(name) + 7 * token) % 200


def cells(pool: Pool, pages: list[int], tokens: tuple[int, int]) -> list[tuple[tuple[int, int, int], int, np.ndarray]]:
    found = []
    for token in range(*tokens):
        page, within = pages[token // PAGE_SIZE], token % PAGE_SIZE
        for tensor in range(2):
            for layer in range(2):
                for head in range(6):
                    cell = pool.cell("kv"[tensor], layer, page, within, head)
                    found.append(((tensor, layer, head), token, cell))
    return found


def overwrite(pool: Pool, pages: list[int]) -> None:
    for _, _, cell in cells(pool, pages, (0, NUM_TOKENS)):
        cell[:] = OVERWRITTEN


def check_arrived(pool: Pool) -> None:
    expected = make_pool()
    compute(expected, TARGET)
    for (name, token, found), (_, _, wanted) in zip(
        cells(pool, TARGET, (0, NUM_TOKENS)), cells(expected, TARGET, (0, NUM_TOKENS)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted, err_msg=f"{name} of token {token}")


def table(pages: list[int], tokens: tuple[int, int]) -> dict[str, list[int]]:
    start, stop = tokens
    return {"kv": pages[start // PAGE_SIZE : -(-stop // PAGE_SIZE)] if start < stop else []}


@asynccontextmanager
async def receiving(ranks: Deployment) -> AsyncIterator[kvflow.RoomReceiver]:
    async with ranks.decode[0].receive(
        1, prefill="prefill", tokens=(0, NUM_TOKENS), pages=table(TARGET, (0, NUM_TOKENS))
    ) as receiver:
        yield receiver


async def go_on(sender: kvflow.RoomSender, pool: Pool, start: int | None) -> None:
    """Overwrite the pages that were taken back, compute everything in others, and send the missing tokens."""
    assert start is not None
    overwrite(pool, FIRST)
    compute(pool, SECOND)
    await sender.finish((start, NUM_TOKENS), table(SECOND, (start, NUM_TOKENS)), metadata=b"token")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packing", ["never", "always"])
async def test_pages_may_be_overwritten_and_nothing_of_that_arrives(backend: str, packing: str) -> None:
    staging = {"staging_bytes": 2**16, "staging_slot_bytes": 2**12} if packing == "always" else {}
    sending = {"packing": packing, **staging}
    async with (
        deploy(backend, limits=SLOWLY, sending=sending, receiving=staging) as ranks,
        receiving(ranks) as receiver,
    ):
        compute(ranks.sources[0], FIRST)
        async with ranks.prefill[0].send(1) as sender:
            await sender.granted()
            await sender.chunk((0, 16), table(FIRST, (0, 16)))
            await sender.chunk((16, 40), table(FIRST, (16, 40)))
            await sender.finish((40, 40), {}, metadata=b"early")
            start = await sender.quiesce()
            assert start is not None
            assert start < NUM_TOKENS, "something was forgotten"
            assert (sender.is_quiesced, sender.resume_at, sender.outcome) == (True, start, kvflow.Outcome.PENDING)
            await go_on(sender, ranks.sources[0], start)
            assert (await receiver.done()).metadata == b"token"
            await sender.delivered()
        check_arrived(ranks.targets[0])


async def test_a_request_may_be_preempted_again_and_again() -> None:
    async with deploy(limits=SLOWLY) as ranks, receiving(ranks) as receiver:
        pool, start = ranks.sources[0], 0
        async with ranks.prefill[0].send(1) as sender:
            await sender.granted()
            for pages in (FIRST, SECOND, FIRST, SECOND, FIRST):
                compute(pool, pages)
                await sender.chunk((start, NUM_TOKENS), table(pages, (start, NUM_TOKENS)))
                position = await sender.quiesce()
                assert position is not None
                assert position >= start
                start = position
                overwrite(pool, pages)
            compute(pool, SECOND)
            await sender.finish((start, NUM_TOKENS), table(SECOND, (start, NUM_TOKENS)))
            await receiver.done()
        check_arrived(ranks.targets[0])


async def test_before_decode_has_asked_everything_is_forgotten() -> None:
    async with deploy() as ranks:
        pool = ranks.sources[0]
        async with ranks.prefill[0].send(1) as sender:
            assert await sender.quiesce() == 0, "nothing was offered"
            await sender.finish((0, NUM_TOKENS), table(FIRST, (0, NUM_TOKENS)))
            await go_on(sender, pool, await sender.quiesce())
            async with receiving(ranks) as receiver:
                await receiver.done()
        check_arrived(ranks.targets[0])


async def test_nothing_has_to_be_offered_again_when_everything_is_posted() -> None:
    async with deploy() as ranks, receiving(ranks) as receiver:
        pool = ranks.sources[0]
        compute(pool, FIRST)
        async with ranks.prefill[0].send(1) as sender:
            await sender.granted()
            await sender.finish((0, NUM_TOKENS), table(FIRST, (0, NUM_TOKENS)))
            assert await sender.quiesce() is None
            overwrite(pool, FIRST)
            with pytest.raises(LocalProtocolError, match="cannot send chunks after `finish`"):
                await sender.finish((40, 40), {})
            await receiver.done()
            await sender.delivered()
            assert await sender.quiesce() is None, "after the end"
        check_arrived(ranks.targets[0])


async def test_a_chunk_that_waits_for_capacity_is_forgotten() -> None:
    async with deploy(limits=FULL) as ranks, receiving(ranks) as receiver, anyio.create_task_group() as tasks:
        pool, faults = ranks.sources[0], ranks.faults[0]
        compute(pool, FIRST)
        async with ranks.prefill[0].send(1) as sender:
            await sender.granted()
            faults.hold()
            await sender.chunk((0, 4), table(FIRST, (0, 4)))
            await sender.chunk((4, 8), table(FIRST, (4, 8)))
            waits = anyio.Event()

            async def offer() -> None:
                await sender.chunk((8, 12), table(FIRST, (8, 12)))
                waits.set()

            tasks.start_soon(offer)
            await until(lambda: ranks.prefill[0]._core.line)
            tasks.start_soon(sender.quiesce)
            await waits.wait()
            with pytest.raises(LocalProtocolError, match="being quiesced"):
                await sender.chunk((8, 12), table(FIRST, (8, 12)))
            assert not sender.is_quiesced
            faults.release()
            assert await sender.quiesce() == 4
            await go_on(sender, pool, 4)
            await receiver.done()
        check_arrived(ranks.targets[0])


async def test_a_chunk_that_is_admitted_while_it_asks_for_its_turn_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deploy() as ranks, receiving(ranks) as receiver:
        pool, rank = ranks.sources[0], ranks.prefill[0]
        compute(pool, FIRST)
        async with rank.send(1) as sender:
            await sender.granted()
            request = rank._request

            def admit_at_once(event: ev.PrefillEvent) -> None:
                request(event)
                if isinstance(event, ev.ChunkWaits):
                    sender._admit_call(event.call)

            monkeypatch.setattr(rank._line, "is_open", lambda _: False)
            monkeypatch.setattr(rank, "_request", admit_at_once)
            with anyio.fail_after(30):
                await go_on(sender, pool, 0)
            await receiver.done()
        assert not rank._line
        check_arrived(ranks.targets[0])


async def test_a_room_that_fails_meanwhile_raises_and_says_how_its_pages_are() -> None:
    async with deploy(timeouts=SOON_QUARANTINED) as ranks:
        ranks.faults[0].hold()
        sender = ranks.prefill[0].send(1)

        async def preempt() -> None:
            async with receiving(ranks), sender:
                await sender.granted()
                await sender.chunk((0, 4), table(FIRST, (0, 4)))
                await sender.quiesce()

        assert (await catch(preempt)).reason is FailureReason.STALLED
        assert sender.memory is kvflow.Memory.QUARANTINED
        with pytest.raises(TransferFailed):
            await sender.quiesce()
        ranks.faults[0].release()
        await until(lambda: sender.memory is kvflow.Memory.SAFE)


async def test_misuse_is_told() -> None:
    async with deploy() as ranks:
        sender = ranks.prefill[0].send(1)
        with pytest.raises(LocalProtocolError, match="enter the transfer"):
            await sender.quiesce()
        async with sender:
            await sender.chunk((0, 8), table(FIRST, (0, 8)))
            assert await sender.quiesce() == 0
            with pytest.raises(LocalProtocolError, match="chunk must not start after"):
                await sender.chunk((4, 8), table(FIRST, (4, 8)))
            await sender.chunk((0, 8), table(FIRST, (0, 8)))
            assert not sender.is_quiesced
            sender.abort()
            with pytest.raises(TransferFailed):
                await sender.quiesce()


async def test_another_process_reads_nothing_that_came_after() -> None:
    """Over NIXL, with posts in flight, the process overwrites the pages as soon as `quiesce` returns."""
    target = make_pool()
    whole = list(range(MANY_PAGES))
    async with (
        kvflow.Registry() as registry,
        prefill_process(registry.endpoint, 0) as prefill,
        kvflow.DecodeRank(decode_config(registry.endpoint, backend="nixl"), target.layout) as decode,
    ):
        for room in range(1, 6):
            for buffer in target.buffers:
                buffer[:] = 0
            await prefill.tell("preempt", room=room)
            async with decode.receive(
                room, prefill="prefill", tokens=(0, MANY_PAGES * PAGE_SIZE), pages={"kv": whole}
            ) as receiver:
                await receiver.done()
            assert (await prefill.expect("over", room))["failure"] is None
            await prefill.expect("quiesced", room)
            for buffer in target.buffers:
                assert (buffer.reshape(2, NUM_PAGES, -1)[:, :MANY_PAGES] == FILL).all()
        await prefill.tell("leave")


def wait_until_quiesced(rank: blocking.PrefillRank, sender: blocking.BlockingSender) -> None:
    while not sender.is_quiesced:
        assert [update.transfer for update in rank.wait_any(10)] == [sender]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scheduler_preempts(backend: str) -> None:
    source, target = make_pool(), make_pool()
    compute(source, FIRST)
    whole = (0, NUM_TOKENS)
    with registry_in_thread() as endpoint:
        config = prefill_config(endpoint, backend=backend, limits=SLOWLY)
        with (
            blocking.PrefillRank(config, source.layout) as prefill,
            blocking.DecodeRank(decode_config(endpoint, backend=backend), target.layout) as decode,
        ):
            receiver = decode.receive(1, prefill="prefill", tokens=whole, pages=table(TARGET, whole))
            sender = prefill.send(1)
            while sender.wanted is None:
                prefill.wait_any(10)
            sender.chunk((0, 16), table(FIRST, (0, 16)))
            sender.finish((16, 40), table(FIRST, (16, 40)), metadata=b"early")
            sender.quiesce()
            sender.quiesce()
            with pytest.raises(LocalProtocolError, match="being quiesced"):
                sender.chunk((40, 41), {})
            wait_until_quiesced(prefill, sender)
            start = sender.resume_at
            assert start is not None
            assert start < NUM_TOKENS
            overwrite(source, FIRST)
            compute(source, SECOND)
            sender.finish((start, 40), table(SECOND, (start, 40)), metadata=b"token")
            assert not sender.is_quiesced
            assert (receiver.wait(10), sender.wait(10)) == (blocking.Outcome.SUCCESS, blocking.Outcome.SUCCESS)
            assert receiver.result().metadata == b"token"
            prefill.completed()
            sender.quiesce()
            wait_until_quiesced(prefill, sender)
            check_arrived(target)
        with pytest.raises(LocalProtocolError, match="not open"):
            sender.quiesce()


def test_a_scheduler_hears_why_it_may_not_go_on() -> None:
    source = make_pool()
    with registry_in_thread() as endpoint, blocking.PrefillRank(prefill_config(endpoint), source.layout) as prefill:
        sender = prefill.send(1)
        sender.chunk((0, 8), table(FIRST, (0, 8)))
        sender.quiesce()
        wait_until_quiesced(prefill, sender)
        sender.chunk((4, 8), table(FIRST, (4, 8)))
        assert sender.wait(10) is blocking.Outcome.FAILED
        with pytest.raises(TransferFailed) as caught:
            sender.quiesce()
        assert "chunk must not start after" in str(caught.value.__cause__)
