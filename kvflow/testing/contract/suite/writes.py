"""Writes, their completions, their notices, and ranges that are refused."""

import functools
import itertools
from collections.abc import Sequence
from typing import Final

import anyio
import numpy as np
import pytest

from kvflow.backends.base import BackendEvent, NoticeArrived, PostEnded
from kvflow.geometry.plan import Descriptors
from kvflow.testing.contract.base import ContractBase, check_only_this_arrives, is_refused
from kvflow.testing.endpoints import Endpoint, copies, descriptors_of, random_bytes, same

__all__ = ["WriteContract"]

MIB = 2**20

SLOT = 64 * 1024
NUM_SLOTS = 48

SMALL: Final = ((1, 1), (1, 4096), (100, 1), (100, 777), (5000, 16), (70_000, 24))
LARGE: Final = ((3, 4 * MIB), (1, 17 * MIB))
"""Number of pieces of a post, and their length in bytes."""

GAP: Final = 3
"""Bytes between pieces."""

LONGEST_NOTICE = 128 * 1024
"""A notice contains the engine's metadata, 64 KiB by default, and some hundred bytes more."""


SIZE: Final = 4096
OUTSIDE: Final = {
    "one byte before": (-1, 64, 0),
    "one byte after": (SIZE - 63, 64, 0),
    "behind": (SIZE, 1, 0),
    "longer than all": (0, SIZE + 1, 0),
    "wraps around": (64, 2**64 - 64, 0),
    "other device": (0, 64, 1),
    "zero length": (0, 0, 0),
    "zero length at the end": (SIZE, 0, 0),
}
"""Ranges on which libraries crash or write to the wrong place: start in a buffer of `SIZE` bytes, length, and an offset
of the device id."""


