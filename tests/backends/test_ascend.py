"""The Ascend transport without an NPU: a fake library that copies memory, and the real one for its signatures."""

import ctypes
import importlib
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest
from typing_extensions import override

from examples.ascend.kvflow_ascend import ALIGNMENT, AscendBackend
from kvflow.backends import create_backend
from kvflow.backends.base import PostEnded
from kvflow.errors import BackendError, BackendUnavailable, ConfigError, RegistrationError
from kvflow.geometry.memory import MemoryRange
from kvflow.testing.buffers import HostBuffer
from kvflow.testing.contract import BackendContract
from kvflow.testing.endpoints import Endpoint, copies, open_endpoint
from tests.backends.endpoints import make_layout, open_bare

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {"store_url": "tcp://127.0.0.1:1", "role": "Prefill", "npu_id": 3}


class FakeEngine:
    """A fake of the library's engine: sessions live in this process, and addresses are real."""

    TransDataOpType = SimpleNamespace(
        SDMA="sdma", HOST_RDMA="host", DEVICE_RDMA="rdma", DEVICE_URMA="u", DEVICE_UBOE="o"
    )
    made: ClassVar[list["FakeEngine"]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.port = 0
        self.calls: list[str] = []
        self.registered: list[list[tuple[int, int]]] = []
        self.batches: list[tuple[str, int]] = []
        self.code = 0
        self.proceed = threading.Event()
        self.proceed.set()

    def get_rpc_port(self) -> int:
        return self.port

    def initialize(self, store_url: str, session_id: str, role: str, device_id: int, data_op_type: str) -> int:
        assert (store_url, role, device_id, data_op_type) == ("tcp://127.0.0.1:1", "Prefill", 3, "sdma")
        assert session_id.startswith("127.0.0.1:")
        self.port = 20_000 + len(self.made)
        return self.code

    def batch_register_memory(self, buffer_addrs: Sequence[int], capacities: Sequence[int]) -> int:
        self.registered.append(list(zip(buffer_addrs, capacities, strict=True)))
        return self.code

    def batch_transfer_sync_write(
        self, dest_session: str, buffers: Sequence[int], peer_buffers: Sequence[int], lengths: Sequence[int]
    ) -> int:
        self.proceed.wait()
        for src, dst, length in zip(buffers, peer_buffers, lengths, strict=True):
            ctypes.memmove(dst, src, length)
        self.batches.append((dest_session, len(lengths)))
        return self.code

    def unregister_memory(self, _buffer_addr: int) -> int:
        self.calls.append("unregister")
        return 0

    def destroy(self) -> None:
        self.calls.append("destroy")

    def unInitialize(self) -> None:
        self.calls.append("unInitialize")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    FakeEngine.made.clear()
    stores: list[str] = []

    def create_config_store(store_url: str) -> int:
        stores.append(store_url)
        return 0

    fake = SimpleNamespace(
        TransferEngine=FakeEngine,
        set_extern_logger=lambda log_fn: 0,
        get_last_err_msg=lambda: "no device",
        create_config_store=create_config_store,
        stores=stores,
    )
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", fake)
    return fake


class PretendedBuffer(HostBuffer):
    """Host memory that claims to be a device's."""

    memory_kind = "VRAM"


@pytest.mark.usefixtures("ascend", "library")
class TestContract(BackendContract):
    """Runs the contract on the fake library."""

    backend = "ascend"
    options = MappingProxyType({**OPTIONS, "close_timeout_s": 0.2})
    memory_kind = "VRAM"
    reaches_other_processes = False

    @override
    def new_buffer(self, num_bytes: int) -> HostBuffer:
        return PretendedBuffer(num_bytes)


@asynccontextmanager
async def open_pair(num_bytes: int = 4096) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    async with AsyncExitStack() as stack:
        source, target = [
            await stack.enter_async_context(
                open_endpoint(AscendBackend(**OPTIONS, close_timeout_s=0.1), PretendedBuffer(num_bytes), seed=seed)
            )
            for seed in range(2)
        ]
        await source.connect(target)
        yield source, target


@pytest.mark.usefixtures("library")
async def test_bytes_arrive_in_batches_to_the_peer() -> None:
    async with open_pair(64 * 1024) as (source, target):
        expected = target.memory.copy()
        expected[: 50 * 64] = source.memory[: 50 * 64]
        source.post(1, target, copies(source, target, range(0, 50 * 64, 64)))
        await source.take_ends()
        assert source.ends() == [PostEnded(1, None)]
        assert np.array_equal(target.memory, expected)
        batches = FakeEngine.made[0].batches
        assert sum(size for _, size in batches) == 50
        assert {session for session, _ in batches} == {"127.0.0.1:20002"}
    assert [engine.calls for engine in FakeEngine.made] == [["unregister", "destroy", "unInitialize"]] * 2


@pytest.mark.usefixtures("library")
async def test_a_batch_that_fails_is_in_doubt_until_the_endpoint_closes() -> None:
    async with open_pair() as (source, target):
        FakeEngine.made[0].code = -1
        source.post(1, target, copies(source, target, (0, 64)))
        await source.take_until(source.doubts)
        await source.close()
        (end,) = source.ends()
        assert (end.post_id, end.lingers) == (1, True)


@pytest.mark.usefixtures("library")
async def test_all_memory_is_registered_in_one_call() -> None:
    async with AscendBackend(**OPTIONS) as backend:
        await open_bare(backend)
        with pytest.raises(RegistrationError):
            await backend.register(make_layout(64 * ALIGNMENT, 10))
        await backend.register(make_layout(4 * ALIGNMENT, ALIGNMENT, memory_kind="VRAM"))
        with pytest.raises(BackendError, match="only host memory"):
            backend.view(MemoryRange(4 * ALIGNMENT, 1))
        assert FakeEngine.made[0].registered == [[(4 * ALIGNMENT, ALIGNMENT)]]


@pytest.mark.usefixtures("library")
async def test_memory_in_an_aligned_page_that_is_registered_already_is_refused() -> None:
    async with AscendBackend(**OPTIONS) as backend:
        await open_bare(backend)
        assert backend._agent is not None
        engine = backend._agent.borrow_sender("")
        engine.register([MemoryRange(4 * ALIGNMENT, ALIGNMENT)])
        engine.register([MemoryRange(5 * ALIGNMENT + 5, 10)])
        with pytest.raises(RegistrationError, match="aligned page") as caught:
            engine.register([MemoryRange(5 * ALIGNMENT + 100, 10)])
        assert caught.value.values["alignment"] == ALIGNMENT
        assert FakeEngine.made[0].registered == [[(4 * ALIGNMENT, ALIGNMENT)], [(5 * ALIGNMENT + 5, 10)]]


async def test_one_process_serves_the_store(library: SimpleNamespace) -> None:
    async with AscendBackend(**OPTIONS, serve_store=True) as backend:
        await open_bare(backend)
    async with AscendBackend(**OPTIONS) as backend:
        await open_bare(backend)
    assert library.stores == ["tcp://127.0.0.1:1"]


@pytest.mark.parametrize(
    "options",
    [{}, {**OPTIONS, "role": "Both"}, {**OPTIONS, "transport": "PIGEON"}, {**OPTIONS, "store_url": "x"}],
    ids=str,
)
@pytest.mark.usefixtures("ascend")
def test_unusable_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        create_backend("ascend", options)


async def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", None)
    async with AscendBackend(**OPTIONS) as backend:
        with pytest.raises(BackendUnavailable, match="install memfabric-hybrid"):
            await open_bare(backend)


PROGRAM = f"""
import anyio
from examples.ascend.kvflow_ascend import AscendBackend
from kvflow.errors import BackendUnavailable

async def main():
    async with AscendBackend(**{OPTIONS}) as backend:
        try:
            await backend.open("agent", print, print)
        except BackendUnavailable as error:
            assert "Ascend device" in str(error)
        else:
            raise SystemExit("there is a device here")

anyio.run(main)
"""


async def test_the_real_library_says_that_there_is_no_device_and_prints_nothing() -> None:
    root = Path(__file__).parents[2]
    ended = await anyio.run_process([sys.executable, "-c", PROGRAM], cwd=root, check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    "method", ["initialize", "batch_register_memory", "batch_transfer_sync_write", "unregister_memory", "get_rpc_port"]
)
def test_the_real_library_takes_the_same_arguments(method: str) -> None:
    """The library may have more parameters if they have defaults; kvflow passes arguments by position."""
    real = importlib.import_module("memfabric_hybrid").TransferEngine
    names = re.findall(r"(\w+): ", getattr(real, method).__doc__.partition("->")[0])[1:]
    fake = getattr(FakeEngine, method).__code__
    ours = [name.lstrip("_") for name in fake.co_varnames[1 : fake.co_argcount]]
    assert names[: len(ours)] == ours
    assert "=" in getattr(real, method).__doc__ or len(names) == len(ours)


def test_the_real_library_has_the_other_names() -> None:
    library = importlib.import_module("memfabric_hybrid")
    for name in ("set_extern_logger", "get_last_err_msg", "create_config_store"):
        assert callable(getattr(library, name))
    for name in ("destroy", "unInitialize"):
        assert callable(getattr(library.TransferEngine, name))
    for name in vars(FakeEngine.TransDataOpType):
        assert hasattr(library.TransferEngine.TransDataOpType, name)
