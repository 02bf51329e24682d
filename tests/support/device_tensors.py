"""Torch tensors in the memory of a fake device: torch says where they are; who reads an element ends the process."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from kvflow.testing.device import DeviceMemory

__all__ = ["DeviceTensor", "device_tensor"]


def _shown(tensor: torch.Tensor, **_: Any) -> str:
    return f"DeviceTensor({tensor.data_ptr():#x}, {tuple(tensor.shape)})"


class DeviceTensor(torch.Tensor):
    """A tensor that says that it is on a GPU. So do its views."""

    @property
    @override
    def device(self) -> torch.device:  # type: ignore[override] # torch declares an attribute
        return torch.device("cuda", 1)

    __repr__: Any = _shown


def device_tensor(memory: DeviceMemory, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> DeviceTensor:
    """Return a tensor over all of a device's allocation, which may have an address with bit 63."""
    assert memory.device_id == 1
    storage = (ctypes.c_uint8 * memory.num_bytes).from_address(memory.address)
    return torch.frombuffer(storage, dtype=torch.uint8).view(dtype).view(*shape).as_subclass(DeviceTensor)
