"""The other end of `prefill_process`: how a test drives it, and a decode rank that receives from it."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

import kvflow
from tests.support.prefill_process import PAGES, TOKENS

__all__ = ["PrefillProcess", "hand_over", "prefill_process", "receive"]


class PrefillProcess:
    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self.process = process
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def expect(self, word: str) -> None:
        assert await self._lines.receive_until(b"\n", 100) == word.encode()

    async def send(self, line: str) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send(line.encode() + b"\n")


@asynccontextmanager
async def prefill_process(registry: str, port: int) -> AsyncIterator[PrefillProcess]:
    command = [sys.executable, "-m", "tests.support.prefill_process", registry, f"tcp://127.0.0.1:{port}"]
    async with await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None) as process:
        prefill = PrefillProcess(process)
        await prefill.expect("ready")
        yield prefill
        if process.stdin is not None and process.returncode is None:
            await process.stdin.aclose()
            assert await process.wait() == 0


async def receive(rank: kvflow.DecodeRank, room: int) -> kvflow.Handover:
    async with rank.receive(room, prefill="prefill", tokens=TOKENS, pages=PAGES) as receiver:
        return await receiver.done()


async def hand_over(rank: kvflow.DecodeRank, prefill: PrefillProcess, room: int) -> None:
    """Send a room in two parts, and receive it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive, rank, room)
        await prefill.send(str(room))
        await prefill.expect("half")
        await prefill.send("")
