"""Writes that refer to blocks instead of addresses."""

import functools
import itertools
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvflow.errors import BackendError
from kvflow.geometry.blocks import BlockLists, Blocks
from kvflow.testing.contract.base import ContractBase, check_one_post, check_only_this_arrives, is_refused, write
from kvflow.testing.endpoints import Endpoint

__all__ = ["BlockContract"]

Words = NDArray[np.uint64]

PAGE, CELL, GAP = 4096, 256, 512
PAGES_HERE, PAGES_THERE = 24, 40
SIZE = PAGES_THERE * (PAGE + GAP)

OUTSIDE: Final = {
    "one byte before": ((-1, 64, 64, 4), 0),
    "one byte after": ((SIZE - 255, 64, 64, 4), 0),
    "too many blocks": ((0, 64, 64, SIZE // 64 + 1), 0),
    "second block behind": ((0, 64, SIZE, 2), 0),
    "other device": ((0, 64, 64, 4), 1),
}
"""A run outside the buffer, and an offset of the device id."""


def runs(endpoint: Endpoint, *described: tuple[int, int, int, int]) -> Words:
    """Return one side of block lists: for each run its offset, bytes of a block, block distance, and block count."""
    device = endpoint.buffer.device_id
    rows = [(endpoint.address + start, length, device, step, count) for start, length, step, count in described]
    return np.array(rows, np.uint64)


def two_runs(source: Endpoint, target: Endpoint) -> BlockLists:
    """Return lists of pages with gaps, and of adjacent cells at the start; the target has more of both."""
    sides = ((source, PAGES_HERE), (target, PAGES_THERE))
    return BlockLists(*(runs(side, (0, PAGE, PAGE + GAP, pages), (0, CELL, CELL, pages * 16)) for side, pages in sides))


def blocks(lists: BlockLists, src: list[int], dst: list[int]) -> Blocks:
    num_bytes = sum(CELL if position >= PAGES_HERE else PAGE for position in src)
    return Blocks(lists, np.array(src, np.int32), np.array(dst, np.int32), num_bytes)


class BlockContract(ContractBase):
    """`post_blocks`."""

    async def test_every_block_arrives_and_no_other_byte_changes(self) -> None:
        """Check single blocks, rows of neighbours on one or both sides, and cells behind the pages."""
        async with self.open_some(SIZE) as (source, target):
            lists = two_runs(source, target)
            pages = [(3, 7), (4, 8), (5, 9), (0, 20), (1, 30), (23, 39)]
            cells = [(0, 1), (1, 2), (2, 3), (17, 11), (PAGES_HERE * 16 - 1, 5)]
            before, expected = source.buffer.read(), target.buffer.read()
            for src, dst in pages:
                here, there = src * (PAGE + GAP), dst * (PAGE + GAP)
                expected[there : there + PAGE] = before[here : here + PAGE]
            for src, dst in cells:
                expected[dst * CELL : (dst + 1) * CELL] = before[src * CELL : (src + 1) * CELL]
            named = [*pages, *((PAGES_HERE + src, PAGES_THERE + dst) for src, dst in cells)]
            source.post(7, target, blocks(lists, *(list(side) for side in zip(*named, strict=True))), b"done")
            await check_one_post(source, target, expected, post_id=7, notice=b"done")

    async def test_lists_may_change_from_post_to_post(self) -> None:
        """A peer that wants other cells than before reconnects while earlier posts are in flight."""
        async with self.open_some(SIZE) as (source, target):
            lists = [two_runs(source, target) for _ in range(3)]
            before, expected = source.buffer.read(), target.buffer.read()
            for post_id in range(12):
                source.post(post_id, target, blocks(lists[post_id % 3], [post_id], [12 + post_id]))
                here, there = post_id * (PAGE + GAP), (12 + post_id) * (PAGE + GAP)
                expected[there : there + PAGE] = before[here : here + PAGE]
            await source.take_ends(12)
            assert {end.error for end in source.ends()} == {None}
            assert np.array_equal(target.buffer.read(), expected)

    async def test_lists_outlive_a_connection(self) -> None:
        async with self.open_some(SIZE) as (source, target):
            lists = two_runs(source, target)
            for post_id in range(3):
                source.buffer.write(0, np.full(PAGE, 10 + post_id, np.uint8))
                source.post(post_id, target, blocks(lists, [0], [post_id]))
                await source.take_ends(post_id + 1)
                start = post_id * (PAGE + GAP)
                assert set(target.buffer.read(start, start + PAGE).tolist()) == {10 + post_id}
                await source.backend.disconnect(target.name)
                await source.connect(target)
            assert {end.error for end in source.ends()} == {None}

    async def test_lists_of_memory_that_is_not_registered_are_refused(self) -> None:
        """The bad run follows a good one.

        The post names the first block of both, and also the last block of the bad one.
        """
        good = ((0, 64, 64, 4), (256, 64, 64, 4))
        accepted: list[str] = []
        async with self.open_some(SIZE) as (source, target):
            for side, (case, (run, device)) in itertools.product(("source", "target"), OUTSIDE.items()):
                bad = (good[0], run)
                is_source = side == "source"
                lists = BlockLists(
                    runs(source, *(bad if is_source else good)), runs(target, *(good if is_source else bad))
                )
                (lists.src if is_source else lists.dst)[1, 2] += np.uint64(device)
                named = [0, 4, 4 + run[3] - 1], [0, 4, 7]
                bad_blocks = blocks(lists, *(named if is_source else named[::-1]))
                posts = [functools.partial(source.post, post_id, target, bad_blocks, b"bad") for post_id in (8, 9)]
                if not all(is_refused(post) for post in posts):  # the second may use what the first has prepared
                    accepted.append(f"{case} of the {side}")
            assert accepted == []
            await check_only_this_arrives(source, target)

    async def test_blocks_cannot_be_written_to_a_peer_that_is_not_connected(self) -> None:
        async with self.open_some(SIZE) as (source, target), self.open_one(SIZE, seed=9) as third:
            with pytest.raises(BackendError):
                source.post(9, third, blocks(two_runs(source, third), [0], [0]), b"bad")
            await write(source, target, 1)
