"""One process of a pair: `python -m benchmarks.pair.worker OPTIONS`.

It has a kvflow rank and a bare endpoint on the same pool, and plays each round through one of them while the other is
idle. Times are nanoseconds of the machine's monotonic clock, which all of its processes share.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
import msgspec

import kvflow
from benchmarks.bare.endpoint import BareEndpoint, open_endpoint
from benchmarks.bare.loops import Napper, receive_announced, receive_lanes, send_announced, send_lanes
from benchmarks.pair.loads import SHAPES, Load, PairOptions, Tables, tables_of
from benchmarks.pool_memory import MEMORIES
from benchmarks.pools import PagePool
from benchmarks.processes import Line, next_order, run_child
from benchmarks.sides import PREFILL

__all__ = ["main"]

NAP_S: Final = 50e-6
"""Equal to the pause of kvflow's own threads between polls."""

LOOK_S: Final = 0.0005

LEASE_S: Final = 30.0
"""Long, because on a busy machine an event loop may not run for a while, and no process dies here."""

Result = TypeVar("Result")


class PairWorker:
    """An engine with one rank, and a bare endpoint beside it."""

    def __init__(self, options: PairOptions, line: Line) -> None:
        self._options = options
        self._line = line
        self._shape = SHAPES[options.shape]
        self._pool = PagePool(self._shape, options.num_pages, allocate=MEMORIES[options.memory])
        self._is_prefill = options.side == PREFILL
        self._thread = anyio.CapacityLimiter(1)

    async def serve(self) -> None:
        """Carry out orders until one is to leave."""
        await self._beside(self._pool.fill if self._is_prefill else self._pool.wipe)
        async with self._open_rank() as self._rank:
            self._bare: BareEndpoint = await self._beside(open_endpoint, self._options, self._pool)
            self._line.report("ready", address=self._bare.address().hex())
            while await self._obey(await next_order(self._line)):
                pass
            await self._beside(self._bare.close)

    def _open_rank(self) -> AbstractAsyncContextManager[kvflow.PrefillRank | kvflow.DecodeRank]:
        common: dict[str, Any] = {
            "instance": self._options.side,
            "registry": self._options.registry,
            "backend": self._options.backend,
            "timeouts": kvflow.Timeouts(lease_s=LEASE_S),
            "trust": self._options.trust,
        }
        if self._is_prefill:
            return kvflow.PrefillRank(kvflow.PrefillConfig(**common), self._pool.layout)
        return kvflow.DecodeRank(kvflow.DecodeConfig(**common), self._pool.layout)

    async def _obey(self, order: dict[str, Any]) -> bool:
        match order:
            case {"do": "connect", "address": address}:
                await self._beside(self._bare.connect, bytes.fromhex(address))
                self._line.report("connected")
            case {"do": "wipe"}:
                await self._beside(self._pool.wipe)
                self._line.report("wiped")
            case {"do": "check", "load": load}:
                is_right = await self._beside(self._has_arrived, msgspec.convert(load, Load))
                self._line.report("checked", is_right=is_right)
            case {"do": "play", "load": load}:
                await self._play(msgspec.convert(load, Load))
            case _:
                return False
        return True

    async def _play(self, load: Load) -> None:
        """Play this side of one round, and report when its requests started or ended, and their cost."""
        tables = tables_of(load, self._options)
        is_bare = load.way != "kvflow"
        works = await self._beside(self._prepare, tables) if is_bare and self._is_prefill else []
        began, cpu, threads = time.monotonic_ns(), time.process_time(), _thread_times()
        if is_bare:
            times = await self._beside(self._run_bare, load, works)
        elif isinstance(self._rank, kvflow.PrefillRank):
            times = await _send_rooms(self._rank, load, tables)
        else:
            times = await _receive_rooms(self._rank, load, tables)
        self._line.report(
            "played",
            room=load.first_room,
            began_ns=began,
            times_ns=times,
            cpu_s=time.process_time() - cpu,
            thread_s={name: spent - threads.get(name, 0.0) for name, spent in _thread_times().items()},
        )

    def _prepare(self, tables: list[Tables]) -> list[Any]:
        return [self._bare.prepare(table) for table in tables]

    def _run_bare(self, load: Load, works: list[Any]) -> list[int]:
        """Play this side of a round without kvflow. Return no times on prefill if nothing is announced."""
        napper = Napper(0.0 if load.way == "bare" else NAP_S)
        if not self._is_prefill:
            return (receive_announced if load.is_announced else receive_lanes)(self._bare, load.rooms, napper)
        if load.is_announced:
            return send_announced(self._bare, works, load.rooms, napper)
        send_lanes(self._bare, works, load.rooms, load.lanes, napper)
        return []

    def _has_arrived(self, load: Load) -> bool:
        tables = tables_of(load, self._options)[: load.count]
        return all(self._pool.holds(table.dst, table.src * self._shape.page_size) for table in tables)

    async def _beside(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run slow work in a thread, because peers consider a rank whose event loop is blocked to be dead."""
        return await anyio.to_thread.run_sync(work, *arguments, limiter=self._thread)


async def _send_rooms(rank: kvflow.PrefillRank, load: Load, tables: list[Tables]) -> list[int]:
    """Send the rooms of a round; return the times at which they were offered, in order of the rooms."""
    began = [0] * load.count

    async def send_lane(lane: int) -> None:
        for number in _numbers(load, lane):
            while load.is_announced and not rank.statistics().waiting_grants:  # noqa: ASYNC110 - there is no event
                await anyio.sleep(LOOK_S)
            async with rank.send(load.rooms[number]) as sender:
                began[number] = time.monotonic_ns()
                await sender.finish((0, load.tokens), {"kv": tables[number % len(tables)].src})

    async with anyio.create_task_group() as group:
        for lane in range(load.lanes):
            group.start_soon(send_lane, lane)
    return began


async def _receive_rooms(rank: kvflow.DecodeRank, load: Load, tables: list[Tables]) -> list[int]:
    """Receive the rooms of a round; return the times at which decode could start, in order of the rooms."""
    ended = [0] * load.count

    async def receive_lane(lane: int) -> None:
        for number in _numbers(load, lane):
            room, pages = load.rooms[number], {"kv": tables[number % len(tables)].dst}
            async with rank.receive(room, prefill=PREFILL, tokens=(0, load.tokens), pages=pages) as receiver:
                await receiver.done()
                ended[number] = time.monotonic_ns()

    async with anyio.create_task_group() as group:
        for lane in range(load.lanes):
            group.start_soon(receive_lane, lane)
    return ended


def _numbers(load: Load, lane: int) -> range:
    """Return the numbers of a lane's requests, in order."""
    return range(lane, load.count, load.lanes)


def _thread_times() -> dict[str, float]:
    """Return the CPU seconds so far of the event loop and of the threads that kvflow owns."""
    times = {}
    for thread in threading.enumerate():
        if thread.ident is not None and (thread is threading.main_thread() or thread.name.startswith("kvflow-")):
            name = "loop" if thread is threading.main_thread() else "owner"
            times[name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return times


def main() -> int:
    """Run one process to its end, and return its exit code."""
    return run_child(lambda options, line: anyio.run(PairWorker(options, line).serve), PairOptions)


if __name__ == "__main__":
    sys.exit(main())
