"""Transports in a process that can start no more threads, and in a forked one."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kvflow.backends import create_backend
from kvflow.backends.mooncake.backend import MooncakeBackend
from kvflow.backends.owner import OwnerThread, PollIntervals
from kvflow.errors import BackendError, BackendUnavailable
from tests.backends.endpoints import open_backend, open_bare
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


POLLS = PollIntervals(1e-4, 1e-4, 1e-4)

STARTERS = ("_start_new_thread", "_start_joinable_thread")
"""Functions by which `threading` starts threads, in different versions of Python."""


class Shortage:
    """Lets no thread start between `begin` and `end`."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self.num_refused = 0

    def begin(self) -> None:
        def refuse(*_: object, **__: object) -> None:
            self.num_refused += 1
            raise RuntimeError("can't start new thread")

        for name in STARTERS:
            self._patch.setattr(threading, name, refuse, raising=False)

    def end(self) -> None:
        self._patch.undo()


@pytest.fixture
def shortage() -> Iterator[Shortage]:
    shortage = Shortage()
    yield shortage
    shortage.end()


def test_an_owner_thread_that_cannot_start_leaves_nothing_behind(shortage: Shortage) -> None:
    class OnCrash:
        def __call__(self, error: Exception) -> None:
            raise error

    def start(on_crash: OnCrash) -> dict[str, object]:
        with pytest.raises(BackendUnavailable, match="cannot start a thread") as caught:
            OwnerThread("late", on_crash, POLLS)
        return caught.value.values

    threads, on_crash = set(threading.enumerate()), OnCrash()
    held = weakref.ref(on_crash)
    shortage.begin()
    assert start(on_crash) == {"thread": "late"}
    del on_crash
    gc.collect()
    assert held() is None  # no exit handler is left for a thread that never started
    assert set(threading.enumerate()) <= threads  # threads of an earlier test may end meanwhile


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["nixl", "mooncake"])
async def test_a_transport_without_a_thread_is_not_available(name: str, shortage: Shortage) -> None:
    backend = create_backend(name, {})
    shortage.begin()
    with pytest.raises(BackendUnavailable, match="cannot start a thread"):
        await open_bare(backend)
    shortage.end()
    await open_bare(backend)
    await backend.aclose()


def test_a_peer_is_not_connected_without_a_thread_and_can_be_later(shortage: Shortage) -> None:
    async def run() -> None:
        async with open_backend(MooncakeBackend()) as source, open_backend(MooncakeBackend()) as target:
            shortage.begin()
            with pytest.raises(BackendError, match="cannot start a thread"):
                await source.connect(target)
            shortage.end()
            await source.connect(target)

    anyio.run(run)


def test_waiting_for_what_ended_processes_have_written_outlasts_a_shortage(shortage: Shortage) -> None:
    async def run() -> None:
        async with open_backend(MooncakeBackend()) as target:
            shortage.begin()
            async with anyio.create_task_group() as tasks:
                answers: list[bool] = []

                async def ask() -> None:
                    answers.append(await target.backend.outlast(target.backend.domain()))

                tasks.start_soon(ask)
                await until(lambda: shortage.num_refused)
                assert not answers
                shortage.end()
            assert answers == [True]

    anyio.run(run)


FORK = """
import os
import sys
import threading

import anyio

from kvflow.backends import create_backend
from kvflow.errors import BackendError
from kvflow.testing.buffers import HostBuffer
from kvflow.testing.endpoints import Endpoint, copies, fresh_name, random_bytes, same

def finish(coroutine):
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise SystemExit("it waits, and there is nothing to wait for")

def refused(call):
    try:
        call()
    except BackendError as error:
        return "forked" in str(error)
    return False

def use_in_child(source, target):
    assert threading.active_count() == 1
    assert refused(lambda: source.backend.post(1, target.name, copies(source, target), b""))
    assert refused(lambda: finish(source.backend.connect("other", b"")))
    source.backend.watch(active=True)
    finish(source.backend.disconnect(target.name))
    finish(source.backend.aclose())

async def main():
    for _ in range(2):
        endpoint = Endpoint(fresh_name(), create_backend({name!r}, {{}}), HostBuffer(4096))
        await endpoint.open()
        await endpoint.backend.register(endpoint.buffer.layout())
        endpoint.buffer.write(0, random_bytes(4096, len(endpoints)))
        endpoints.append(endpoint)
    source, target = endpoints
    await source.connect(target)
    source.post(0, target, copies(source, target))
    await source.take_ends()
    child = os.fork() if {in_loop} else None
    if child == 0:
        use_in_child(source, target)
        os._exit(7)
    if child is not None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    source.post(2, target, copies(source, target, (64,)))
    await source.take_ends(2)
    assert same(source, target, 0, 128)
    if {in_loop}:
        await source.close()
        await target.close()

endpoints = []
anyio.run(main)
if not {in_loop}:
    child = os.fork()
    if child == 0:
        use_in_child(*endpoints)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.anyio
@pytest.mark.parametrize("in_loop", [True, False], ids=["child leaves at once", "child is torn down"])
@pytest.mark.parametrize("name", ["nixl", "mooncake"])
async def test_a_forked_child_leaves_the_endpoint_to_its_parent(name: str, in_loop: bool) -> None:
    """The child cannot use the endpoint, does not disturb it, and exits normally."""
    program = FORK.format(name=name, in_loop=in_loop)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_", "MC_"))}
    ended = await anyio.run_process(command, cwd=ROOT, env=environment, check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
