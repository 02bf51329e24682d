"""Behaviour of Mooncake alone: installation, output, the fallback to TCP, and leaks."""

import asyncio
import gc
import importlib.metadata
import os
import resource
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest

from benchmarks.resources import num_files
from kvflow.backends import create_backend, library_sockets
from kvflow.backends.metadata import PeerMetadata
from kvflow.backends.mooncake import MooncakeBackend, engine, library
from kvflow.backends.mooncake import agent as mooncake_agent
from kvflow.backends.mooncake import backend as mooncake_backend
from kvflow.backends.mooncake.address import EndpointAddress
from kvflow.backends.mooncake.library import BUILDS
from kvflow.errors import BackendError, BackendUnavailable, ConfigError, RegistrationError
from kvflow.geometry import MemoryRange
from kvflow.testing.buffers import HostBuffer
from kvflow.testing.endpoints import open_endpoint
from tests.backends.endpoints import copies, fresh_name, make_layout, open_backend, open_bare, open_endpoints, same
from tests.backends.recording import record_waits
from tests.support.ports import unused_port
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
CPU_BUILD = "mooncake-transfer-engine-non-cuda"


def pretend_installed(monkeypatch: pytest.MonkeyPatch, *builds: str) -> None:
    monkeypatch.setattr(library, "installed_builds", lambda: list(builds))


def has_thread(agent_name: str) -> bool:
    return any(thread.name.endswith(f"-{agent_name}") for thread in threading.enumerate())


async def unavailable(backend: MooncakeBackend) -> BackendUnavailable:
    """Return why a backend does not open; it leaves no thread behind, and can be closed."""
    name = fresh_name()
    async with backend:
        with pytest.raises(BackendUnavailable) as caught:
            await open_bare(backend, name)
        assert not has_thread(name)
        with pytest.raises(BackendError):
            await backend.register(make_layout(4096, 1))
    return caught.value


async def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    error = await unavailable(MooncakeBackend())
    for extra in ("mooncake-cpu", "mooncake", "mooncake-cuda13", "mooncake-npu"):
        assert f"kvflow[{extra}]" in str(error)


async def test_two_builds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = ["mooncake-transfer-engine", CPU_BUILD]
    pretend_installed(monkeypatch, *builds)
    error = await unavailable(MooncakeBackend())
    assert error.values == {"installed": builds}


async def test_a_library_that_does_not_load_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    error = await unavailable(MooncakeBackend())
    assert "libibverbs1" in str(error)
    assert "mooncake.engine" in str(error.values["detail"])


def test_the_installed_build_is_found() -> None:
    assert library.installed_builds() == [CPU_BUILD]
    assert importlib.metadata.version(CPU_BUILD)


@pytest.mark.parametrize("build", [*BUILDS, None])
async def test_device_memory_is_registered_only_by_builds_that_can(
    monkeypatch: pytest.MonkeyPatch, build: str | None
) -> None:
    pretend_installed(monkeypatch, *([build] if build else []))
    kinds = MooncakeBackend().capabilities.memory_kinds
    assert kinds == (BUILDS[build] if build else {"DRAM"})
    assert ("VRAM" in kinds) == (build in {"mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"})


async def test_device_memory_is_refused_by_the_build_for_hosts() -> None:
    async with MooncakeBackend() as backend:
        await open_bare(backend)
        with pytest.raises(RegistrationError) as caught:
            await backend.register(make_layout(4096, 64, memory_kind="VRAM"))
        assert caught.value.values["memory_kind"] == "VRAM"


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": "pigeon"},
        {"window": 0},
        {"window": 1025},
        {"host": ""},
        {"host": "127.0.0.1:17000"},
        {"host": "[::1]"},
        {"metadata_server": ""},
    ],
    ids=str,
)
def test_unusable_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        create_backend("mooncake", options)
    assert set(options) <= set(caught.value.values) | {"metadata_server"}


