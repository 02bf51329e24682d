"""One process of a pair: `python -m kvflow.cli.bench.pair.worker OPTIONS`.

It has a rank of kvflow and a bare endpoint over the same pool, and plays rounds through one of them while the other one
is idle.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np

import kvflow
from kvflow.cli.bench.bare.embedded import receive_embedded, send_embedded
from kvflow.cli.bench.bare.endpoint import BareEndpoint
from kvflow.cli.bench.bare.loops import Napper, receive_announced, receive_lanes, send_announced, send_lanes
from kvflow.cli.bench.pair.options import Load, PairOptions
from kvflow.cli.bench.pair.pool import PairPool, Tables, tables_of
from kvflow.cli.bench.pair.rooms import receive_rooms, send_rooms
from kvflow.cli.bench.workers.options import PREFILL
from kvflow.cli.bench.workers.serving import next_order, run_worker
from kvflow.cli.demo.line import PipeLine

__all__ = ["main"]

NAP_S: Final = 50e-6
"""As long as kvflow's own threads rest between polls."""

LEASE_S: Final = 30.0
"""Nobody dies here, but on a busy machine an event loop may not run for a while."""

MAX_SCRATCH_BYTES: Final = 2**30

Result = TypeVar("Result")


class PairWorker:
    """One engine with one rank, and a bare endpoint beside it."""

    def __init__(self, options: PairOptions, line: PipeLine) -> None:
        self._options = options
        self._line = line
        self._pool = PairPool(options)
        self._is_prefill = options.side == PREFILL
        self._thread = anyio.CapacityLimiter(1)
        self._scratch = np.zeros(0, np.uint8)
        common: dict[str, Any] = {
            "instance": options.side,
            "registry": options.registry,
            "backend": options.backend,
            "timeouts": kvflow.Timeouts(lease_s=LEASE_S),
        }
        self._rank: kvflow.PrefillRank | kvflow.DecodeRank
        if self._is_prefill:
            self._rank = kvflow.PrefillRank(kvflow.PrefillConfig(**common), self._pool.layout)
        else:
            self._rank = kvflow.DecodeRank(kvflow.DecodeConfig(**common), self._pool.layout)

    async def serve(self) -> None:
        """Do what is said until it is to leave."""
        await self._beside(self._pool.fill if self._is_prefill else self._pool.wipe)
        async with self._rank:
            self._bare = await self._beside(self._make_bare)
            self._line.report("ready", room=0, endpoint=self._bare.address().hex())
            while await self._obey():
                pass
            await self._beside(self._bare.close)

    def _make_bare(self) -> BareEndpoint:
        name = f"bare-{self._options.side}"
        if self._options.backend == "mooncake":
            from kvflow.cli.bench.bare.mooncake import BareMooncake  # noqa: PLC0415 - only what is used is loaded

            return BareMooncake(name, self._pool)
        from kvflow.cli.bench.bare.nixl import BareNixl  # noqa: PLC0415 - as above

        return BareNixl(name, self._pool)

    async def _obey(self) -> bool:
        match await next_order(self._line):
            case {"do": "connect", "address": address}:
                await self._beside(self._bare.connect, bytes.fromhex(address))
                self._line.report("connected", room=0)
            case {"do": "wipe"}:
                await self._beside(self._pool.wipe)
                self._line.report("wiped", room=0)
            case {"do": "check", "load": load}:
                is_right = await self._beside(self._has_arrived, msgspec.convert(load, Load))
                self._line.report("checked", room=0, is_right=is_right)
            case {"do": "play", "load": load}:
                await self._play(msgspec.convert(load, Load))
            case _:
                return False
        return True

    async def _play(self, load: Load) -> None:
        """Play this side of one round, and report when its requests began or ended, and what it cost."""
        tables = tables_of(load, self._pool.shape, self._pool.slots)
        works = [] if load.way == "kvflow" or not self._is_prefill else await self._beside(self._prepare, load, tables)
        began, cpu, threads = time.monotonic_ns(), time.process_time(), _thread_times()
        if load.way == "kvflow":
            run = send_rooms if isinstance(self._rank, kvflow.PrefillRank) else receive_rooms
            times = await run(self._rank, load, tables)  # type: ignore[arg-type]
        elif load.way == "memcpy":
            times = await self._beside(self._copy, load)
        elif load.way == "bare-embedded":
            times = await self._run_embedded(load, works)
        else:
            times = await self._beside(self._run_bare, load, works)
        ended = time.monotonic_ns()
        self._line.report(
            "played",
            room=load.first_room,
            began_ns=began,
            ended_ns=ended,
            times_ns=times,
            cpu_s=time.process_time() - cpu,
            thread_s={name: spent - threads.get(name, 0.0) for name, spent in _thread_times().items()},
        )

    def _prepare(self, load: Load, tables: list[Tables]) -> list[Any]:
        if load.way == "bare-whole":
            num_bytes = load.tokens * self._pool.shape.token_bytes
            return [self._bare.prepare_whole(number * num_bytes, num_bytes) for number in range(load.tables)]
        return [self._bare.prepare(table) for table in tables]

    def _run_bare(self, load: Load, works: list[Any]) -> list[int]:
        """Play this side of a round without kvflow; gives no times on prefill if nothing is announced."""
        rooms = _rooms(load)
        napper = Napper(0.0 if load.way == "bare" else NAP_S)
        if not self._is_prefill:
            return (receive_announced if load.is_announced else receive_lanes)(self._bare, rooms, napper)
        if load.is_announced:
            return send_announced(self._bare, works, rooms, napper)
        send_lanes(self._bare, works, rooms, load.lanes, napper)
        return []

    async def _run_embedded(self, load: Load, works: list[Any]) -> list[int]:
        """The same from this event loop."""
        rooms, lanes, is_announced = _rooms(load), load.lanes, load.is_announced
        if self._is_prefill:
            return await send_embedded(self._bare, works, rooms, lanes, is_announced=is_announced)
        return await receive_embedded(self._bare, rooms, lanes, is_announced=is_announced)

    def _copy(self, load: Load) -> list[int]:
        """Copy as many bytes within this process, and give the time that each copy took; nothing on decode."""
        if not self._is_prefill:
            return []
        num_bytes = load.tokens * self._pool.shape.token_bytes
        scratch_bytes = min(num_bytes * load.tables, MAX_SCRATCH_BYTES)
        if self._scratch.size < scratch_bytes:
            self._scratch = np.ones(scratch_bytes, np.uint8)
        took = []
        for number in range(load.count):
            first = number % load.tables * num_bytes
            began = time.monotonic_ns()
            for at in range(first, first + num_bytes, scratch_bytes):
                source = self._pool.bytes[at : min(at + scratch_bytes, first + num_bytes)]
                target = at % max(1, scratch_bytes - source.size + 1)
                np.copyto(self._scratch[target : target + source.size], source)
            took.append(time.monotonic_ns() - began)
        return took

    def _has_arrived(self, load: Load) -> bool:
        if load.way == "bare-whole":
            return self._pool.has_arrived_whole(load.count * load.tokens * self._pool.shape.token_bytes)
        tables = tables_of(load, self._pool.shape, self._pool.slots)
        return all(self._pool.has_arrived(table) for table in tables[: load.count])

    async def _beside(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do what takes long beside the event loop: a rank whose loop is blocked is taken for dead."""
        return await anyio.to_thread.run_sync(work, *arguments, limiter=self._thread)


def _rooms(load: Load) -> range:
    return range(load.first_room, load.first_room + load.count)


def _thread_times() -> dict[str, float]:
    """CPU seconds of the event loop and of the threads that kvflow owns, so far."""
    times = {}
    for thread in threading.enumerate():
        if thread.ident is not None and (thread is threading.main_thread() or thread.name.startswith("kvflow-")):
            name = "loop" if thread is threading.main_thread() else "owner"
            times[name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return times


def main() -> int:
    """Run a worker to its end.

    Returns:
        The exit code.
    """
    return run_worker(PairWorker, PairOptions)


if __name__ == "__main__":
    sys.exit(main())
