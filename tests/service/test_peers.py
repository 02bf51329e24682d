"""Peers that die, and come back as somebody else with the same name."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

import kvflow
from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.state.tables import Memory
from tests.support.failures import catch
from tests.support.instances import decode_config, make_pool
from tests.support.ports import unused_port
from tests.support.prefill_process import FILL, PAGES, TOKENS

pytestmark = pytest.mark.anyio


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
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive, rank, room)
        await prefill.send(str(room))
        await prefill.expect("half")
        await prefill.send("")


@pytest.mark.parametrize("is_port_fixed", [False, True], ids=["any port", "same port"])
async def test_killed_prefill_is_noticed_and_its_successor_is_greeted(is_port_fixed: bool) -> None:
    """The registry still knows the dead life when the second request comes; both lives may even share an address."""
    port = unused_port() if is_port_fixed else 0
    pool = make_pool()
    async with kvflow.Registry() as registry:
        settings = decode_config(registry.endpoint, backend="nixl", timeouts=Timeouts(lease_s=1.0, drain_s=0.5))
        async with kvflow.DecodeRank(settings, pool.layout) as decode:
            async with prefill_process(registry.endpoint, port) as first, anyio.create_task_group() as tasks:
                await hand_over(decode, first, 1)
                receiver = decode.receive(2, prefill="prefill", tokens=TOKENS, pages=PAGES)

                async def receive_and_lose() -> None:
                    async def act() -> None:
                        async with receiver:
                            await receiver.done()

                    failure = await catch(act)
                    assert (failure.reason, failure.rank) == (FailureReason.PEER_LOST, "decode/0")
                    assert failure.quarantined

                tasks.start_soon(receive_and_lose)
                await first.send("2")
                await first.expect("half")
                first.process.kill()
            assert receiver.memory is Memory.QUARANTINED
            assert decode.quarantined() == [receiver]
            async with prefill_process(registry.endpoint, port) as second:
                await hand_over(decode, second, 2)
                assert {int(cell) for page in PAGES["kv"] for cell in pool.cell("v", 1, page, 3, 5)} == {FILL}
                assert decode.statistics().peers == 1
