"""A process that has used a transport exits with its own code, and prints nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.abc
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from kvflow.testing.contract.suite.processes import target_process
from tests.support.slow import slow_except

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
SIZE = 16 * 2**20
MAX_LINE = 2**20

PROGRAM = """
import signal
import sys

import anyio
import anyio.to_thread

from kvflow.backends import create_backend
from kvflow.geometry.plan import Descriptors
from kvflow.testing.buffers import HostBuffer
from kvflow.testing.endpoints import Endpoint, descriptors_of

name, address, metadata, size = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), int(sys.argv[4])


def post(endpoint):
    first = len(endpoint.posted)
    for number in range(first, first + 8):
        src = descriptors_of(endpoint, range(0, size, 65536), 65536)
        dst = src.copy()
        dst[:, 0] += (address - endpoint.address) % 2**64
        endpoint.backend.post(number, "target", Descriptors(src, dst), b"")
        endpoint.posted.append(number)


async def told(word):
    print(word, flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)


async def main(stack):
    endpoint = Endpoint("me", create_backend(name, {{}}), HostBuffer(size))
    await endpoint.open()
    stack.push_async_callback(endpoint.close)  # which nothing but the stack does; a generator is closed with the loop
    await endpoint.backend.register(endpoint.buffer.layout())
    await endpoint.backend.connect("target", metadata)
    post(endpoint)
    {end}


{run}
"""

CLOSED = """
async def closed():
    async with AsyncExitStack() as stack:
        await main(stack)

from contextlib import AsyncExitStack
anyio.run(closed)
"""

LEFT_OPEN = """
from contextlib import AsyncExitStack
stack = AsyncExitStack()
anyio.run(main, stack)
"""

INTERRUPTED = (
    CLOSED.replace("anyio.run(closed)", "")
    + """
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
try:
    anyio.run(closed)
except KeyboardInterrupt:
    sys.exit(5)
"""
)

END = "await endpoint.take_ends(8)"
AFTER_DEATH = f"{END}; await told('ended'); post(endpoint)"
WAYS = {
    "closed while writes run": ("pass", CLOSED, 0),
    "left open while writes run": ("pass", LEFT_OPEN, 0),
    "left open after writes": (END, LEFT_OPEN, 0),
    "left open while it polls": (f"{END}; endpoint.backend.watch(active=True)", LEFT_OPEN, 0),
    "exits while writes run": ("sys.exit(3)", CLOSED, 3),
    "exits with the endpoint left open": ("sys.exit(3)", LEFT_OPEN, 3),
    "interrupted": ("signal.raise_signal(signal.SIGINT); await anyio.sleep_forever()", INTERRUPTED, 5),
    "terminated": ("signal.raise_signal(signal.SIGTERM)", CLOSED, -signal.SIGTERM),
    "closed after the peer has died": (AFTER_DEATH, CLOSED, 0),
    "left open after the peer has died": (f"{AFTER_DEATH}; await endpoint.take_ends(16)", LEFT_OPEN, 0),
}
"""Last statement, way to run it, and exit code."""

QUICK = {"left open while writes run"}
"""The way that runs without `slow`: the library's threads are busy when the process ends."""


@pytest.mark.parametrize("way", slow_except(QUICK, WAYS))
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
async def test_a_process_ends_as_it_wants_and_prints_nothing(backend: str, way: str) -> None:
    end, run, code = WAYS[way]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_", "MC_"))}
    async with target_process(backend, SIZE, name="target") as target:
        words = [backend, str(target.address), target.metadata.hex(), str(SIZE)]
        command = [sys.executable, "-c", PROGRAM.format(end=end, run=run), *words]
        async with await anyio.open_process(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            if AFTER_DEATH in end:
                assert await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", MAX_LINE) == b"ended"
                await target.kill()
                await process.stdin.send(b"\n")
            printed = [part async for part in process.stdout]
            errors = [part async for part in process.stderr]
            assert (await process.wait(), b"".join(printed), b"".join(errors)) == (code, b"", b"")


RANKS = """
import anyio
import anyio.lowlevel
import kvflow
from tests.support.instances import decode_config, make_pool, prefill_config

async def main():
    opened.append(await kvflow.Registry().__aenter__())
    pools.extend([make_pool(), make_pool()])
    address, (source, target) = opened[0].endpoint, pools
    opened.append(await kvflow.PrefillRank(prefill_config(address, backend={0!r}), source.layout).__aenter__())
    opened.append(await kvflow.DecodeRank(decode_config(address, backend={0!r}), target.layout).__aenter__())
    await anyio.lowlevel.checkpoint()  # so that their tasks have begun

opened, pools = [], []
anyio.run(main)
"""


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
async def test_a_process_that_leaves_its_ranks_open_ends_and_prints_nothing(backend: str) -> None:
    command = [sys.executable, "-c", RANKS.format(backend)]
    ended = await anyio.run_process(command, cwd=ROOT, check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
