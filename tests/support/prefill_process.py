"""A prefill instance in a process of its own: `python -m tests.support.prefill_process REGISTRY BIND`.

For each line "ROOM" on its standard input it sends the first page of that room, says so, and sends the rest when the
next line comes. On SIGTERM it finishes what it has begun, says "drained" and ends.
"""

import signal
import sys

import anyio
import anyio.to_thread

import kvflow
from tests.support.instances import make_pool, prefill_config

__all__ = ["FILL", "PAGES", "TOKENS"]

TOKENS = (0, 8)
PAGES = {"kv": [3, 9]}
FILL = 0x77


async def main(registry: str, bind: str) -> None:
    pool = make_pool()
    for buffer in pool.buffers:
        buffer[:] = FILL
    settings = prefill_config(registry, backend="nixl", bind=bind)
    async with kvflow.PrefillRank(settings, pool.layout) as rank, anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            tasks.start_soon(serve, rank, tasks.cancel_scope)
            async for _ in signals:
                await rank.drain()
                print("drained", flush=True)
                tasks.cancel_scope.cancel()


async def serve(rank: kvflow.PrefillRank, until_done: anyio.CancelScope) -> None:
    print("ready", flush=True)
    while room := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        async with rank.send(int(room)) as sender:
            await sender.chunk((0, 4), {"kv": PAGES["kv"][:1]})
            print("half", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
            await sender.finish((4, 8), {"kv": PAGES["kv"][1:]})
    until_done.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
