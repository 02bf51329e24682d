"""Instances of one rank each in one process, and rooms between them that wait as long as a benchmark needs."""

import itertools
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

import kvflow
from benchmarks.pools import PagePool, PoolShape
from kvflow import Timeouts
from kvflow.room import RoomId

__all__ = [
    "BATCH",
    "PATIENT",
    "TOKENS",
    "Pair",
    "Rooms",
    "deploy",
    "enter_receiver",
    "enter_sender",
    "make_pool",
    "pages_of",
]

NUM_PAGES: Final = 32
"""Pages of a room."""

PAGE_SIZE: Final = 16
TOKENS: Final = (0, NUM_PAGES * PAGE_SIZE)
TOKEN_BYTES: Final = 16
PAGES: Final = {"kv": np.arange(NUM_PAGES)}
"""Source pages of all rooms: the benchmarks measure kvflow's work for a room, not the copying."""

BATCH: Final = 10
"""Rooms that finish at the same time."""

PATIENT: Final = Timeouts(handshake_s=60, transfer_s=7200, open_s=7200, grant_s=7200, progress_s=7200)
"""Rooms wait on purpose: only silence may end one. Retransmissions and pings keep their defaults."""


class Pair(NamedTuple):
    """Two ranks that transfer rooms."""

    prefill: kvflow.PrefillRank
    decode: kvflow.DecodeRank


class _Room(NamedTuple):
    lane: int
    pair: Pair
    receiver: kvflow.RoomReceiver
    sender: kvflow.RoomSender | None


async def enter_sender(pair: Pair, number: RoomId) -> kvflow.RoomSender:
    """Enter a sender on prefill; the caller exits it."""
    return await pair.prefill.send(number).__aenter__()


def pages_of(lane: int) -> dict[str, NDArray[np.int64]]:
    """Return the target pages of a lane; rooms that wait at the same time need different lanes."""
    return {"kv": np.arange(NUM_PAGES) + lane * NUM_PAGES}


async def enter_receiver(pair: Pair, number: int, lane: int) -> kvflow.RoomReceiver:
    """Enter a receiver on decode; the caller exits it."""
    name = pair.prefill.config.instance
    return await pair.decode.receive(number, prefill=name, tokens=TOKENS, pages=pages_of(lane)).__aenter__()


class Rooms:
    """Rooms in flight, the oldest first, between pairs of ranks that take turns."""

    def __init__(self, pairs: list[Pair]) -> None:
        self._pairs = itertools.cycle(pairs)
        self._numbers = itertools.count()
        self._lanes = itertools.count()
        self._free_lanes: list[int] = []
        self._waiting: deque[_Room] = deque()

    async def open(self, count: int) -> None:
        """Open rooms on decode, and every other one on prefill too, without sending anything."""
        for _ in range(count):
            number, pair = next(self._numbers), next(self._pairs)
            sender = await enter_sender(pair, number) if number % 2 else None
            lane = self._free_lanes.pop() if self._free_lanes else next(self._lanes)
            self._waiting.append(_Room(lane, pair, await enter_receiver(pair, number, lane), sender))

    async def fill(self, count: int) -> None:
        """Open rooms until `count` are in flight, and let their grants arrive."""
        while len(self._waiting) < count:
            await self.open(min(BATCH, count - len(self._waiting)))
            await anyio.sleep(0.001)

    async def turn_over(self, count: int) -> None:
        """Finish the oldest `count` rooms and open as many new ones, a batch at a time."""
        for _ in range(-(-count // BATCH)):
            done = await self._finish_batch()
            await self.open(done)

    async def finish_all(self) -> None:
        """Finish every room."""
        while self._waiting:
            await self._finish_batch()

    async def _finish_batch(self) -> int:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        async with anyio.create_task_group() as tasks:
            for room in batch:
                tasks.start_soon(self._finish, room)
        return len(batch)

    async def _finish(self, room: _Room) -> None:
        sender = room.sender or await enter_sender(room.pair, room.receiver.room)
        await sender.finish(TOKENS, PAGES)
        await room.receiver.done()
        await room.receiver.__aexit__(None, None, None)
        self._free_lanes.append(room.lane)
        await sender.__aexit__(None, None, None)


def make_pool(num_rooms: int = 1) -> PagePool:
    """Return a pool, which must outlive its ranks: prefill needs pages for one room, decode for `num_rooms`."""
    shape = PoolShape(layers=1, tensors=("kv",), head_bytes=TOKEN_BYTES, page_size=PAGE_SIZE)
    return PagePool(shape, num_rooms * NUM_PAGES)


@asynccontextmanager
async def deploy(  # noqa: PLR0913 - each one is a choice, by name
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    num_rooms: int = 4 * BATCH,
    pools: tuple[PagePool, PagePool] | None = None,
    backend: str = "memory",
    timeouts: Timeouts = PATIENT,
    trusts: Mapping[str, kvflow.Trust] = MappingProxyType({}),
) -> AsyncIterator[list[Pair]]:
    """Open instances of one rank each in this process, and yield all pairs. Control messages use ZMQ.

    Args:
        num_prefill: Prefill instances.
        num_decode: Decode instances.
        num_rooms: Largest number of rooms in flight.
        pools: Pool of all prefill instances and that of all decode instances; from `make_pool` by default.
        backend: Transport of all ranks.
        timeouts: Timeouts of all ranks.
        trusts: Keys of the instances, and of "registry"; none by default.
    """
    source, target = pools or (make_pool(), make_pool(num_rooms))
    async with kvflow.Registry(trust=trusts.get("registry")) as registry, AsyncExitStack() as stack:
        common: dict[str, Any] = {"registry": registry.endpoint, "backend": backend, "timeouts": timeouts}
        prefill = [
            kvflow.PrefillRank(
                kvflow.PrefillConfig(instance=f"prefill-{index}", trust=trusts.get(f"prefill-{index}"), **common),
                source.layout,
            )
            for index in range(num_prefill)
        ]
        decode = [
            kvflow.DecodeRank(
                kvflow.DecodeConfig(instance=f"decode-{index}", trust=trusts.get(f"decode-{index}"), **common),
                target.layout,
            )
            for index in range(num_decode)
        ]
        for sender in prefill:
            await stack.enter_async_context(sender)
        for receiver in decode:
            await stack.enter_async_context(receiver)
        yield [Pair(left, right) for left in prefill for right in decode]
