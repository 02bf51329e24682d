"""What every transport has to do with writes, notices, peers and its end."""

import functools

import anyio
import numpy as np
import pytest

from kvflow.backends import create_backend
from kvflow.backends.base import Backend, NoticeArrived
from kvflow.errors import BackendError
from kvflow.geometry.layout import MemoryRange
from tests.backends.endpoints import BACKENDS, Endpoint, copies, fresh_name, open_backend, open_endpoints, same

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("backend", BACKENDS)]

SLOT = 64 * 1024
NUM_SLOTS = 48

IMPATIENT: dict[str, dict[str, object]] = {
    "memory": {},
    "nixl": {"close_timeout_s": 0.2},
    "mooncake": {"close_timeout_s": 0.2},
}
"""Options with which closing does not wait long for posts that do not end."""


@pytest.mark.parametrize(
    ("count", "length"),
    [(1, 1), (1, 4096), (1, 16 * 2**20), (100, 1), (100, 777), (5000, 16)],
    ids=str,
)
async def test_every_byte_arrives_and_no_other_changes(backend: str, count: int, length: int) -> None:
    step = length + 3  # leaves gaps between the pieces
    async with open_endpoints(backend, count * step + 5) as (source, target):
        rng = np.random.default_rng(count)
        offsets, to = (1 + step * rng.permutation(count) for _ in range(2))
        expected = target.memory.copy()
        for start, place in zip(offsets.tolist(), to.tolist(), strict=True):
            expected[place : place + length] = source.memory[start : start + length]
        source.post(7, target, copies(source, target, offsets.tolist(), length, to=to.tolist()), b"done")
        await source.take_ends()
        await target.take_notices()
        assert np.array_equal(target.memory, expected)
        await source.close()
        await target.close()
        assert [(end.post_id, end.error) for end in source.ends()] == [(7, None)]
        assert target.notices() == [b"done"]


async def receive_and_check(target: Endpoint, source: Endpoint) -> None:
    """Take notices, each with the number of a slot that must already be filled."""
    target.backend.watch(active=True)
    while len(target.notices()) < NUM_SLOTS or len(target.ends()) < NUM_SLOTS:
        taken = await target.take()
        for event in taken:
            if isinstance(event, NoticeArrived):
                start = int(event.payload) * SLOT
                assert same(source, target, start, start + SLOT)
        target.events += taken


