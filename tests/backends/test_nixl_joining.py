"""Small posts to the same peer that queue for the owner thread are joined into one native write."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from kvflow.backends.base import NoticeArrived, PostEnded
from kvflow.backends.metadata import PeerMetadata
from kvflow.backends.nixl.backend import FORMAT
from kvflow.backends.nixl.posts import MAX_JOINED, MAX_JOINED_BYTES, MAX_SMALL_BYTES
from kvflow.errors import BackendError
from kvflow.geometry import BlockLists, Blocks
from tests.backends.endpoints import Endpoint, copies, open_endpoints, same

pytestmark = pytest.mark.anyio

STUCK = 5.0
"""Seconds after which a test counts as hung."""

SLOT = 512
NUM_SLOTS = 40


class NativeError(Exception):
    """An error of NIXL that leaves the endpoint usable."""


@pytest.fixture
def native_writes(monkeypatch: pytest.MonkeyPatch, api: Any) -> list[tuple[str, int]]:
    """Record each native write from now on: its peer, or "blocks" if it uses block lists, and its number of entries."""
    made: list[tuple[str, int]] = []
    make = api.nixl_agent.initialize_xfer
    make_prepped = api.nixl_agent.make_prepped_xfer

    def record_prepped(agent: Any, operation: str, *sides: Any) -> Any:
        made.append(("blocks", len(sides[1])))
        return make_prepped(agent, operation, *sides)

    def record(agent: Any, operation: str, src: Any, dst: Any, peer: str, payload: bytes) -> Any:
        made.append((peer, src.descCount()))
        return make(agent, operation, src, dst, peer, payload)

    monkeypatch.setattr(api.nixl_agent, "initialize_xfer", record)
    monkeypatch.setattr(api.nixl_agent, "make_prepped_xfer", record_prepped)
    return made


@contextmanager
def held_up(source: Endpoint) -> Iterator[None]:
    """Keep the owner thread busy, so that posts queue."""
    goes_on = threading.Event()
    backend: Any = source.backend
    backend._owner.submit(lambda: goes_on.wait(STUCK))
    try:
        yield
    finally:
        goes_on.set()


def post_slots(source: Endpoint, target: Endpoint, slots: Sequence[int]) -> None:
    """Post one write for each slot, with a notice that names it; the slot is the post's id."""
    for slot in slots:
        source.post(slot, target, copies(source, target, (slot * SLOT,), SLOT), b"%d" % slot)


def ended_well(source: Endpoint) -> list[int]:
    """Return the posts that have succeeded; native writes end in any order."""
    return sorted(end.post_id for end in source.ends() if end.error is None)


async def take_slots(source: Endpoint, target: Endpoint, count: int) -> list[int]:
    """Take `count` notices, in any order, and check that the bytes of each have landed."""
    taken: list[int] = []
    while len(taken) < count:
        for event in await target.take_events():
            assert isinstance(event, NoticeArrived)
            start = int(event.payload) * SLOT
            assert same(source, target, start, start + SLOT)
            taken.append(int(event.payload))
    return sorted(taken)


async def test_posts_that_wait_go_as_one_and_every_notice_comes_once(native_writes: list[tuple[str, int]]) -> None:
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        with held_up(source):
            post_slots(source, target, range(MAX_JOINED))
        assert await take_slots(source, target, MAX_JOINED) == list(range(MAX_JOINED))
        await source.take_ends(MAX_JOINED)
        assert native_writes == [(target.name, MAX_JOINED)]
        assert ended_well(source) == list(range(MAX_JOINED))
        await source.close()
        await target.close()
        source.check_ends()
        assert len(target.notices()) == MAX_JOINED


async def test_no_more_than_so_many_posts_are_joined(native_writes: list[tuple[str, int]]) -> None:
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        with held_up(source):
            post_slots(source, target, range(2 * MAX_JOINED + 1))
        assert await take_slots(source, target, 2 * MAX_JOINED + 1) == list(range(2 * MAX_JOINED + 1))
        assert [count for _, count in native_writes] == [MAX_JOINED, MAX_JOINED, 1]


async def test_posts_to_different_peers_are_not_joined(native_writes: list[tuple[str, int]]) -> None:
    async with open_endpoints("nixl", NUM_SLOTS * SLOT, count=3) as (source, one, other):
        with held_up(source):
            for slot in range(0, 8, 2):
                post_slots(source, one, [slot])
                post_slots(source, other, [slot + 1])
        assert await take_slots(source, one, 4) == [0, 2, 4, 6]
        assert await take_slots(source, other, 4) == [1, 3, 5, 7]
        assert native_writes == [(one.name, 4), (other.name, 4)]


def slots_as_blocks(source: Endpoint, target: Endpoint) -> BlockLists:
    rows = [[(side.address, SLOT, side.buffer.device_id, SLOT, NUM_SLOTS)] for side in (source, target)]
    return BlockLists(*(np.array(of_side, np.uint64) for of_side in rows))


