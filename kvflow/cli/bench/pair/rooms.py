"""Rounds through kvflow. Times are nanoseconds of the machine's monotonic clock."""

import time
from collections.abc import Sequence
from typing import Final

import anyio

import kvflow
from kvflow.cli.bench.pair.options import Load
from kvflow.cli.bench.pair.pool import Tables
from kvflow.cli.bench.workers.options import PREFILL

__all__ = ["receive_rooms", "send_rooms"]

LOOK_S: Final = 0.0005


async def send_rooms(rank: kvflow.PrefillRank, load: Load, tables: Sequence[Tables]) -> list[int]:
    """Send the rooms of a round; give the times at which they were offered, in order of the rooms."""
    began = dict.fromkeys(range(load.count), 0)
    tokens = (0, load.tokens)

    async def send_lane(lane: int) -> None:
        for number in range(lane, load.count, load.lanes):
            if load.is_announced:
                await _wait_for_grant(rank)
            async with rank.send(load.first_room + number) as sender:
                began[number] = time.monotonic_ns()
                await sender.finish(tokens, {"kv": tables[number % len(tables)].src})

    async with anyio.create_task_group() as group:
        for lane in range(load.lanes):
            group.start_soon(send_lane, lane)
    return list(began.values())


async def _wait_for_grant(rank: kvflow.PrefillRank) -> None:
    """Wait until a decode rank waits for a room that is not open."""
    while True:
        if rank.statistics().waiting_grants:
            return
        await anyio.sleep(LOOK_S)


async def receive_rooms(rank: kvflow.DecodeRank, load: Load, tables: Sequence[Tables]) -> list[int]:
    """Receive the rooms of a round; give the times at which decode might have run, in order of the rooms."""
    ended = dict.fromkeys(range(load.count), 0)
    tokens = (0, load.tokens)

    async def receive_lane(lane: int) -> None:
        for number in range(lane, load.count, load.lanes):
            room, pages = load.first_room + number, {"kv": tables[number % len(tables)].dst}
            async with rank.receive(room, prefill=PREFILL, tokens=tokens, pages=pages) as receiver:
                await receiver.done()
                ended[number] = time.monotonic_ns()

    async with anyio.create_task_group() as group:
        for lane in range(load.lanes):
            group.start_soon(receive_lane, lane)
    return list(ended.values())
