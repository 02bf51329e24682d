"""A registry or a rank in a process of its own: `python -m tests.versions.rank_process OPTIONS`, run with any version.

So it uses only public names that both versions have. Orders: `send` a room, give a `ticket` of one, `receive` one by
name or ticket, report when another rank has `asked` for one that is not open, `account` for what is left. A room has a
number; if it `is_text`, its ID is a string.
"""

import sys
from typing import Any, Final

import anyio
import msgspec
import numpy as np
from anyio.abc import TaskGroup

import kvflow
from benchmarks.processes import Line, Report, next_order, run_child
from kvflow.config import Timeouts
from tests.support.pools import PagedShape, Pool
from tests.support.waiting import until

__all__ = ["METADATA", "NUM_TOKENS", "Memory", "RankOptions"]

NUM_TOKENS: Final = 20
"""Tokens of a room; the last page of each size is not full."""

FIRST_CHUNK: Final = 8
POOL_TOKENS: Final = 256
NUM_HEADS: Final = 6
NUM_LAYERS: Final = 2
HEAD_BYTES: Final = 8
UNTOUCHED: Final = 0xEE
METADATA: Final = "first token"
TIMEOUTS: Final = Timeouts(handshake_s=15.0, transfer_s=30.0, grant_s=20.0, drain_s=0.5, lease_s=2.0)


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the process has: "registry", or "prefill" or "decode", its address, keys, and the shape of its pool.

    With a directory `admin`, commands find it there, and it keeps files about incidents there.
    """

    role: str
    backend: str = "nixl"
    admin: str = ""
    registry: str | None = None
    keys: str | None = None
    rank: int = 0
    num_ranks: int = 1
    page_size: int = 4

    @property
    def trust(self) -> kvflow.Trust:
        return kvflow.Trust.none() if self.keys is None else kvflow.load_trust(self.keys)

    @property
    def common(self) -> dict[str, Any]:
        """Settings of a rank of either role."""
        return {
            "instance": self.role,
            "engine_rank": self.rank,
            "num_ranks": self.num_ranks,
            "registry": self.registry,
            "backend": self.backend,
            "admin": self.admin or False,
            "black_box": self.admin or False,
            "trust": self.trust,
            "timeouts": TIMEOUTS,
        }


class Memory:
    """A pool, what it must contain, and its free pages."""

    def __init__(self, options: RankOptions) -> None:
        heads = kvflow.head_range(NUM_HEADS, options.num_ranks, options.rank)
        shape = PagedShape(POOL_TOKENS // options.page_size, options.page_size, heads, HEAD_BYTES, NUM_LAYERS)
        self.pool, self._wanted = Pool(shape, UNTOUCHED), Pool(shape, UNTOUCHED)
        self._free: list[int] = np.random.default_rng(options.rank).permutation(shape.num_pages).tolist()

    def take_pages(self) -> list[int]:
        """Take scattered pages for a room."""
        count = -(-NUM_TOKENS // self.pool.shape.page_size)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        return taken

    def compute(self, room: int, pages: list[int]) -> None:
        """Write the cells of a room, as a model would."""
        for pool in (self.pool, self._wanted):
            fill(pool, room, pages)

    def is_right(self, room: int, pages: list[int]) -> bool:
        """Return whether pages have the cells of a room, and the rest of the pool is as it was."""
        fill(self._wanted, room, pages)
        return all(map(np.array_equal, self.pool.buffers, self._wanted.buffers))


def fill(pool: Pool, room: int, pages: list[int]) -> None:
    """Write the cells of a room without the help of a layout: each has a value of its own."""
    for token in range(NUM_TOKENS):
        block, offset = divmod(token, pool.shape.page_size)
        for layer in range(NUM_LAYERS):
            for number, tensor in enumerate("kv"):
                for head in range(*pool.shape.heads):
                    cell = pool.cell(tensor, layer, pages[block], offset, head)
                    cell[:] = [room, token, layer, number, head, 0x5A, 0xA5, 0xFF]


def name_of(order: Report) -> int | str:
    return f"request {order['room']}" if order["is_text"] else int(order["room"])


async def send(rank: kvflow.PrefillRank, memory: Memory, order: Report, line: Line) -> None:
    pages, room = memory.take_pages(), order["room"]
    memory.compute(room, pages)
    cut = FIRST_CHUNK // memory.pool.shape.page_size
    try:
        async with rank.send(name_of(order)) as sender:
            await sender.chunk((0, FIRST_CHUNK), {"kv": pages[:cut]})
            await sender.finish((FIRST_CHUNK, NUM_TOKENS), {"kv": pages[cut:]}, metadata=METADATA.encode())
    except kvflow.KvflowError as error:
        line.report("sent", room=room, why=str(error))
    else:
        line.report("sent", room=room, why="")


async def receive(rank: kvflow.DecodeRank, memory: Memory, order: Report, line: Line) -> None:
    pages, room, prefill = memory.take_pages(), order["room"], order["prefill"]
    by: dict[str, Any] = {"prefill": prefill, "capability": order["capability"]}
    if not isinstance(prefill, dict):
        by["room"] = name_of(order)
    try:
        async with rank.receive(**by, tokens=(0, NUM_TOKENS), pages={"kv": pages}) as receiver:
            handover = await receiver.done()
    except kvflow.KvflowError as error:
        line.report("received", room=room, why=str(error))
    else:
        is_right = memory.is_right(room, pages)
        metadata = handover.metadata.decode()
        line.report("received", room=room, why="", is_right=is_right, metadata=metadata, num_bytes=handover.num_bytes)


async def serve(rank: Any, memory: Memory, line: Line, tasks: TaskGroup) -> None:
    while (order := await next_order(line))["do"] != "leave":
        match order["do"]:
            case "send":
                tasks.start_soon(send, rank, memory, order, line)
            case "receive":
                tasks.start_soon(receive, rank, memory, order, line)
            case "ticket":
                line.report("ticket", room=order["room"], ticket=rank.ticket(name_of(order)))
            case "asked":
                await until(lambda: rank.statistics().waiting_grants)
                line.report("asked")
            case "account":
                await until(lambda: not rank.statistics().rooms)  # the last message of a room may be in flight
                statistics = rank.statistics()
                anomalies = {kind: n for kind, n in statistics.anomalies.items() if kind != "event_loop_starved"}
                quarantined = len(rank.quarantined())
                line.report("account", quarantined=quarantined, anomalies=anomalies)


async def main(options: RankOptions, line: Line) -> None:
    library = kvflow.__file__
    if options.role == "registry":
        async with kvflow.Registry(trust=options.trust) as registry:
            line.report("ready", library=library, endpoint=registry.endpoint)
            while (await next_order(line))["do"] != "leave":
                pass
        return
    memory = Memory(options)
    if options.role == "prefill":
        rank: Any = kvflow.PrefillRank(kvflow.PrefillConfig(**options.common), memory.pool.layout)
    else:
        rank = kvflow.DecodeRank(kvflow.DecodeConfig(digest_every=1, **options.common), memory.pool.layout)
    async with rank, anyio.create_task_group() as tasks:
        line.report("ready", library=library, endpoint=rank.endpoint if options.role == "prefill" else "")
        await serve(rank, memory, line, tasks)


if __name__ == "__main__":
    sys.exit(run_child(lambda options, line: anyio.run(main, options, line), RankOptions))
