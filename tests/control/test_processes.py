"""Shortage of resources in a process, and what its children must not keep."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvflow.control.channel import ZmqControl

SHORTAGE = """
import asyncio, os, resource
from kvflow.errors import Shortage
from kvflow.resources import RESERVED, descriptors
from kvflow.control.channel import ZmqControl
from tests.support.waiting import until
from tests.control.ends import Client, Server, meet

LIMIT = 200

def open_files():
    return {fd for fd in range(LIMIT) if is_open(fd)}

def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True

def fill():
    fillers = []
    while True:
        try:
            fillers.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return fillers

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    server = Server()
    await meet(server, Client(server.endpoint))
    descriptors.draw(RESERVED)
    fillers = fill()
    for num_free in range(3):
        for fd in fillers[:num_free]:
            os.close(fd)
        del fillers[:num_free]
        for make in (lambda: Client(server.endpoint), Server):
            if make is Server and num_free > 1:
                continue
            before = open_files()
            try:
                make()
            except Shortage as refused:
                assert "Too many open files" in str(refused), refused
            else:
                raise SystemExit(f"{num_free} descriptors are not enough")
            await until(lambda: open_files() == before)
        fillers += fill()
    for fd in fillers[:12]:
        os.close(fd)
    await meet(server, Client(server.endpoint))
    print("works again")

asyncio.run(main())
"""


def test_a_process_without_descriptors_says_so_and_leaks_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORTAGE], capture_output=True, text=True, timeout=50, check=False, stdin=subprocess.PIPE
    )
    assert (done.returncode, done.stdout) == (0, "works again\n"), done.stderr


FORKED = """
import asyncio, os, sys
from kvflow.control.channel import ZmqControl
from tests.support.waiting import until
from tests.control.ends import Client, Server, meet

def is_closed(fd):
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False

async def main():
    server = Server()
    await meet(server, Client(server.endpoint))
    if "keep" in sys.argv:
        server.close(keep_port=True)
        await until(lambda: is_closed(server.listener._fd))
    if os.fork() == 0:
        os.write(1, (server.endpoint + "\\n").encode())
        sys.stdin.read()
        os._exit(0)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@contextmanager
def parent_of_a_child(*words: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Start a listening process with a forked child that survives it; yield the process and its endpoint."""
    command = [sys.executable, "-c", FORKED, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        try:
            yield parent, parent.stdout.readline().decode().strip()
        finally:
            parent.kill()


@pytest.mark.anyio
async def test_a_forked_child_does_not_keep_the_port() -> None:
    """Peers take a refused port as proof that its process has ended."""
    with parent_of_a_child() as (parent, endpoint):
        assert endpoint.startswith("tcp://127.0.0.1:")
        parent.kill()
        parent.wait()
        assert await ZmqControl().is_refused(endpoint, 5.0)


@pytest.mark.anyio
async def test_a_port_that_is_kept_is_refused_when_its_process_has_ended() -> None:
    with parent_of_a_child("keep") as (parent, endpoint):
        assert endpoint.startswith("tcp://127.0.0.1:")
        assert not await ZmqControl().is_refused(endpoint, 5.0)
        parent.kill()
        parent.wait()
        assert await ZmqControl().is_refused(endpoint, 5.0)


CHILD_WORKS = """
import asyncio, os, sys
from tests.control.ends import Client, Server, meet

async def talk():
    server = Server()
    await meet(server, Client(server.endpoint))

async def main():
    server = Server()
    client = Client(server.endpoint)
    await meet(server, client)
    await meet(server, client)

asyncio.run(main())
if os.fork() == 0:
    asyncio.run(talk())
    os._exit(7)
_, status = os.wait()
asyncio.run(talk())
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_may_have_sockets_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD_WORKS], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
