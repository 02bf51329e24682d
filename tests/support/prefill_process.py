"""A prefill instance in a process of its own: `python -m tests.support.prefill_process OPTIONS`.

Orders: `ticket` reports a ticket. `send` sends the first page of a room, reports `half`, and on `finish` sends the
rest, or on `abort` aborts the room; then it reports `over`, and why the room has failed, if it has. `hold` before that
holds the GIL for a number of seconds, and reports `held`; `wait` waits for decode, and reports `granted`. `preempt`
sends a room page by page, takes the pages back in the middle, overwrites them, reports `quiesced`, and continues from
others. On SIGTERM the process finishes open rooms, reports `drained` and exits.
"""

import ctypes
import signal
import sys
from typing import Any

import anyio
import anyio.to_thread
import msgspec

import kvflow
from benchmarks.processes import Line, Report, run_child
from tests.support.instances import make_pool, prefill_config
from tests.support.pools import Pool

__all__ = ["FILL", "MANY_PAGES", "OVERWRITTEN", "PAGES", "TOKENS", "PrefillOptions", "hold_interpreter"]

TOKENS = (0, 8)
PAGES = {"kv": [3, 9]}
FILL = 0x77
OVERWRITTEN = 0xDD
MANY_PAGES = 28
"""Pages of a preempted room; the pool holds twice as many."""


class PrefillOptions(msgspec.Struct, frozen=True):
    """Options of the process: its registry, if any, the endpoint to bind, and further settings of its rank."""

    registry: str | None
    bind: str
    settings: dict[str, Any] = {}


async def main(options: PrefillOptions, line: Line) -> None:
    pool = make_pool()
    fill(pool, FILL)
    settings = prefill_config(options.registry, bind=options.bind, **({"backend": "nixl"} | options.settings))
    async with kvflow.PrefillRank(settings, pool.layout) as rank, anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            tasks.start_soon(serve, rank, pool, line, tasks.cancel_scope)
            async for _ in signals:
                await rank.drain()
                line.report("drained")
                tasks.cancel_scope.cancel()


def fill(pool: Pool, value: int, num_pages: int | None = None) -> None:
    for buffer in pool.buffers:
        buffer.reshape(2, pool.shape.num_pages, -1)[:, :num_pages] = value


async def serve(rank: kvflow.PrefillRank, pool: Pool, line: Line, until_done: anyio.CancelScope) -> None:
    line.report("ready")
    while (order := await next_order(line))["do"] in ("send", "preempt", "ticket"):
        if order["do"] == "ticket":
            line.report("ticket", room=order["room"], ticket=rank.ticket(order["room"]))
            continue
        failure = None
        try:
            if order["do"] == "send":
                await send(rank, order["room"], line)
            else:
                await preempt(rank, pool, order["room"], line)
        except kvflow.TransferFailed as error:
            failure = str(error)
        line.report("over", room=order["room"], failure=failure)
    until_done.cancel()


async def send(rank: kvflow.PrefillRank, room: int, line: Line) -> None:
    async with rank.send(room) as sender:
        await sender.chunk((0, 4), {"kv": PAGES["kv"][:1]})
        line.report("half", room=room)
        while (order := await next_order(line))["do"] in ("hold", "wait"):
            if order["do"] == "wait":
                await sender.granted()
                line.report("granted", room=room)
                continue
            hold_interpreter(order["seconds"])
            line.report("held")
        if order["do"] == "abort":
            sender.abort()
        else:
            await sender.finish((4, 8), {"kv": PAGES["kv"][1:]})


async def preempt(rank: kvflow.PrefillRank, pool: Pool, room: int, line: Line) -> None:
    size = pool.shape.page_size
    fill(pool, FILL)
    async with rank.send(room) as sender:
        await sender.granted()
        for page in range(MANY_PAGES):
            await sender.chunk((page * size, (page + 1) * size), {"kv": [page]})
        start = await sender.quiesce() or 0
        fill(pool, OVERWRITTEN, MANY_PAGES)
        line.report("quiesced", room=room, start=start)
        others = list(range(MANY_PAGES + start // size, 2 * MANY_PAGES))
        await sender.finish((start, MANY_PAGES * size), {"kv": others})


def hold_interpreter(seconds: int) -> None:
    """Let no Python thread run, like a native call that keeps the GIL."""
    ctypes.PyDLL(None).sleep(seconds)


async def next_order(line: Line) -> Report:
    """Wait for the next order, in a thread that is abandoned when the drained process exits."""
    return await anyio.to_thread.run_sync(line.receive, abandon_on_cancel=True)


if __name__ == "__main__":
    sys.exit(run_child(lambda options, line: anyio.run(main, options, line), PrefillOptions))
