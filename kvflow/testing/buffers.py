"""Memory to register, which tests can read and write."""

import abc

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import MemoryKind

__all__ = ["Buffer", "Bytes", "HostBuffer"]

Bytes = NDArray[np.uint8]


class Buffer(abc.ABC):
    """One allocation. Subclass it for memory that the processor cannot access directly.

    Attributes:
        address: Address of the first byte, as given to the transport, uint64.
        num_bytes: Number of bytes.
        memory_kind: As in `Capabilities.memory_kinds`.
        device_id: ID of its device, 0 for host memory.
    """

    address: int
    num_bytes: int
    memory_kind: MemoryKind = "DRAM"
    device_id: int = 0

    @abc.abstractmethod
    def read(self, start: int = 0, stop: int | None = None) -> Bytes:
        """Return a copy of some bytes, including everything written before the call."""

    @abc.abstractmethod
    def write(self, start: int, data: Bytes) -> None:
        """Write some bytes; they are visible when it returns."""

    def layout(self) -> KVLayout:
        """Return a layout of one cell that covers the buffer."""
        region = Region("kv", 0, self.address, 1, 0, 1, 0, (0, 1), 0, self.num_bytes, "uint8")
        components = (Component("kv", (region,)),)
        return KVLayout(components, "test", memory_kind=self.memory_kind, device_id=self.device_id)


class HostBuffer(Buffer):
    """Host memory.

    Args:
        num_bytes: Number of bytes.
        address: Address to give to the transport, if not the real one.

    Attributes:
        memory: uint8[num_bytes], the bytes themselves.
    """

    def __init__(self, num_bytes: int, address: int | None = None) -> None:
        self.memory: Bytes = np.zeros(num_bytes, np.uint8)
        self.num_bytes = num_bytes
        self.address = self.real_address if address is None else address

    @property
    def real_address(self) -> int:
        """Real address of the first byte."""
        return int(self.memory.ctypes.data)

    @override
    def read(self, start: int = 0, stop: int | None = None) -> Bytes:
        return np.array(self.memory[start:stop])

    @override
    def write(self, start: int, data: Bytes) -> None:
        self.memory[start : start + len(data)] = data