async def test_a_directory_for_logs_is_refused_because_it_would_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MC_LOG_DIR", "/nowhere")
    error = await unavailable(MooncakeBackend())
    assert error.values == {"MC_LOG_DIR": "/nowhere"}


async def test_rdma_is_refused_where_the_library_would_use_tcp_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert "MC_FORCE_TCP" in str(await unavailable(MooncakeBackend(protocol="rdma")))
    monkeypatch.delenv("MC_FORCE_TCP")
    assert "no RDMA device" in str(await unavailable(MooncakeBackend(protocol="rdma", devices=["mlx5_0"])))


async def test_peers_of_another_protocol_are_refused() -> None:
    async with open_endpoints("mooncake") as (source, target):
        await source.backend.disconnect(target.name)
        metadata = PeerMetadata.unpack(target.backend.metadata(), backend="mooncake")
        address = EndpointAddress.unpack(metadata.agent, agent=target.name, protocol="tcp")
        other = msgspec.structs.replace(address, protocol="rdma").pack()
        with pytest.raises(BackendError, match="protocol") as caught:
            await source.backend.connect(target.name, msgspec.structs.replace(metadata, agent=other).pack())
        assert caught.value.values == {"mine": "tcp", "theirs": "rdma"}


async def test_the_environment_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_TEST_SET", "mine")
    monkeypatch.delenv("KVFLOW_TEST_UNSET", raising=False)
    backend = create_backend("mooncake", {"environment": {"KVFLOW_TEST_SET": "x", "KVFLOW_TEST_UNSET": "y"}})
    async with open_backend(backend):
        assert (os.environ["KVFLOW_TEST_SET"], os.environ.pop("KVFLOW_TEST_UNSET")) == ("mine", "y")


async def test_memory_that_the_engine_has_registered_itself_is_refused() -> None:
    async with MooncakeBackend() as backend:
        await open_bare(backend)
        assert backend._agent is not None
        with pytest.raises(RegistrationError, match="overlaps") as caught:
            await backend.register(make_layout(backend._agent.address.incarnation_address, 8))
        assert caught.value.values["code"] == engine.OVERLAP
        with pytest.raises(BackendError):
            backend.metadata()


