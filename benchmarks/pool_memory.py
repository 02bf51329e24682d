"""Memory of pools: on the host, or on a device, of which the host has a copy."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.geometry import Location, MemoryRange

__all__ = ["MEMORIES", "CudaMemory", "PoolMemory"]


class PoolMemory:
    """Host memory, zeroed.

    Attributes:
        array: uint8[num_bytes]: the bytes, or the copy of them on the host.
        range: The bytes, as layouts describe them.
        location: Where they are.
        native: Both, as transports without kvflow see them.
    """

    location: Location = Location("DRAM", 0)

    def __init__(self, num_bytes: int) -> None:
        self.array: NDArray[np.uint8] = np.zeros(num_bytes, np.uint8)
        self.range = MemoryRange(int(self.array.ctypes.data), num_bytes)

    @property
    def native(self) -> tuple[int, Location]:
        """Address and location for transports that are used without kvflow."""
        return self.range.address, self.location

    def load(self) -> None:
        """Copy the bytes to the host, if they are elsewhere."""

    def store(self) -> None:
        """Copy them back."""


class CudaMemory(PoolMemory):
    """Memory of the first CUDA device.

    Attributes:
        tensor: uint8[num_bytes], the bytes.
    """

    location = Location("VRAM", 0)

    def __init__(self, num_bytes: int) -> None:
        import torch  # noqa: PLC0415 - only here

        super().__init__(num_bytes)
        self._synchronize = torch.cuda.synchronize
        self._host = torch.from_numpy(self.array)
        self.tensor: Any = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{self.location.device_id}")
        self.range = MemoryRange(self.tensor.data_ptr(), num_bytes)

    @override
    def load(self) -> None:
        self._host.copy_(self.tensor)

    @override
    def store(self) -> None:
        self.tensor.copy_(self._host)
        self._synchronize()


MEMORIES: Final[dict[str, Callable[[int], PoolMemory]]] = {"host": PoolMemory, "cuda": CudaMemory}
"""What allocates memory, by name."""
