"""What a rank accepts from its engine fits the limits of the other side, or is refused here, by name."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvflow
from kvflow import receiver as receiving
from kvflow.bounds import Bounds
from kvflow.config import Limits, Timeouts
from kvflow.errors import FailureReason
from kvflow.geometry.layout import MAX_REGIONS, Component, KVLayout, Region
from kvflow.state.decode.room import PAGES_INLINE_IN_ALL, Room
from kvflow.state.effects import DecodeEffect
from kvflow.state.events import MessageArrived
from kvflow.wire.messages import PAGE_BYTES, PAGES_INLINE, PAGES_PER_PART, Goodbye, PagesQuery, PeerId
from tests.support.instances import PATIENT, anomalies_of, decode_config, prefill_config

pytestmark = pytest.mark.anyio

Bytes = NDArray[np.uint8]
Pages = NDArray[np.int64]

UNHURRIED = replace(PATIENT, handshake_s=120.0, transfer_s=600.0, grant_s=600.0)
"""For rooms that wait for hundreds of others. To open them keeps the event loop busy for many seconds, first contact
included."""

STEP = 7_919
"""Between the pages of neighbouring tokens; a prime that divides no size of a pool."""


def layout_of(memory: Bytes) -> KVLayout:
    """Return a pool with one byte for each page, and one token in each page."""
    size = len(memory)
    region = Region("k", 0, memory.ctypes.data, size, 1, 1, 1, (0, 1), 1, 1, "uint8")
    layout = KVLayout((Component("kv", (region,)),), "bytes")
    layout.keep([memory])
    return layout


@dataclass
class Pair:
    """A prefill and a decode rank, whose pools have one token in each page."""

    prefill: kvflow.PrefillRank
    decode: kvflow.DecodeRank
    source: Bytes
    target: Bytes

    async def hand_over(self, room: int, num_pages: int, offset: int = 0) -> None:
        """Move tokens between scattered pages, those of the target after an offset, and compare them."""
        scattered = np.arange(num_pages) * STEP
        await self.move(room, (scattered + offset) % len(self.source), offset + scattered % num_pages)

    async def move(self, room: int, sent: Pages, received: Pages) -> None:
        """Move tokens between some pages, and compare them."""
        tokens = (0, len(sent))

        async def send() -> None:
            async with self.prefill.send(room) as sender:
                await sender.finish(tokens, {"kv": sent})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            endpoint = self.prefill.endpoint
            async with self.decode.receive(room, prefill=endpoint, tokens=tokens, pages={"kv": received}) as receiver:
                await receiver.done()
        np.testing.assert_array_equal(self.target[received], self.source[sent])

    def anomalies(self) -> list[dict[str, int]]:
        return [anomalies_of(rank.statistics()) for rank in (self.prefill, self.decode)]


@asynccontextmanager
async def pair(
    num_pages: int, *, backend: str = "memory", limits: Limits | None = None, timeouts: Timeouts = PATIENT
) -> AsyncIterator[Pair]:
    limits = limits or Limits()
    source = np.random.default_rng(2).integers(0, 255, num_pages, np.uint8)
    target = np.zeros(num_pages, np.uint8)
    config = prefill_config(None, backend=backend, limits=limits, timeouts=timeouts)
    async with (
        kvflow.PrefillRank(config, layout_of(source)) as prefill,
        kvflow.DecodeRank(decode_config(None, backend=backend, timeouts=timeouts), layout_of(target)) as decode,
    ):
        yield Pair(prefill, decode, source, target)


async def test_page_tables_in_many_parts() -> None:
    num_pages = 12 * PAGES_PER_PART + 1
    async with pair(num_pages, backend="nixl") as both:
        await both.hand_over(1, num_pages)
        assert both.anomalies() == [{}, {}]


@contextmanager
def busy_thread() -> Iterator[None]:
    """Compute in Python in a thread of this process, as an engine may."""
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_rooms", "size"), [(1, 6_291_456), (200, 131_072)])
async def test_page_tables_of_full_size_get_through_beside_a_busy_thread(num_rooms: int, size: int) -> None:
    """One token in each page, in random order; nothing is rejected, and no connection is cut."""
    rng = np.random.default_rng(3)
    tables = [np.split(rng.permutation(num_rooms * size), num_rooms) for _ in range(2)]
    async with pair(num_rooms * size, timeouts=UNHURRIED) as both:
        with busy_thread():
            async with anyio.create_task_group() as tasks:
                for room, (sent, received) in enumerate(zip(*tables, strict=True)):
                    tasks.start_soon(both.move, room, sent, received)
        assert both.anomalies() == [{}, {}]
        assert [rank.statistics().peers for rank in (both.prefill, both.decode)] == [1, 1]


@pytest.mark.parametrize("limits", [Limits(pending_grant_bytes=24 * PAGES_PER_PART), Bounds(pending_grants=16)])
async def test_a_burst_of_large_grants_is_slowed_down_and_not_refused(limits: Limits) -> None:
    size, num_rooms = PAGES_PER_PART + 1, 24
    async with pair(size * num_rooms, limits=limits) as both:
        async with anyio.create_task_group() as tasks:
            for room in range(num_rooms):
                tasks.start_soon(both.hand_over, room, size, room * size)
        assert both.anomalies() == [{}, {}]


async def test_more_pages_than_prefill_accepts_are_refused_here_by_the_name_of_the_limit() -> None:
    async with pair(201, limits=Limits(pending_grant_bytes=1_600)) as both:
        await both.hand_over(1, 200)
        with pytest.raises(kvflow.TransferFailed) as caught:
            await _receive(both, 2, 201)
        error = caught.value
        assert error.reason is FailureReason.CAPACITY
        assert error.detected_by == "decode/0"
        assert "201" in error.detail
        assert "limits.pending_grant_bytes of prefill/0 permits 200" in error.detail
        assert both.anomalies() == [{}, {}]


async def _receive(both: Pair, room: int, num_pages: int) -> None:
    pages = {"kv": np.arange(num_pages)}
    async with both.decode.receive(room, prefill=both.prefill.endpoint, tokens=(0, num_pages), pages=pages) as receiver:
        await receiver.done()


@pytest.fixture
def never_sent(monkeypatch: pytest.MonkeyPatch) -> anyio.Event:
    """Have decode ranks keep their pages for themselves; the event is set once they were asked for."""
    asked = anyio.Event()

    def keep(_room: Room, _peer: PeerId, _query: PagesQuery) -> list[DecodeEffect]:
        asked.set()
        return []

    monkeypatch.setattr(Room, "send_pages", keep)
    return asked


async def test_prefill_learns_that_a_request_is_cancelled_while_its_pages_arrive(never_sent: anyio.Event) -> None:
    num_pages = PAGES_INLINE + 1
    receiving = anyio.CancelScope()
    async with pair(num_pages) as both, anyio.create_task_group() as tasks:

        async def receive() -> None:
            with receiving:
                await _receive(both, 1, num_pages)

        async def send() -> None:
            async with both.prefill.send(1) as sender:
                await never_sent.wait()
                receiving.cancel()
                await sender.finish((0, num_pages), {"kv": np.arange(num_pages)})

        tasks.start_soon(receive)
        with pytest.raises(kvflow.TransferFailed) as caught:
            await send()
        assert (caught.value.reason, caught.value.detected_by) == (FailureReason.ABORTED, "decode/0")


async def test_a_decode_rank_that_is_lost_while_its_pages_arrive_leaves_their_place_to_others(
    never_sent: anyio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_pages = PAGES_INLINE + 1
    async with (
        pair(num_pages, limits=Limits(pending_grant_bytes=2 * PAGE_BYTES * num_pages)) as both,
        anyio.create_task_group() as tasks,
    ):

        async def receive() -> None:
            with suppress(kvflow.KvflowError):
                await _receive(both, 1, num_pages)

        tasks.start_soon(receive)
        await never_sent.wait()
        monkeypatch.undo()
        (connection,) = both.prefill._core.peers.connections()
        both.prefill._dispatch(MessageArrived(connection, Goodbye(peer=both.decode.me)))
        target = np.zeros(num_pages, np.uint8)
        async with kvflow.DecodeRank(decode_config(None, timeouts=PATIENT), layout_of(target)) as other:
            await Pair(both.prefill, other, both.source, target).hand_over(2, num_pages)
        tasks.cancel_scope.cancel()


def around(limit: int) -> st.SearchStrategy[int]:
    return st.integers(limit - 1, limit + 1)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(around(PAGES_INLINE) | around(PAGES_PER_PART) | around(2 * PAGES_PER_PART), min_size=1, max_size=4))
def test_requests_at_every_limit_of_the_wire_get_through(sizes: Sequence[int]) -> None:
    async def run() -> None:
        async with pair(sum(sizes)) as both:
            offsets = np.cumsum([0, *sizes])
            async with anyio.create_task_group() as tasks:
                for room, size in enumerate(sizes):
                    tasks.start_soon(both.hand_over, room, size, int(offsets[room]))
            assert both.anomalies() == [{}, {}]

    anyio.run(run)


async def test_many_small_grants_at_once() -> None:
    """Those beyond what may be sent at once come without their pages."""
    size, num_rooms = 2_048, 2 * PAGES_INLINE_IN_ALL // 2_048
    async with pair(size * num_rooms) as both:
        async with anyio.create_task_group() as tasks:
            for room in range(num_rooms):
                tasks.start_soon(both.hand_over, room, size, room * size)
        assert both.anomalies() == [{}, {}]


async def test_as_many_separate_allocations_as_regions_are_possible() -> None:
    """The staging memory of a rank is one more."""
    memory = np.zeros((2, MAX_REGIONS, 2, 64), np.uint8)
    memory[0, :, 0] = 7

    def layout(side: int) -> KVLayout:
        regions = [
            Region("k", layer, memory[side, layer, 0].ctypes.data, 1, 64, 1, 64, (0, 1), 64, 64, "uint8")
            for layer in range(MAX_REGIONS)
        ]
        return KVLayout((Component("kv", tuple(regions)),), "many")

    async with (
        kvflow.PrefillRank(prefill_config(None, backend="nixl", timeouts=PATIENT), layout(0)) as prefill,
        kvflow.DecodeRank(decode_config(None, backend="nixl", timeouts=PATIENT), layout(1)) as decode,
        anyio.create_task_group() as tasks,
    ):

        async def send() -> None:
            async with prefill.send(1) as sender:
                await sender.finish((0, 1), {"kv": [0]})

        tasks.start_soon(send)
        async with decode.receive(1, prefill=prefill.endpoint, tokens=(0, 1), pages={"kv": [0]}) as receiver:
            await receiver.done()
    assert (memory[1, :, 0] == 7).all()


async def test_other_tasks_run_between_checking_many_pages_and_holding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MANY_PAGES", 1)
    had_turn = anyio.Event()
    async with pair(2) as both:
        receiver = both.decode.receive(1, prefill=both.prefill.endpoint, tokens=(0, 2), pages={"kv": [0, 1]})
        asyncio.get_running_loop().call_soon(had_turn.set)
        with suppress(kvflow.TransferFailed):
            async with receiver:
                assert had_turn.is_set()
                receiver.abort()
