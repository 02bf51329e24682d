"""The device that tests marked `device` use: a GPU that torch finds, or the fake one."""

import abc
import threading
from typing import Final

import numpy as np
import pytest
import torch
from typing_extensions import override

from benchmarks.pool_memory import CudaMemory, PoolMemory
from kvflow.geometry import Location, MemoryRange
from kvflow.state.events.prefill import ReadyEvent
from kvflow.testing.buffers import Buffer, Bytes
from tests.support import device as fake
from tests.support.torch_buffers import TorchBuffer, device_of_nixl

__all__ = ["DEVICE", "Device", "FakePoolMemory", "needs_device"]

BUSY_CYCLES: Final = 10**9
"""How long a kernel delays another one: about half a second."""


class Device(abc.ABC):
    """A device, and what tests do on it.

    Attributes:
        name: Name in the table of `make test-device`.
        is_fake: Whether it is the one of `kvflow.testing.device`.
        has_events: Whether torch has events for it.
        can_pack: Whether torch packs on it.
    """

    name: str
    is_fake: bool = False
    has_events: bool = False
    can_pack: bool = False

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> Buffer:
        """Allocate zeroed memory."""

    @abc.abstractmethod
    def allocate_pool(self, num_bytes: int) -> PoolMemory:
        """Allocate zeroed memory for a pool of `benchmarks.pools`."""

    @abc.abstractmethod
    def compute_late(self, pool: PoolMemory, start: int, data: Bytes, after: ReadyEvent | None) -> ReadyEvent:
        """Start to write bytes as late as possible, on a stream of its own; return the event that follows.

        Args:
            pool: Where to write.
            start: Offset of the first byte.
            data: The bytes.
            after: Event of this device to wait for first.
        """


class TorchDevice(Device):
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.has_events = self.can_pack = device.type == "cuda"

    @override
    def allocate(self, num_bytes: int) -> Buffer:
        return TorchBuffer(num_bytes, self._device)

    @override
    def allocate_pool(self, num_bytes: int) -> PoolMemory:
        if not self.has_events:
            pytest.skip("only for CUDA")
        return CudaMemory(num_bytes)

    @override
    def compute_late(self, pool: PoolMemory, start: int, data: Bytes, after: ReadyEvent | None) -> ReadyEvent:
        assert isinstance(pool, CudaMemory)
        computed = torch.from_numpy(np.array(data)).to(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # torch's
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # as above
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event)
                stream.wait_event(after)
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call] # as above
            pool.tensor[start : start + len(data)].copy_(computed, non_blocking=True)
            event.record(stream)
        computed.record_stream(stream)
        return event


class FakePoolMemory(PoolMemory):
    """Memory of the fake device, whose bytes the host sees at the alias."""

    location = fake.LOCATION

    def __init__(self, num_bytes: int) -> None:
        self.array, address = fake.allocate(num_bytes, 0)
        self.range = MemoryRange(address, num_bytes)

    @property
    @override
    def native(self) -> tuple[int, Location]:
        return int(self.array.ctypes.data), Location("DRAM", 0)


class _LateKernel:
    """Computes when it is waited for, which is as late as possible."""

    def __init__(self, target: Bytes, data: Bytes, after: ReadyEvent | None) -> None:
        self._target, self._data, self._after = target, data, after
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        """Compute, and return when that is done."""
        if self._after is not None:
            self._after.synchronize()
        with self._lock:
            self._target[:] = self._data


class FakeTorchDevice(Device):
    """The fake device, with kernels of the host."""

    name = "fake device"
    is_fake = can_pack = True

    @override
    def allocate(self, num_bytes: int) -> Buffer:
        assert fake.DEVICE is not None
        return fake.DEVICE.allocate(num_bytes)

    @override
    def allocate_pool(self, num_bytes: int) -> PoolMemory:
        return FakePoolMemory(num_bytes)

    @override
    def compute_late(self, pool: PoolMemory, start: int, data: Bytes, after: ReadyEvent | None) -> ReadyEvent:
        return _LateKernel(pool.array[start : start + len(data)], data, after)


def _find() -> Device | None:
    if fake.DEVICE is not None:
        return FakeTorchDevice()
    found = device_of_nixl()
    return None if found is None else TorchDevice(torch.device(found.type, 0))


DEVICE: Final = _find()


def needs_device() -> Device:
    """Return the device, or skip the calling module."""
    if DEVICE is None:
        pytest.skip("no device", allow_module_level=True)
    return DEVICE