def post_blocks(source: Endpoint, target: Endpoint, lists: BlockLists, slots: Sequence[int]) -> None:
    """Post like `post_slots`, but by block positions."""
    for slot in slots:
        position = np.array([slot], np.int32)
        source.post(slot, target, Blocks(lists, position, position, SLOT), b"%d" % slot)


async def test_blocks_are_joined_with_blocks_of_the_same_lists(native_writes: list[tuple[str, int]]) -> None:
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        lists, others = slots_as_blocks(source, target), slots_as_blocks(source, target)
        with held_up(source):
            post_blocks(source, target, lists, [0, 7, 2])
            post_slots(source, target, [3, 4])
            post_blocks(source, target, lists, [5])
            post_blocks(source, target, others, [6, 1])
        assert await take_slots(source, target, 8) == list(range(8))
        assert native_writes == [("blocks", 3), (target.name, 2), ("blocks", 1), ("blocks", 2)]


async def test_a_large_post_goes_alone_and_keeps_its_place(native_writes: list[tuple[str, int]]) -> None:
    async with open_endpoints("nixl", MAX_SMALL_BYTES + 1) as (source, target):
        with held_up(source):
            post_slots(source, target, [0, 1])
            source.post(2, target, copies(source, target, (0,), MAX_SMALL_BYTES + 1), b"2")
            post_slots(source, target, [3, 4])
        await target.take_notices(5)
        await source.take_ends(5)
        assert [count for _, count in native_writes] == [2, 1, 2]
        assert sorted(target.notices()) == [b"%d" % number for number in range(5)]


async def test_joined_posts_do_not_make_a_large_one(native_writes: list[tuple[str, int]]) -> None:
    fit = MAX_JOINED_BYTES // MAX_SMALL_BYTES
    async with open_endpoints("nixl", MAX_SMALL_BYTES) as (source, target):
        with held_up(source):
            for post_id in range(fit + 1):
                source.post(post_id, target, copies(source, target, (0,), MAX_SMALL_BYTES))
        await source.take_ends(fit + 1)
        assert [count for _, count in native_writes] == [fit, 1]


