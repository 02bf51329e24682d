"""A prefill instance in a process of its own: `python -m tests.support.prefill_process REGISTRY BIND`.

For each line "ROOM" on its standard input it sends the first page of that room, says so, and sends the rest when the
next line comes.
"""

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
    async with kvflow.PrefillRank(prefill_config(registry, backend="nixl", bind=bind), pool.layout) as rank:
        print("ready", flush=True)
        while room := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            async with rank.send(int(room)) as sender:
                await sender.chunk((0, 4), {"kv": PAGES["kv"][:1]})
                print("half", flush=True)
                await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
                await sender.finish((4, 8), {"kv": PAGES["kv"][1:]})


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
