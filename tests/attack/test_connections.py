"""Silent connections, and as many connections as a process can have."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import anyio
import anyio.lowlevel
import pytest

import kvflow
from benchmarks.resources import num_files
from tests.attack.guarded import guarded, works
from tests.attack.insiders import under_way
from tests.support.instances import decode_config, deploy, make_pool
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SILENT = 5_000
FREE = 60
"""File descriptors that the process has left."""


@contextmanager
def files(limit: int) -> Iterator[None]:
    """Limit the file descriptors of this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connect(endpoint: str) -> socket.socket:
    host, port = endpoint.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection."""
    connection.setblocking(False)
    with suppress(BlockingIOError):
        try:
            while connection.recv(256):  # a greeting
                pass
        except ConnectionError:
            pass
        return True
    return False


async def test_thousands_that_never_speak_are_closed() -> None:
    """Each costs two descriptors in this process, one at each end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(SILENT, (most - 500) // 2)
    async with guarded() as deployment, under_way(deployment) as honest:
        with files(most), ExitStack() as stack:
            silent = []
            for number in range(count):
                silent.append(stack.enter_context(connect(deployment.prefill[0].endpoint)))
                if number % 50 == 0:
                    await anyio.lowlevel.checkpoint()
            await honest.go_on()
            await until(lambda: all(map(is_closed, silent)))
            await honest.go_on()


async def test_rank_without_descriptors_goes_on_and_takes_new_peers_once_there_are_some() -> None:
    async with deploy() as deployment, under_way(deployment) as honest:
        prefill = deployment.prefill[0]
        await honest.go_on()  # its ranks are connected
        with ExitStack() as stack, files(num_files() + FREE):
            taken = 0
            with suppress(OSError):
                while True:
                    stack.enter_context(connect(prefill.endpoint))
                    taken += 1
                    await anyio.lowlevel.checkpoint()
            assert taken > FREE // 4
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            await honest.go_on()
        config = decode_config(deployment.registry.endpoint)
        with anyio.fail_after(10):
            async with kvflow.DecodeRank(config, make_pool().layout):
                await works(deployment, 78)
