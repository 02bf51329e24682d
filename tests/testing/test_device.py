"""The fake device, and what runs on it."""

import gc
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from typing_extensions import override

from kvflow.backends import Backend
from kvflow.backends.memory import MemoryBackend
from kvflow.backends.mooncake import MooncakeBackend
from kvflow.backends.nixl import NixlBackend
from kvflow.testing.buffers import Buffer
from kvflow.testing.contract import BackendContract
from kvflow.testing.device import FakeDevice, alias_of, on_fake_device

DEVICE: Final = FakeDevice(3)


@pytest.mark.parametrize("is_high", [False, True], ids=["low", "high"])
def test_bytes_are_seen_at_the_alias_only(is_high: bool) -> None:
    memory = FakeDevice(is_high=is_high).allocate(10_000)
    memory.write(9_990, np.arange(10, dtype=np.uint8))
    assert memory.read(9_989).tolist() == [0, *range(10)]
    addresses = np.array([memory.address, memory.address + 9_999, memory.array.ctypes.data], np.uint64)
    start = memory.array.ctypes.data
    assert alias_of(addresses).tolist() == [start, start + 9_999, start]
    assert (memory.address >= 2**63) is is_high


def test_memory_is_freed_with_its_array() -> None:
    memory = DEVICE.allocate(4096)
    array, place = memory.array, f"{memory.address:x}-"
    del memory
    gc.collect()
    assert place in Path("/proc/self/maps").read_text("ascii")
    array[:] = 7
    del array
    gc.collect()
    assert place not in Path("/proc/self/maps").read_text("ascii")


TOUCH: Final = """
import ctypes
from kvflow.testing.device import FakeDevice
memory = FakeDevice(is_high={is_high}).allocate(4096)
{act}
"""


def run(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    return subprocess.run(command, capture_output=True, check=False, timeout=100, text=True)


@pytest.mark.parametrize("is_high", [False, True], ids=["low", "high"])
@pytest.mark.parametrize("act", ["ctypes.string_at(memory.address, 1)", "ctypes.memset(memory.address, 0, 1)"])
def test_a_host_access_ends_the_process(act: str, is_high: bool) -> None:
    done = run(TOUCH.format(act=act, is_high=is_high))
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr


SUITE: Final = """
import anyio
from kvflow.packing import device as kernels
bytes_at = kernels.bytes_at
from tests.support import instances  # lets the kernels use aliases
{undo}

async def main():
    staging = {{"staging_bytes": 2**16, "staging_slot_bytes": 2**10}}
    async with instances.deploy(sending={{"packing": "always", **staging}}, receiving=staging) as deployment:
        request = deployment.request(1, 8)
        await request.hand_over()
        request.assert_arrived()
        assert deployment.prefill[0].statistics().staging.packed_posts

anyio.run(main)
"""


@pytest.mark.parametrize("device", ["low", "high"])
def test_a_suite_on_a_device_finds_code_that_works_on_host_memory_only(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEVICE", device)
    assert run(SUITE.format(undo="")).returncode == 0
    done = run(SUITE.format(undo="kernels.bytes_at = bytes_at"))
    assert done.returncode == -signal.SIGSEGV
    assert "kvflow/packing/device.py" in done.stderr


class TestMemory(BackendContract):
    """A transport on a fake device keeps the contract."""

    backend = "memory"
    memory_kind = "VRAM"
    reaches_other_processes = False

    @override
    def new_backend(self) -> Backend:
        return on_fake_device(MemoryBackend)()

    @override
    def new_buffer(self, num_bytes: int) -> Buffer:
        return DEVICE.allocate(num_bytes)


@pytest.mark.slow
class TestNixl(TestMemory):
    backend = "nixl"

    @override
    def new_backend(self) -> Backend:
        return on_fake_device(NixlBackend)(close_timeout_s=1.0)


@pytest.mark.slow
class TestMooncake(TestMemory):
    backend = "mooncake"

    @override
    def new_backend(self) -> Backend:
        return on_fake_device(MooncakeBackend)(close_timeout_s=1.0)
