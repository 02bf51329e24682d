"""Target memory in its own process: `python -m kvflow.testing.target BACKEND OPTIONS NAME NUM_BYTES`.

It prints its address and its metadata (in hex). For each number that it reads, it then prints how many of its bytes
have that value. It ends at the end of its standard input. Options are JSON.
"""

import functools
import json
import sys

import anyio
import anyio.to_thread

from kvflow.backends import create_backend
from kvflow.errors import BackendError
from kvflow.testing.buffers import HostBuffer

__all__ = ["main", "say"]


async def main(backend_name: str, options: str, name: str, num_bytes: str) -> None:
    """Serve until standard input ends."""
    buffer = HostBuffer(int(num_bytes))
    async with create_backend(backend_name, json.loads(options)) as backend:
        await backend.open(name, lambda _: None, end_with)
        await backend.register(buffer.layout())
        backend.watch(active=True)
        say(f"{buffer.address} {backend.metadata().hex()}")
        while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            say(str(int((buffer.memory == int(line)).sum())))


def end_with(error: BackendError) -> None:
    """End the process, because its memory can no longer be written to."""
    raise SystemExit(str(error))


def say(line: str) -> None:
    """Answer the parent process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(functools.partial(main, *sys.argv[1:]))
