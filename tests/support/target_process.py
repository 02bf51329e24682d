"""Memory to write to in a process of its own, with nothing but a NIXL agent: `python -m tests.support.target_process`.

It prints its agent's name, its address and its metadata, and lives until its standard input is closed or it is killed.
"""

import os
import sys

import anyio
import anyio.to_thread
import numpy as np

from kvflow.backends.nixl import NixlBackend
from tests.backends.endpoints import make_layout

__all__ = ["NUM_BYTES"]

NUM_BYTES = 128 * 2**20


async def main() -> None:
    memory = np.zeros(NUM_BYTES, np.uint8)
    name, address = f"target-{os.getpid()}", int(memory.ctypes.data)
    async with NixlBackend() as backend:
        await backend.open(name)
        await backend.register(make_layout(address, NUM_BYTES))
        backend.watch(active=True)
        print(name, address, backend.metadata().hex(), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)


if __name__ == "__main__":
    anyio.run(main)
