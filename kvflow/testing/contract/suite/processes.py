"""Peers in other processes, which can be killed."""

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.abc
import numpy as np
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from kvflow.geometry.plan import Descriptors
from kvflow.testing.contract.base import ContractBase, write
from kvflow.testing.endpoints import Endpoint, descriptors_of, fresh_name

__all__ = ["PIECE", "ProcessContract", "Target", "target_process"]

PIECE = 2**20
NUM_PIECES = 32
SIZE = NUM_PIECES * PIECE

FILL = 7

POLL_S = 0.02

NO_OPTIONS: Final[Mapping[str, object]] = {}


class Target:
    """An endpoint on host memory in its own process; see `kvflow.testing.target`."""

    def __init__(self, name: str, process: anyio.abc.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise TypeError("the process needs pipes")
        self.name = name
        self.process = process
        self.metadata = b""
        self.address = 0
        self._stdin = process.stdin
        self._stdout = BufferedByteReceiveStream(process.stdout)

    async def start(self) -> None:
        """Wait until it can be written to."""
        address, metadata = (await self._line()).split()
        self.address, self.metadata = int(address), bytes.fromhex(metadata)

    async def count(self, value: int) -> int:
        """Return how many of its bytes have a value."""
        await self._stdin.send(b"%d\n" % value)
        return int(await self._line())

    async def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        await self.process.wait()

    def pieces(self, source: Endpoint, *numbers: int) -> Descriptors:
        """Describe copies of some pieces of the source to the same places in the target."""
        src = descriptors_of(source, [number * PIECE for number in numbers], PIECE)
        dst = src.copy()
        dst[:, 0] += np.uint64((self.address - source.address) % 2**64)
        dst[:, 2] = 0
        return Descriptors(src, dst)

    async def _line(self) -> str:
        return (await self._stdout.receive_until(b"\n", SIZE)).decode()


@asynccontextmanager
async def target_process(
    backend: str, num_bytes: int, *, name: str | None = None, options: Mapping[str, object] = NO_OPTIONS
) -> AsyncIterator[Target]:
    """Start a process with `num_bytes` of memory to write to; it is killed on exit."""
    name = name or fresh_name("process")
    words = [backend, json.dumps(dict(options)), name, str(num_bytes)]
    async with await anyio.open_process(
        [sys.executable, "-m", "kvflow.testing.target", *words], stderr=None
    ) as process:
        target = Target(name, process)
        try:
            await target.start()
            yield target
        finally:
            if process.returncode is None:
                await target.kill()


class ProcessContract(ContractBase):
    """Behaviour that requires another process. That process uses host memory, even in tests of other kinds."""

    @asynccontextmanager
    async def open_target(self, name: str | None = None) -> AsyncIterator[Target]:
        """Start a process with an endpoint; it is killed on exit."""
        if not self.reaches_other_processes:
            pytest.skip("works inside one process")
        if "DRAM" not in self.new_backend().capabilities.memory_kinds:
            pytest.skip("registers no host memory")
        async with target_process(self.backend, SIZE, name=name, options=self.options) as target:
            yield target

    async def test_bytes_go_to_another_process(self) -> None:
        async with self.open_target() as target, self.open_one(SIZE) as source:
            await self._write_everything(source, target, 1)

    async def test_a_process_that_comes_back_under_its_old_name_is_reached(self) -> None:
        name = fresh_name("process")
        async with self.open_one(SIZE) as source:
            for incarnation in range(2):
                async with self.open_target(name) as target:
                    await self._write_everything(source, target, incarnation)
                    await source.backend.disconnect(target.name)

    async def test_posts_to_a_process_that_is_killed_end_once_and_hold_up_nobody(self) -> None:
        """Posts in flight may have arrived when it dies; the others end with an error, on closing at the latest."""
        async with self.open_target() as target, self.open_some(SIZE, impatient=True) as (source, other):
            await source.backend.connect(target.name, target.metadata)
            for number in range(NUM_PIECES):
                source.backend.post(number, target.name, target.pieces(source, number), b"")
                source.posted.append(number)
            await target.kill()
            await write(source, other, NUM_PIECES)
            await source.close()
            assert sorted(end.post_id for end in source.ends()) == list(range(NUM_PIECES + 1))

    async def test_nothing_is_held_for_peers_whose_processes_were_killed(self) -> None:
        """Neither for one that was written to, nor for one that was only connected."""
        async with self.open_one(SIZE) as source:
            before = self.num_held()
            async with self.open_target() as written, self.open_target() as unused:
                await source.backend.connect(unused.name, unused.metadata)
                await self._write_everything(source, written, 1)
                for target in (written, unused):
                    await target.kill()
                    await source.backend.disconnect(target.name)
            while self.num_held() > before + 2 * self.held_after_end:  # noqa: ASYNC110 - a library does not tell
                await anyio.sleep(POLL_S)

    async def _write_everything(self, source: Endpoint, target: Target, post_id: int) -> None:
        source.buffer.write(0, np.full(SIZE, FILL + post_id, np.uint8))
        await source.backend.connect(target.name, target.metadata)
        source.backend.post(post_id, target.name, target.pieces(source, *range(NUM_PIECES)), b"")
        source.posted.append(post_id)
        assert (await source.take_end(post_id)).error is None
        assert await target.count(FILL + post_id) == SIZE