class WriteContract(ContractBase):
    """`post`, and the order and meaning of its events."""

    @pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])
    async def test_every_byte_arrives_and_no_other_changes(self, shapes: Sequence[tuple[int, int]]) -> None:
        await self.check_every_byte(shapes)

    async def check_every_byte(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Check posts of equal pieces, given as their number and their length in bytes."""
        async with self.open_some(max(count * (length + GAP) for count, length in shapes) + 5) as (source, target):
            most = source.backend.capabilities.max_descriptor_bytes
            allowed = [(count, length) for count, length in shapes if most is None or length <= most]
            for number, (count, length) in enumerate(allowed):
                rng = np.random.default_rng(count)
                offsets, to = ((1 + (length + GAP) * rng.permutation(count)).tolist() for _ in range(2))
                before, expected = source.buffer.read(), target.buffer.read()
                for start, place in zip(offsets, to, strict=True):
                    expected[place : place + length] = before[start : start + length]
                source.post(number, target, copies(source, target, offsets, length, to=to), b"done %d" % number)
                await source.take_ends(number + 1)
                await target.take_notices(number + 1)
                assert source.ends()[-1].error is None, (count, length)
                assert target.notices()[-1] == b"done %d" % number
                assert np.array_equal(target.buffer.read(), expected), (count, length)
                assert np.array_equal(source.buffer.read(), before), (count, length)
            arrived = target.buffer.read()
            await source.close()
            await target.close()
            assert np.array_equal(target.buffer.read(), arrived)
            assert len(target.notices()) == len(allowed)

    async def test_descriptors_of_one_post_may_have_any_lengths(self) -> None:
        lengths = [1, MIB, 2, 65_537, 3, 300_001, 5, 4096, 1, 77]
        starts = np.cumsum([0, *lengths]).tolist()
        async with self.open_some(starts[-1] + 1) as (source, target):
            pieces = [copies(source, target, (start,), length) for start, length in zip(starts, lengths, strict=False)]
            order = np.random.default_rng(1).permutation(len(pieces)).tolist()
            sides = [np.concatenate([pieces[number][side] for number in order]) for side in (0, 1)]
            last = target.buffer.read(starts[-1])
            source.post(1, target, Descriptors(*sides))
            await source.take_ends()
            assert same(source, target, 0, starts[-1])
            assert np.array_equal(target.buffer.read(starts[-1]), last)

    async def test_one_piece_can_be_written_to_many_places(self) -> None:
        async with self.open_some() as (source, target):
            places = list(range(0, 4096, 64))
            src = np.repeat(descriptors_of(source, (128,), 64), len(places), axis=0)
            source.post(1, target, Descriptors(src, descriptors_of(target, places, 64)))
            await source.take_ends()
            assert np.array_equal(target.buffer.read(), np.tile(source.buffer.read(128, 192), len(places)))

    async def test_pages_may_change_once_their_post_has_ended(self) -> None:
        """The transport no longer reads them: what has arrived stays, and the next post sends the new content."""
        async with self.open_some(NUM_SLOTS * SLOT) as (source, target):
            sent = source.buffer.read()
            for slot in range(NUM_SLOTS):
                source.post(slot, target, copies(source, target, (slot * SLOT,), SLOT))
            num_changed = 0
            while num_changed < NUM_SLOTS:
                await source.take_ends(num_changed + 1)
                for end in source.ends()[num_changed:]:
                    source.buffer.write(end.post_id * SLOT, np.zeros(SLOT, np.uint8))
                    num_changed += 1
            assert np.array_equal(target.buffer.read(), sent)

    async def test_notices_come_once_each_and_after_their_bytes_in_both_directions_at_once(self) -> None:
        """Even slots are written one way and odd ones the other, all posted before any event is handled."""
        async with self.open_some(2 * NUM_SLOTS * SLOT) as endpoints:
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

    async def test_a_write_without_notice_brings_none(self) -> None:
        async with self.open_some() as (source, target):
            source.post(1, target, copies(source, target))
            source.post(2, target, copies(source, target), b"\0 second \0")
            await source.take_ends(2)
            await target.take_notices()
            await target.close()
            assert target.notices() == [b"\0 second \0"]

    async def test_a_notice_may_be_long_and_hold_any_byte(self) -> None:
        async with self.open_some() as (source, target):
            self.skip_without_in_band_notices(source)
            notices = [bytes(range(256)), random_bytes(LONGEST_NOTICE, seed=1).tobytes(), b"\0"]
            for post_id, notice in enumerate(notices):
                source.post(post_id, target, copies(source, target), notice)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source.take_ends, 3)
                await target.take_notices(3)
            assert sorted(target.notices()) == sorted(notices)

    async def test_one_endpoint_writes_to_many_and_many_write_to_one(self) -> None:
        async with self.open_some(count=4) as (hub, *others):
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

    async def test_large_and_small_posts_to_several_peers_all_end(self) -> None:
        """Peers take turns, so that each always has posts in flight."""
        async with self.open_some(4 * MIB, count=4) as (source, *targets):
            for post_id in range(30):
                target, size = targets[post_id % 3], (64, SLOT, MIB)[post_id % 4 % 3]
                offsets = range(0, size, max(size // 16, 64))
                source.post(post_id, target, copies(source, target, offsets, min(size, max(size // 16, 64))))
            await source.take_ends(30)
            assert {end.error for end in source.ends()} == {None}
            for target in targets:
                assert same(source, target, 0, MIB)

    async def test_the_next_write_can_be_posted_when_the_last_one_is_reported(self) -> None:
        """The next write is posted inside the callback, which is not called again before it has returned."""
        async with self.open_some(NUM_SLOTS * SLOT) as (source, target):
            depths: list[int] = []
            depth = 0

            def post(slot: int) -> None:
                source.post(slot, target, copies(source, target, (slot * SLOT,), SLOT), b"%d" % slot)

            def post_next(event: BackendEvent) -> None:
                nonlocal depth
                depth += 1
                depths.append(depth)
                if isinstance(event, PostEnded) and event.post_id + 1 < NUM_SLOTS:
                    post(event.post_id + 1)
                depth -= 1

            source.reactions.append(post_next)
            post(0)
            await source.take_ends(NUM_SLOTS)
            await target.take_notices(NUM_SLOTS)
            assert depths == [1] * NUM_SLOTS
            assert same(source, target)
            assert sorted(int(notice) for notice in target.notices()) == list(range(NUM_SLOTS))

    async def test_a_range_that_is_not_registered_is_refused(self) -> None:
        """The bad descriptor is between good ones, and none of them is written."""
        accepted: list[str] = []
        async with self.open_some(SIZE) as (source, target):
            for side, (case, (start, length, device)) in itertools.product(("source", "target"), OUTSIDE.items()):
                descriptors = copies(source, target, (0, 128, 256))
                owner, bad = (source, descriptors.src) if side == "source" else (target, descriptors.dst)
                descriptors.src[1, 1] = descriptors.dst[1, 1] = 64
                bad[1] = (owner.address + start, length, owner.buffer.device_id + device)
                if not is_refused(functools.partial(source.post, 9, target, descriptors, b"bad")):
                    accepted.append(f"{case} of the {side}")
            assert accepted == []
            await check_only_this_arrives(source, target)

    def skip_without_in_band_notices(self, endpoint: Endpoint) -> None:
        """Skip the test if notices use the control channel."""
        if not endpoint.backend.capabilities.in_band_notices:
            pytest.skip("has no notices of its own")


async def receive_and_check(target: Endpoint, source: Endpoint) -> None:
    """Receive notices; each contains the number of a slot that must have arrived already."""
    target.backend.watch(active=True)
    while len(target.notices()) < NUM_SLOTS or len(target.ends()) < NUM_SLOTS:
        for event in await target.take_events():
            if isinstance(event, NoticeArrived):
                start = int(event.payload) * SLOT
                assert same(source, target, start, start + SLOT)


def has_both(endpoint: Endpoint) -> bool:
    """Return whether a post has ended and a notice has arrived."""
    return bool(endpoint.ends() and endpoint.notices())
