"""An endpoint in a process of its own: `python -m tests.support.mooncake_process NAME NUM_BYTES`.

It says its metadata in hex, and for each number on its standard input how many of its bytes have that value.
"""

import sys

import anyio
import anyio.to_thread
import numpy as np

from kvflow.backends.mooncake import MooncakeBackend
from tests.backends.endpoints import make_layout

__all__: list[str] = []


async def main(name: str, num_bytes: int) -> None:
    memory = np.zeros(num_bytes, np.uint8)
    async with MooncakeBackend() as backend:
        await backend.open(name)
        await backend.register(make_layout(int(memory.ctypes.data), num_bytes))
        print(backend.metadata().hex(), flush=True)
        while value := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            print(int((memory == int(value)).sum()), flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]))
