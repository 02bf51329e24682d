"""A process that is killed in the middle of large writes of NIXL: `python -m tests.backends.last_bytes ROUNDS`.

Each round starts a writer, kills it once some bytes have arrived, and waits for `Backend.outlast`. It reports how many
bytes land between the death and that proof, and how many after it, which must be none. `UCX_TLS` selects the transport.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np

from kvflow.backends.base import BackendEvent
from kvflow.backends.nixl import NixlBackend
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.plan import Descriptors

__all__ = ["Landing", "kill_writers"]

NUM_BYTES: Final = 64 * 2**20
PIECE: Final = 2**20
WATCHED_S: Final = 0.4
RARELY_S: Final = 0.1
"""Pause between polls of the receiver, long enough that bytes sent over TCP pile up in its sockets."""


class Landing(msgspec.Struct):
    """Bytes that land after a process is killed.

    Attributes:
        is_proved: The transport proved that nothing lands any more.
        elapsed_s: From the death to the proof.
        num_arrived: Bytes that had landed at the death.
        num_late: Bytes that landed between the death and the proof.
        num_after_proof: Bytes that landed after the proof.
    """

    is_proved: bool
    elapsed_s: float
    num_arrived: int
    num_late: int
    num_after_proof: int


def layout_of(memory: Any) -> KVLayout:
    """Return a layout of one region with pages of `PIECE` bytes."""
    address = int(memory.ctypes.data)
    region = Region("k", 0, address, NUM_BYTES // PIECE, PIECE, 1, PIECE, (0, 1), PIECE, PIECE, "uint8")
    return KVLayout((Component("kv", (region,)),), "last bytes", (MemoryRange(address, NUM_BYTES),))


def ignore(_: object) -> None:
    """Ignore an event or the reason of a breakdown."""


async def write(name: str, metadata: bytes, address: int) -> None:
    """Write to another process until killed."""
    memory = np.full(NUM_BYTES, 0x77, np.uint8)
    async with NixlBackend() as backend:
        ended = anyio.Event()

        def on_events(events: Any) -> None:
            if any(not isinstance(event, BackendEvent) for event in events):
                raise TypeError(events)
            ended.set()

        await backend.open("writer", on_events, ignore)
        await backend.register(layout_of(memory))
        await backend.connect(name, metadata)
        sys.stdout.write(backend.domain().hex() + "\n")
        sys.stdout.flush()
        starts = np.arange(0, NUM_BYTES, PIECE, dtype=np.uint64)
        rows = [np.stack((np.uint64(to) + starts, np.full_like(starts, PIECE), starts * np.uint64(0)), axis=1)
                for to in (memory.ctypes.data, address)]  # fmt: skip
        for post_id in range(10**6):
            backend.post(post_id, name, Descriptors(*rows), b"")
            await ended.wait()
            ended = anyio.Event()


async def kill_one(backend: NixlBackend, name: str, memory: Any) -> Landing:
    """Start a writer, kill it in the middle of its first write, and measure what lands."""
    memory[:] = 0
    command = [
        sys.executable,
        "-m",
        "tests.backends.last_bytes",
        name,
        backend.metadata().hex(),
        str(memory.ctypes.data),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220 - it is quick
    try:
        assert process.stdout is not None
        domain = bytes.fromhex((await anyio.to_thread.run_sync(process.stdout.readline)).decode())
        while not memory[:: PIECE // 2].any():
            await anyio.lowlevel.checkpoint()
    finally:
        process.kill()
        process.communicate()
    died_at = time.monotonic()
    arrived = np.count_nonzero(memory)
    is_proved = await backend.outlast(domain)
    elapsed_s = time.monotonic() - died_at
    proved = np.count_nonzero(memory)
    await anyio.sleep(WATCHED_S)
    return Landing(is_proved, elapsed_s, int(arrived), int(proved - arrived), int(np.count_nonzero(memory) - proved))


async def receive(num_rounds: int) -> list[Landing]:
    """Kill `num_rounds` writers, one after another."""
    memory = np.zeros(NUM_BYTES, np.uint8)
    async with NixlBackend(idle_interval_s=RARELY_S) as backend:
        await backend.open("receiver", ignore, ignore)
        await backend.register(layout_of(memory))
        return [await kill_one(backend, "receiver", memory) for _ in range(num_rounds)]


def kill_writers(num_rounds: int, environment: Mapping[str, str]) -> list[Landing]:
    """Kill `num_rounds` writers in a subprocess with this environment."""
    command = [sys.executable, "-m", "tests.backends.last_bytes", str(num_rounds)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Landing])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        anyio.run(functools.partial(write, sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])))
    else:
        sys.stdout.write(msgspec.json.encode(anyio.run(receive, int(sys.argv[1]))).decode() + "\n")
