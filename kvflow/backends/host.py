"""Views of registered host memory."""

import ctypes

import numpy as np
import numpy.ctypeslib  # numpy would load it at the first use, when no descriptor may be left
from numpy.typing import NDArray

from kvflow.backends.metadata import RegisteredMemory
from kvflow.errors import BackendError
from kvflow.geometry.memory import MemoryRange

__all__ = ["host_view"]


def host_view(registered: RegisteredMemory, memory: MemoryRange, real_address: int) -> NDArray[np.uint8]:
    """Return registered bytes as an array that shares their memory.

    Args:
        registered: All registered memory.
        memory: The part to return; it must lie inside one registered range.
        real_address: Actual address of its first byte.

    Returns:
        uint8[memory.length].

    Raises:
        BackendError: The part is device memory, or not inside one registered range.
    """
    location = registered.find(memory)
    if location is None:
        raise BackendError(
            "memory range is not registered", side="local", address=hex(memory.address), length=memory.length
        )
    if location.memory_kind != "DRAM":
        raise BackendError("only host memory can be read", memory_kind=location.memory_kind)
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.length).from_address(real_address))