async def test_long_notices_and_none_travel_together(native_writes: list[tuple[str, int]]) -> None:
    notices = [bytes([number]) * 131_072 if number % 2 else b"" for number in range(MAX_JOINED)]
    async with open_endpoints("nixl") as (source, target):
        with held_up(source):
            for post_id, notice in enumerate(notices):
                source.post(post_id, target, copies(source, target), notice)
        await source.take_ends(MAX_JOINED)
        await target.take_notices(MAX_JOINED // 2)
        assert len(native_writes) == 1
        assert target.notices() == [notice for notice in notices if notice]


async def test_an_owner_thread_that_is_idle_waits_for_nothing(native_writes: list[tuple[str, int]]) -> None:
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        for slot in range(3):
            post_slots(source, target, [slot])
            await source.take_ends(slot + 1)
        assert native_writes == [(target.name, 1)] * 3


@pytest.mark.parametrize("method", ["get_xfer_descs", "initialize_xfer"])
async def test_joined_posts_that_cannot_begin_have_ended(
    monkeypatch: pytest.MonkeyPatch, api: Any, method: str
) -> None:
    def refuse(*_: object) -> None:
        raise NativeError

    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        with monkeypatch.context() as patch:
            patch.setattr(api.nixl_agent, method, refuse)
            with held_up(source):
                post_slots(source, target, range(3))
            await source.take_ends(3)
        assert source.events == [PostEnded(slot, "NativeError: ") for slot in range(3)]


async def test_joined_posts_are_in_doubt_together_until_a_later_one_is_done(
    monkeypatch: pytest.MonkeyPatch, api: Any
) -> None:
    def fail(*_: object) -> None:
        raise NativeError

    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        with monkeypatch.context() as patch:
            patch.setattr(api.nixl_agent, "transfer", fail)
            with held_up(source):
                post_slots(source, target, range(3))
            await source.take_until(lambda: len(source.doubts()) == 3)
        assert [doubt.post_id for doubt in source.doubts()] == [0, 1, 2]
        assert not source.ends()
        with held_up(source):
            post_slots(source, target, (3, 4))
        await source.take_ends(5)
        assert {end.post_id: (end.error is None, end.lingers) for end in source.ends()} == {
            **dict.fromkeys(range(3), (False, False)),
            **dict.fromkeys((3, 4), (True, False)),
        }
        await source.close()
        source.check_ends()


async def test_joined_posts_end_together_when_the_endpoint_fails(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    def fail(*_: object) -> None:
        raise api.nixlBind.nixlRemoteDisconnectError

    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        monkeypatch.setattr(api.nixl_agent, "transfer", fail)
        with held_up(source):
            post_slots(source, target, range(3))
        await source.take_ends(3)
        assert [(end.post_id, end.lingers) for end in source.ends()] == [(slot, True) for slot in range(3)]
        with held_up(source):
            post_slots(source, target, (3, 4))
        await source.take_ends(5)
        assert [(end.post_id, end.lingers) for end in source.ends()[3:]] == [(3, False), (4, False)]
        assert not source.doubts()


async def test_closing_carries_out_what_waits() -> None:
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        async with anyio.create_task_group() as tasks:
            with held_up(source):
                post_slots(source, target, range(NUM_SLOTS))
                tasks.start_soon(source.close)
                await anyio.wait_all_tasks_blocked()
        assert ended_well(source) == list(range(NUM_SLOTS))
        source.check_ends()
        assert same(source, target)


async def test_closing_ends_joined_posts_that_do_not_end_by_themselves(
    monkeypatch: pytest.MonkeyPatch, api: Any
) -> None:
    monkeypatch.setattr(api.nixl_agent, "transfer", lambda *_: "PROC")
    monkeypatch.setattr(api.nixl_agent, "check_xfer_state", lambda *_: "PROC")
    options = {"close_timeout_s": 0.02}
    async with open_endpoints("nixl", NUM_SLOTS * SLOT, options=options) as (source, target):
        with held_up(source):
            post_slots(source, target, range(NUM_SLOTS))
        await source.close()
        source.check_ends()
        assert {end.lingers for end in source.ends()} == {True}


@pytest.mark.parametrize("is_stuck", [True, False], ids=["stuck", "done"])
async def test_the_agent_is_gone_before_what_it_stopped_is_told(
    monkeypatch: pytest.MonkeyPatch, api: Any, is_stuck: bool
) -> None:
    """Only destroying the agent stops a write for certain, so no leftover of a post or peer may keep it alive."""
    async with open_endpoints("nixl", NUM_SLOTS * SLOT, options={"close_timeout_s": 0.02}) as (source, target):
        if is_stuck:
            monkeypatch.setattr(api.nixl_agent, "transfer", lambda *_: "PROC")
            monkeypatch.setattr(api.nixl_agent, "check_xfer_state", lambda *_: "PROC")
        post_blocks(source, target, slots_as_blocks(source, target), [0, 1])
        if not is_stuck:
            await source.take_ends(2)
        agent: Any = source.backend
        agent = agent._agent
        native, told = weakref.ref(next(iter(agent._agents))), []
        monkeypatch.setattr(agent, "_emit", lambda events: told.append((len(events), native() is None)))
        await source.backend.aclose()
        assert told == [(2 if is_stuck else 0, True)]


async def test_what_waits_when_the_agent_breaks_ends_all_the_same(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    def fail(*_: object) -> None:
        raise NativeError

    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        monkeypatch.setattr(api.nixl_agent, "get_new_notifs", fail)
        with held_up(source):
            post_slots(source, target, range(NUM_SLOTS))
            source.backend.watch(active=True)
        with pytest.raises(BackendError, match="transport library has failed"):
            await source.take_until(lambda: False)
        await source.close()
        source.check_ends()


async def test_what_waits_for_a_peer_is_posted_before_it_is_disconnected() -> None:
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        async with anyio.create_task_group() as tasks:
            with held_up(source):
                post_slots(source, target, range(4))
                await source.backend.disconnect(target.name)
                tasks.start_soon(source.connect, target)
                await anyio.wait_all_tasks_blocked()
        post_slots(source, target, range(4, 6))
        assert await take_slots(source, target, 6) == list(range(6))
        await source.take_ends(6)
        assert ended_well(source) == list(range(6))


async def test_a_peer_with_payloads_of_another_kind_is_refused() -> None:
    async with open_endpoints("nixl") as (source, target):
        theirs = PeerMetadata.unpack(target.backend.metadata(), backend=FORMAT)
        former = PeerMetadata("nixl", theirs.agent, theirs.memory)
        await source.backend.disconnect(target.name)
        with pytest.raises(BackendError, match="a different transport"):
            await source.backend.connect(target.name, former.pack())


@pytest.mark.parametrize("payload", [b"raw", b"\2\0\0\0ab\0\0\0\0", b"\xff" * 100_000], ids=["raw", "empty", "cut"])
async def test_a_malformed_payload_is_handed_on_whole_and_loses_no_other(payload: bytes) -> None:
    """The reader of notices refuses and counts it."""
    async with open_endpoints("nixl", NUM_SLOTS * SLOT) as (source, target):
        backend: Any = source.backend
        post_slots(source, target, [0])
        backend._owner.submit(lambda: next(iter(backend._agent._agents)).send_notif(target.name, payload))
        with held_up(source):
            post_slots(source, target, [1, 2])
        await target.take_notices(4)
        assert sorted(target.notices()) == sorted([b"0", payload, b"1", b"2"])
