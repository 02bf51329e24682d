"""Host memory as this process maps it."""

import numpy as np
import pytest

from kvflow.backends.metadata import RegisteredMemory
from kvflow.errors import BackendError
from kvflow.geometry.memory import MemoryRange


def test_bytes_of_another_address() -> None:
    """The address in the layout is unrelated to the real one."""
    memory = np.arange(64, dtype=np.uint8)
    high = MemoryRange(2**63, 64)
    view = RegisteredMemory((high,), "DRAM", 0).view(MemoryRange(2**63 + 8, 16), int(memory.ctypes.data) + 8)
    assert np.array_equal(view, memory[8:24])


def test_device_memory_is_refused() -> None:
    registered = RegisteredMemory((MemoryRange(4096, 64),), "VRAM", 0)
    with pytest.raises(BackendError, match="only host memory") as caught:
        registered.view(MemoryRange(4096, 8), 4096)
    assert caught.value.values == {"memory_kind": "VRAM"}
