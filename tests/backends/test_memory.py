"""The in-process transport, and the faults that tests inject into it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from kvflow.backends.base import PostEnded, PostInDoubt
from kvflow.backends.memory import BYTES_PER_TURN, MemoryBackend
from tests.backends.endpoints import Endpoint, copies, open_backend, open_endpoints, same
from tests.support.faulty_memory import FaultScript, FaultyMemoryBackend

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def open_faulty(faults: FaultScript) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """Open two endpoints, of which the first writes with faults to the other."""
    faulty = FaultyMemoryBackend(faults=faults)
    async with open_backend(faulty) as source, open_backend(MemoryBackend(), seed=1) as target:
        await source.connect(target)
        yield source, target


async def test_faults_hit_the_posts_that_they_are_planned_for() -> None:
    faults = FaultScript(["fail", None, "lose_notice", "doubt"])
    async with open_faulty(faults) as (source, target):
        for post_id in range(5):
            source.post(post_id, target, copies(source, target, (post_id * 64,)), b"%d" % post_id)
        await source.take_until(lambda: len(source.events) == 5)
        await target.take_notices(2)
        assert [(end.post_id, end.error) for end in source.ends() if end.error] == [(0, "scripted failure")]
        assert [end.post_id for end in source.ends() if end.error is None] == [1, 2, 4]
        assert [doubt.post_id for doubt in source.doubts()] == [3]
        assert target.notices() == [b"1", b"4"]
        assert not same(source, target, 0, 64)
        assert same(source, target, 64, 5 * 64)
        assert faults.posted == [(target.name, 64)] * 5
        assert not faults.plan


async def test_a_corrupted_post_succeeds_with_its_first_byte_changed() -> None:
    async with open_faulty(FaultScript(["corrupt"])) as (source, target):
        source.post(1, target, copies(source, target, (128, 0), 64), b"fine")
        await source.take_ends()
        assert [end.error for end in source.ends()] == [None]
        assert target.memory[128] == source.memory[128] ^ 0xFF
        assert same(source, target, 129, 192)
        assert same(source, target, 0, 64)


async def test_a_post_in_doubt_ends_when_its_endpoint_closes() -> None:
    async with open_faulty(FaultScript(["doubt"])) as (source, target):
        source.post(3, target, copies(source, target), b"never")
        await source.take_until(source.doubts)
        assert not source.ends()
        await source.close()
        assert source.events == [PostInDoubt(3, "scripted doubt"), PostEnded(3, "stopped by closing the endpoint")]
        await target.close()
        assert not target.notices()


async def test_held_posts_move_when_they_are_released() -> None:
    faults = FaultScript()
    async with open_faulty(faults) as (source, target):
        before = target.memory.copy()
        faults.hold()
        source.post(1, target, copies(source, target), b"late")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.take_ends)
            await anyio.wait_all_tasks_blocked()
            assert np.array_equal(target.memory, before)
            faults.release()
        await target.take_notices()
        assert same(source, target, 0, 64)


async def test_held_posts_can_be_released_by_another_thread() -> None:
    faults = FaultScript()
    async with open_faulty(faults) as (source, target):
        for post_id in range(50):
            faults.hold()
            source.post(post_id, target, copies(source, target))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source.take_ends, post_id + 1)
                tasks.start_soon(anyio.to_thread.run_sync, faults.release)


async def test_closing_stops_held_posts() -> None:
    faults = FaultScript()
    async with open_faulty(faults) as (source, target):
        before = target.memory.copy()
        faults.hold()
        for post_id in range(3):
            source.post(post_id, target, copies(source, target))
        await source.close()
        faults.release()
        assert [(end.post_id, end.error is None) for end in source.ends()] == [(0, False), (1, False), (2, False)]
        assert np.array_equal(target.memory, before)


async def test_a_post_to_a_peer_that_has_left_fails() -> None:
    async with open_endpoints("memory") as (source, target):
        await target.close()
        source.post(1, target, copies(source, target))
        await source.take_ends()
        assert source.ends() == [PostEnded(1, "peer has left")]


async def test_a_large_write_gives_the_loop_turns() -> None:
    """Other tasks run at least once per copied part, and see the write half done."""
    parts = 4
    async with open_endpoints("memory", parts * BYTES_PER_TURN) as (source, target):
        offsets = range(0, parts * BYTES_PER_TURN, BYTES_PER_TURN)
        source.post(1, target, copies(source, target, offsets, BYTES_PER_TURN))
        seen = set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.take_ends)
            while not source.ends():
                seen.add(sum(same(source, target, start, start + 64) for start in offsets))
                await anyio.lowlevel.checkpoint()
        assert seen >= set(range(1, parts))


async def test_small_writes_pass_a_large_one() -> None:
    async with open_endpoints("memory", 4 * BYTES_PER_TURN) as (source, target):
        large = copies(source, target, range(0, 4 * BYTES_PER_TURN, BYTES_PER_TURN), BYTES_PER_TURN)
        source.post(1, target, large)
        source.post(2, target, copies(source, target))
        await source.take_ends(2)
        assert [end.post_id for end in source.ends()] == [2, 1]


class Echo(threading.Thread):
    """An endpoint on an event loop in a thread of its own that answers each notice by writing its slot back."""

    def __init__(self, peer: Endpoint, num_posts: int) -> None:
        super().__init__(name="echo")
        self.peer = peer
        self.num_posts = num_posts
        self.opened: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self.loop = asyncio.get_running_loop()

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        async with open_backend(MemoryBackend(), len(self.peer.memory), seed=5) as endpoint:
            await endpoint.connect(self.peer)
            self.loop.call_soon_threadsafe(self.opened.set_result, endpoint)
            num_answered = 0
            while num_answered < self.num_posts or len(endpoint.ends()) < self.num_posts:
                await endpoint.take_events()
                for notice in endpoint.notices()[num_answered:]:
                    self.answer(endpoint, int(notice))
                    num_answered += 1

    def answer(self, endpoint: Endpoint, post_id: int) -> None:
        slot = copies(endpoint, self.peer, (post_id * 64,), to=(post_id * 64 + 32 * 1024,))
        endpoint.post(post_id, self.peer, slot, b"%d" % post_id)


async def test_endpoints_on_two_loops_in_two_threads() -> None:
    num_posts = 200
    async with open_backend(MemoryBackend(), 64 * 1024) as here:
        echo = Echo(here, num_posts)
        echo.start()
        there = await echo.opened
        await here.connect(there)
        for post_id in range(num_posts):
            here.post(post_id, there, copies(here, there, (post_id * 64,)), b"%d" % post_id)
        await here.take_until(lambda: len(here.ends()) == len(here.notices()) == num_posts)
        await anyio.to_thread.run_sync(echo.join)
        half = 32 * 1024
        assert np.array_equal(here.memory[: num_posts * 64], here.memory[half : half + num_posts * 64])
        assert sorted(int(notice) for notice in here.notices()) == list(range(num_posts))
        assert {end.error for end in here.ends() + there.ends()} == {None}