async def test_notices_come_once_each_and_after_their_bytes_in_both_directions_at_once(backend: str) -> None:
    """Even slots are written one way and odd ones the other, all posted before anything is taken."""
    async with open_endpoints(backend, 2 * NUM_SLOTS * SLOT) as endpoints:
        pairs = [(endpoints[0], endpoints[1]), (endpoints[1], endpoints[0])]
        for parity, (source, target) in enumerate(pairs):
            for slot in range(parity, 2 * NUM_SLOTS, 2):
                offsets = range(slot * SLOT, (slot + 1) * SLOT, SLOT // 4)
                source.post(slot, target, copies(source, target, offsets, SLOT // 4), b"%d" % slot)
        async with anyio.create_task_group() as tasks:
            for source, target in pairs:
                tasks.start_soon(receive_and_check, target, source)
        assert same(endpoints[0], endpoints[1])
        for parity, (source, target) in enumerate(pairs):
            await source.close()
            slots = range(parity, 2 * NUM_SLOTS, 2)
            assert sorted((end.post_id, end.error) for end in source.ends()) == [(slot, None) for slot in slots]
            await target.close()
            assert sorted(int(notice) for notice in target.notices()) == list(slots)


async def test_a_write_without_notice_brings_none(backend: str) -> None:
    async with open_endpoints(backend) as (source, target):
        source.post(1, target, copies(source, target))
        source.post(2, target, copies(source, target), b"\0 second \0")
        await source.take_ends(2)
        await target.take_notices()
        await target.close()
        assert target.notices() == [b"\0 second \0"]


async def test_one_endpoint_writes_to_many_and_many_write_to_one(backend: str) -> None:
    async with open_endpoints(backend, count=4) as (hub, *others):
        for number, other in enumerate(others):
            hub.post(number, other, copies(hub, other, (0,)), b"from the hub")
            other.post(number, hub, copies(other, hub, (1024 * (number + 1),)), b"to the hub %d" % number)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.take_until, lambda: len(hub.ends()) == len(hub.notices()) == len(others))
            for other in others:
                tasks.start_soon(other.take_until, functools.partial(has_both, other))
        for number, other in enumerate(others):
            assert same(hub, other, 0, 64)
            assert same(hub, other, 1024 * (number + 1), 1024 * (number + 1) + 64)
        assert sorted(hub.notices()) == [b"to the hub 0", b"to the hub 1", b"to the hub 2"]


def has_both(endpoint: Endpoint) -> bool:
    return bool(endpoint.ends() and endpoint.notices())


async def write(source: Endpoint, target: Endpoint, post_id: int) -> None:
    """Write other bytes than last time, and check that they arrived."""
    source.memory[:64] = post_id
    source.post(post_id, target, copies(source, target))
    await source.take_until(lambda: any(end.post_id == post_id for end in source.ends()))
    assert source.ends()[-1].error is None
    assert (target.memory[:64] == post_id).all()


async def test_connecting_twice_changes_nothing(backend: str) -> None:
    async with open_endpoints(backend) as (source, target):
        await source.connect(target)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.connect, target)
            tasks.start_soon(source.connect, target)
        await write(source, target, 1)


async def test_connecting_to_a_connected_peer_does_not_even_read_the_metadata(backend: str) -> None:
    async with open_endpoints(backend) as (source, target):
        await source.backend.connect(target.name, b"damaged")
        await write(source, target, 1)


async def test_a_peer_can_be_disconnected_and_connected_again(backend: str) -> None:
    async with open_endpoints(backend) as (source, target):
        for post_id in range(3):
            await write(source, target, post_id)
            await source.backend.disconnect(target.name)
            await source.backend.disconnect(target.name)
            with pytest.raises(BackendError):
                source.post(100, target, copies(source, target))
            await source.connect(target)
        await write(source, target, 9)


async def test_disconnecting_an_unknown_peer_is_ignored(backend: str) -> None:
    async with open_endpoints(backend) as (source, target):
        await source.backend.disconnect("nobody")
        await write(source, target, 1)


async def test_disconnecting_lets_posts_end(backend: str) -> None:
    async with open_endpoints(backend, 8 * SLOT) as (source, target):
        for post_id in range(8):
            source.post(post_id, target, copies(source, target, (post_id * SLOT,), SLOT))
        await source.backend.disconnect(target.name)
        await source.connect(target)
        await source.backend.disconnect(target.name)
        await source.take_ends(8)
        assert {end.error for end in source.ends()} == {None}
        assert same(source, target)


async def test_metadata_under_a_wrong_name_does_not_harm_the_peer_it_is_of(backend: str) -> None:
    async with open_endpoints(backend) as (source, target):
        with pytest.raises(BackendError):
            await source.backend.connect("somebody else", target.backend.metadata())
        await write(source, target, 1)


async def test_a_new_life_of_a_peer_can_be_written_to(backend: str) -> None:
    """It has another agent name; the old one is disconnected late or never."""
    async with open_endpoints(backend) as (source, first):
        await write(source, first, 1)
        await first.close()
        async with open_backend(create_backend(backend, {})) as second:
            await source.connect(second)
            await write(source, second, 2)
            await source.backend.disconnect(first.name)
            await write(source, second, 3)
        async with open_backend(create_backend(backend, {})) as third:
            await source.connect(third)
            await write(source, third, 4)


async def test_closing_gives_every_post_its_end(backend: str) -> None:
    """Those that ended well have arrived, and nothing moves after the fence."""
    async with open_endpoints(backend, 40 * SLOT) as (source, target):
        for post_id in range(40):
            source.post(post_id, target, copies(source, target, (post_id * SLOT,), SLOT))
        await source.close()
        after = target.memory.copy()
        assert sorted(end.post_id for end in source.ends()) == list(range(40))
        for end in source.ends():
            start = end.post_id * SLOT
            assert end.error is not None or same(source, target, start, start + SLOT)
        assert np.array_equal(target.memory, after)


@pytest.mark.parametrize("closes_first", [True, False], ids=["before the post", "after the post"])
async def test_a_post_to_a_target_that_closes_ends_once(backend: str, closes_first: bool) -> None:
    """A transport may not notice that the target is gone, so the end may come only from closing the source."""
    async with open_endpoints(backend, 16 * SLOT, options=IMPATIENT[backend]) as (source, target):
        if closes_first:
            await target.close()
        source.post(1, target, copies(source, target, range(0, 16 * SLOT, SLOT), SLOT), b"all")
        await target.close()
        await source.close()
        assert [end.post_id for end in source.ends()] == [1]
        assert target.notices() in ([], [b"all"])


async def test_everything_is_harmless_after_close(backend: str) -> None:
    async with open_endpoints(backend) as (source, target):
        await write(source, target, 1)
        await source.close()
        source.backend.watch(active=True)
        source.backend.watch(active=False)
        await source.backend.disconnect(target.name)
        await source.backend.disconnect("nobody")
        with pytest.raises(BackendError):
            source.post(2, target, copies(source, target))
        assert list(await source.backend.aclose()) == []


async def test_closing_without_opening_is_harmless(backend: str) -> None:
    endpoint: Backend = create_backend(backend, {})
    endpoint.watch(active=True)
    await endpoint.disconnect("nobody")
    assert list(await endpoint.aclose()) == []
    async with endpoint:
        await endpoint.open(fresh_name())
    assert list(await endpoint.aclose()) == []


async def test_registered_memory_can_be_seen_without_a_copy(backend: str) -> None:
    async with open_endpoints(backend, count=1) as (endpoint,):
        view = endpoint.backend.view(MemoryRange(endpoint.address + 5, 100))
        assert np.array_equal(view, endpoint.memory[5:105])
        endpoint.memory[7] ^= 0xFF
        assert view[2] == endpoint.memory[7]
        assert np.shares_memory(view, endpoint.memory)
