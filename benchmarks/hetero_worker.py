"""One process with all ranks of one side: `python -m benchmarks.hetero_worker OPTIONS`.

The prefill process has one instance for each packing setting, all over the same pools. Times are nanoseconds of the
machine's monotonic clock.
"""

import sys
import time
from contextlib import AsyncExitStack
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec

import kvflow
from benchmarks.hetero import TABLES, WAYS, HeteroOptions, Load
from benchmarks.pools import PagePool, page_tables
from benchmarks.processes import Line, next_order, run_child
from benchmarks.sides import PREFILL
from kvflow.config import Packing

__all__ = ["main"]

LOOK_S: Final = 0.0005


class RankPool(PagePool):
    """The pool of one rank, and the pages of each request."""

    def __init__(self, options: HeteroOptions, engine_rank: int) -> None:
        size = options.tokens // options.own.page_size
        super().__init__(options.shape(engine_rank), TABLES * size)
        self._tokens = options.tokens
        self.tables = page_tables(self.num_pages, TABLES, size, (7, engine_rank))

    def fill(self) -> None:
        """Write every request to its pages, as a model would. Slow."""
        for request, pages in enumerate(self.tables):
            self.write(pages, request * self._tokens)

    def has_arrived(self) -> bool:
        """Return whether every byte of every request is right. Slow."""
        return all(self.holds(pages, request * self._tokens) for request, pages in enumerate(self.tables))


class PrefillSide:
    """The prefill instances."""

    def __init__(self, options: HeteroOptions, pools: list[RankPool]) -> None:
        self._options = options
        self._pools = pools
        self.ranks = {way: [self._make(way, number) for number in range(len(pools))] for way in WAYS}

    def _make(self, way: Packing, engine_rank: int) -> kvflow.PrefillRank:
        config = kvflow.PrefillConfig(
            instance=f"{PREFILL}-{way}",
            engine_rank=engine_rank,
            num_ranks=len(self._pools),
            registry=self._options.registry,
            backend=self._options.backend,
            packing=way,
        )
        return kvflow.PrefillRank(config, self._pools[engine_rank].layout)

    async def play(self, load: Load) -> dict[str, Any]:
        """Send each request once all decode ranks have granted it; return offer times, and packed and direct writes."""
        ranks, began, before = self.ranks[load.packing], [], self._num_posts(load.packing)
        for number in range(load.count):
            while any(rank.statistics().waiting_grants < self._options.others for rank in ranks):  # noqa: ASYNC110
                await anyio.sleep(LOOK_S)
            began.append(time.monotonic_ns())
            async with anyio.create_task_group() as tasks:
                for rank, pool in zip(ranks, self._pools, strict=True):
                    tasks.start_soon(self._send, rank, pool, load.first_room + number)
        packed, direct = (now - then for now, then in zip(self._num_posts(load.packing), before, strict=True))
        return {"times_ns": began, "packed": packed, "direct": direct}

    def _num_posts(self, way: Packing) -> tuple[int, int]:
        """Return the packed and direct writes of an instance so far."""
        counts = [rank.statistics().staging for rank in self.ranks[way]]
        return sum(count.packed_posts for count in counts), sum(count.direct_posts for count in counts)

    async def _send(self, rank: kvflow.PrefillRank, pool: RankPool, room: int) -> None:
        pages = pool.tables[room % TABLES]
        async with rank.send(room) as sender:
            await sender.finish((0, self._options.tokens), {"kv": pages})


class DecodeSide:
    """The decode instance."""

    def __init__(self, options: HeteroOptions, pools: list[RankPool]) -> None:
        self._options = options
        self._pools = pools
        self.ranks = {"": [self._make(number) for number in range(len(pools))]}
        self._ended = 0

    def _make(self, engine_rank: int) -> kvflow.DecodeRank:
        config = kvflow.DecodeConfig(
            instance="decode",
            engine_rank=engine_rank,
            num_ranks=len(self._pools),
            registry=self._options.registry,
            backend=self._options.backend,
        )
        return kvflow.DecodeRank(config, self._pools[engine_rank].layout)

    async def play(self, load: Load) -> dict[str, Any]:
        """Receive requests; return the times at which decode could have started."""
        ended = []
        for number in range(load.count):
            async with anyio.create_task_group() as tasks:
                for rank, pool in zip(self.ranks[""], self._pools, strict=True):
                    tasks.start_soon(self._receive, rank, pool, load, load.first_room + number)
            ended.append(self._ended)
        return {"times_ns": ended}

    async def _receive(self, rank: kvflow.DecodeRank, pool: RankPool, load: Load, room: int) -> None:
        name, pages = f"{PREFILL}-{load.packing}", {"kv": pool.tables[room % TABLES]}
        async with rank.receive(room, prefill=name, tokens=(0, self._options.tokens), pages=pages) as receiver:
            await receiver.done()
            self._ended = time.monotonic_ns()


class HeteroWorker:
    """All ranks of one side, and their pools."""

    def __init__(self, options: HeteroOptions, line: Line) -> None:
        self._options = options
        self._line = line
        self._pools = [RankPool(options, number) for number in range(options.own.ranks)]
        is_prefill = options.side == PREFILL
        self._side = PrefillSide(options, self._pools) if is_prefill else DecodeSide(options, self._pools)

    async def serve(self) -> None:
        """Execute orders until the one to exit."""
        if self._options.side == PREFILL:
            for pool in self._pools:
                await anyio.to_thread.run_sync(pool.fill)
        async with AsyncExitStack() as stack:
            for ranks in self._side.ranks.values():
                for rank in ranks:
                    await stack.enter_async_context(rank)
            self._line.report("ready")
            while await self._obey():
                pass

    async def _obey(self) -> bool:
        match await next_order(self._line):
            case {"do": "play", "load": load}:
                told = msgspec.convert(load, Load)
                self._line.report("played", room=told.first_room, **await self._side.play(told))
            case {"do": "wipe"}:
                for pool in self._pools:
                    await anyio.to_thread.run_sync(pool.wipe)
                self._line.report("wiped")
            case {"do": "check"}:
                self._line.report("checked", is_right=await anyio.to_thread.run_sync(self._has_arrived))
            case _:
                return False
        return True

    def _has_arrived(self) -> bool:
        return all(pool.has_arrived() for pool in self._pools)


def main() -> int:
    """Run one process, and return the exit code."""
    return run_child(lambda options, line: anyio.run(HeteroWorker(options, line).serve), HeteroOptions)


if __name__ == "__main__":
    sys.exit(main())
