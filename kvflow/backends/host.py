"""Host memory, as this process sees it."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvflow.backends.metadata import RegisteredMemory
from kvflow.errors import BackendError
from kvflow.geometry.layout import MemoryRange

__all__ = ["host_view"]


def host_view(registered: RegisteredMemory, memory: MemoryRange, real_address: int) -> NDArray[np.uint8]:
    """Give some registered bytes without a copy.

    Args:
        registered: What there is.
        memory: What is asked for.
        real_address: Where the first byte of it really is.

    Raises:
        BackendError: It is device memory, or not inside one registered range.
    """
    if registered.memory_kind != "DRAM":
        raise BackendError("only host memory can be read", memory_kind=registered.memory_kind)
    row = np.array([(memory.address, memory.length, registered.device_id)], np.uint64)
    registered.check(row, side="local")
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.length).from_address(real_address))
