"""Runs suites on a fake device, whose memory the host must not touch: with FAKE_DEVICE=low or FAKE_DEVICE=high.

Pools then lie in its memory, and the built-in transports accept it. Child processes inherit the variable.
"""

import ctypes
import importlib
import os
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvflow import backends
from kvflow.geometry import Location
from kvflow.testing.device import FakeDevice, alias_of, on_fake_device

__all__ = ["DEVICE", "LOCATION", "allocate", "let_torch_copy", "memory_at"]

WANTED: Final = os.environ.get("FAKE_DEVICE", "")

DEVICE: Final = FakeDevice(1, is_high=WANTED == "high") if WANTED else None

LOCATION: Final = DEVICE.location if DEVICE is not None else Location("DRAM", 0)
"""Where pools are."""


def allocate(num_bytes: int, fill: int) -> tuple[NDArray[np.uint8], int]:
    """Allocate memory for a pool, and return it with its address for a layout."""
    if DEVICE is None:
        array = np.full(num_bytes, fill, np.uint8)
        return array, int(array.ctypes.data)
    memory = DEVICE.allocate(num_bytes)
    memory.array[:] = fill
    return memory.array, memory.address


def memory_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return a view of the memory of a pool, given an address in its layout."""
    (real,) = alias_of(np.array([address], np.uint64)) if DEVICE is not None else (address,)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(int(real)))


def let_torch_copy(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let torch gather and scatter in the memory of fake devices, as their kernels would.

    Args:
        replace: Sets an attribute of a module, and perhaps resets it later.
    """
    import torch  # noqa: PLC0415 - only some tests have it

    from kvflow.packing import device as packing  # noqa: PLC0415 - likewise

    bytes_at = packing.bytes_at

    def bytes_at_alias(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        return bytes_at(int(alias_of(np.array([address], np.uint64))[0]), num_bytes, device)

    def find_processor(device_id: int) -> torch.device | None:
        return torch.device("cpu")

    replace(packing, "bytes_at", bytes_at_alias)
    replace(packing, "find_device", find_processor)


def _use_device() -> None:
    """Make every built-in transport accept the memory of pools, and torch work on it."""
    for module, name in backends.BUILT_IN.values():
        place = importlib.import_module(module)
        setattr(place, name, on_fake_device(getattr(place, name)))
    let_torch_copy()


if DEVICE is not None:
    _use_device()