@pytest.mark.parametrize("pins", [True, False])
async def test_memory_that_is_refused_is_named_with_the_limit_where_it_would_be_pinned(
    monkeypatch: pytest.MonkeyPatch, *, pins: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    async with MooncakeBackend() as backend:
        await open_bare(backend)
        assert backend._agent is not None
        one = backend._agent._target
        monkeypatch.setattr(one, "_is_tcp", not pins)
        monkeypatch.setattr(one, "_native", SimpleNamespace(batch_register_memory=lambda *_: -1))
        with pytest.raises(RegistrationError, match="num_bytes=64") as caught:
            one.register([MemoryRange(4096, 64)])
        monkeypatch.undo()
    assert ("RLIMIT_MEMLOCK is 4096 bytes" in str(caught.value)) == pins


async def test_opening_can_be_cancelled() -> None:
    name = fresh_name()
    async with MooncakeBackend() as backend:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await open_bare(backend, name)
        with pytest.raises(BackendError):
            await backend.register(make_layout(4096, 1))
    assert not has_thread(name)


async def test_an_engine_is_given_back_if_a_task_is_cancelled_while_it_is_borrowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`asyncio.Task.cancel` also reaches a wait that anyio shields."""
    begun, goes_on = threading.Event(), threading.Event()
    borrow = mooncake_agent.Agent.borrow_sender

    def borrow_slowly(agent: mooncake_agent.Agent, *args: Any) -> engine.WritingEngine:
        begun.set()
        goes_on.wait()
        return borrow(agent, *args)

    monkeypatch.setattr(mooncake_agent.Agent, "borrow_sender", borrow_slowly)
    backend = MooncakeBackend()
    async with open_backend(backend, 4096), open_backend(MooncakeBackend(), 4096) as target:
        connecting = asyncio.ensure_future(backend.connect(target.name, target.backend.metadata()))
        await until(begun.is_set)
        connecting.cancel()
        await asyncio.wait([connecting])
        goes_on.set()
        assert not await backend._call(lambda agent: [one for one in agent._engines if one.num_users])


async def test_the_owner_sleeps_unless_something_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, status = record_waits(monkeypatch), [0]
    check = engine.MooncakeEngine.check
    monkeypatch.setattr(
        engine.MooncakeEngine, "check", lambda self, transfer_id: check(self, transfer_id) if status[0] else 0
    )
    busy_s, check_s = 1.5e-4, 1e-2
    monkeypatch.setattr(mooncake_backend, "CHECK_S", check_s)
    monkeypatch.setattr(mooncake_agent, "CHECK_S", check_s)
    async with (
        open_endpoints("mooncake", count=1, options={"busy_interval_s": busy_s}) as (source,),
        open_backend(MooncakeBackend()) as target,
    ):
        await source.connect(target)
        assert busy_s not in waits
        source.post(1, target, copies(source, target))
        await until(lambda: waits.count(busy_s) > 20)
        status[0] = 1
        await source.take_ends()
        await until(lambda: waits[-1] is None)
        with monkeypatch.context() as patch:  # as if something were unacknowledged
            patch.setattr(library_sockets, "_info", lambda _: (library_sockets.ESTABLISHED, 0, 1, 0, 0))
            source.backend.watch(active=False)
            await until(lambda: waits[-3:] == [check_s] * 3)
        source.backend.watch(active=True)
        num_waits = len(waits)
        await until(lambda: waits[num_waits:].count(check_s) > 3)
        source.backend.watch(active=False)
        await until(lambda: waits[-1] is None)
        num_waits = len(waits)
        await target.close()
        assert len(waits) <= num_waits + 8  # commands that close the target


async def session_of(backend: MooncakeBackend) -> str:
    """Return the session that an endpoint gives to its peers."""
    buffer = HostBuffer(64)
    async with open_endpoint(backend, buffer) as endpoint:
        metadata = PeerMetadata.unpack(endpoint.backend.metadata(), backend="mooncake")
        return EndpointAddress.unpack(metadata.agent, agent=endpoint.name, protocol="tcp").session


async def test_peers_are_given_the_host_that_the_rank_advertises() -> None:
    told = MooncakeBackend()
    told.advertise("localhost")
    assert (await session_of(told)).startswith("localhost:")
    given = MooncakeBackend(host="127.0.0.2")
    given.advertise("localhost")
    assert (await session_of(given)).startswith("127.0.0.2:")
    assert (await session_of(MooncakeBackend())).startswith("127.0.0.1:")


IPV6 = """
import anyio
from kvflow.backends.mooncake import MooncakeBackend
from kvflow.errors import BackendUnavailable
from tests.backends.endpoints import copies, open_backend, open_bare, same

def make(host):
    backend = MooncakeBackend()
    backend.advertise(host)
    return backend

async def main():
    async with open_backend(make("::1")) as source, open_backend(make("::1"), seed=1) as target:
        assert b"[::1]:" in target.backend.metadata()
        await source.connect(target)
        source.post(1, target, copies(source, target))
        await source.take_ends()
        assert same(source, target, 0, 64)
    try:
        await open_bare(make("127.0.0.1"))
    except BackendUnavailable as error:
        assert "MC_USE_IPV6" in str(error)
    else:
        raise SystemExit("IPv4 and IPv6 in one process")

anyio.run(main)
"""


async def test_hosts_with_only_an_ipv6_address_reach_each_other() -> None:
    """Runs in a process of its own, which then cannot use IPv4."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    command = [sys.executable, "-c", IPV6]
    ended = await anyio.run_process(command, cwd=ROOT, env=environment, check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


async def test_ipv6_is_refused_where_the_library_was_loaded_for_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    async with open_backend(MooncakeBackend()):
        error = await unavailable(MooncakeBackend(host="::1"))
    assert error.values["host"] == "::1"
    assert "MC_USE_IPV6" not in os.environ


async def test_closing_while_a_peer_is_being_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing does not wait for the thread that probes the peer, and leaves the engine to it."""
    entered, leave = threading.Event(), threading.Event()
    probe = engine.MooncakeEngine.probe

    def slow_probe(self: engine.MooncakeEngine, address: EndpointAddress) -> None:
        entered.set()
        leave.wait()
        probe(self, address)

    async with open_backend(MooncakeBackend()) as source, open_backend(MooncakeBackend()) as target:
        monkeypatch.setattr(engine.MooncakeEngine, "probe", slow_probe)

        async def connect() -> None:
            with pytest.raises(BackendError, match="not open"):
                await source.connect(target)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connect)
            await until(entered.is_set)
            await source.close()
            leave.set()


async def open_and_close() -> None:
    async with open_endpoints("mooncake") as (source, target):
        source.post(1, target, copies(source, target), b"x")
        await source.take_ends()
        await target.take_notices()


def held() -> tuple[set[str], int, int]:
    """Return the names of Python threads, and the numbers of all threads and of open files."""
    gc.collect()
    threads = {thread.name for thread in threading.enumerate()}
    return threads, len(list(Path("/proc/self/task").iterdir())), num_files()


@pytest.mark.slow
async def test_nothing_is_left_after_close() -> None:
    for _ in range(3):
        await open_and_close()
    before = held()
    for _ in range(5):
        await open_and_close()
    await until(lambda: held()[0] <= before[0] and held()[1] <= before[1] and held()[2] <= before[2])


@asynccontextmanager
async def metadata_server() -> AsyncIterator[str]:
    port = unused_port()
    command = [sys.executable, "-m", "mooncake.http_metadata_server", "--host", "127.0.0.1", "--port", str(port)]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while True:
            try:
                await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                break
            except OSError:
                await anyio.sleep(0.01)
        yield f"http://127.0.0.1:{port}/metadata"
        process.kill()


async def test_endpoints_find_each_other_through_a_metadata_server() -> None:
    async with metadata_server() as url, open_endpoints("mooncake", options={"metadata_server": url}) as endpoints:
        source, target = endpoints
        source.post(1, target, copies(source, target))
        await source.take_ends()
        assert source.ends()[0].error is None
        assert same(source, target, 0, 64)
    assert os.environ.pop("MC_TCP_BIND_ADDRESS") == "127.0.0.1"


async def test_a_metadata_server_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{unused_port()}/metadata"
    error = await unavailable(MooncakeBackend(metadata_server=url))
    assert error.values["metadata_server"] == url


PROGRAM = """
import anyio
from tests.backends.endpoints import copies, open_endpoints

async def main():
    async with open_endpoints("mooncake") as (source, target):
        source.post(1, target, copies(source, target), b"x")
        await source.take_ends()
        await target.close()
        source.post(2, target, copies(source, target), b"x")
        await source.take_ends(2)
        {end}

anyio.run(main)
"""


async def run_program(end: str, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    environment |= variables
    return await anyio.run_process(command, cwd=ROOT, env=environment, check=False, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os._exit(4)", 4)],
    ids=str,
)
async def test_a_process_that_used_mooncake_ends_as_it_wants_and_prints_nothing(end: str, code: int) -> None:
    """The library has errors to report: the second write goes to a peer that has left."""
    ended = await run_program(end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, b"", b"")


async def test_the_library_logs_if_the_user_asks_for_it() -> None:
    ended = await run_program("pass", MC_LOG_LEVEL="INFO")
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert b"transfer_engine" in ended.stderr
    assert b"accept()" not in ended.stderr
