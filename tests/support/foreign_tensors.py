"""Tensors of torch on devices that this machine does not have."""

import ctypes
import itertools
import types
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils.dlpack import from_dlpack

__all__ = ["PRIVATE", "tensor_at"]

PRIVATE: Final = 12
"""DLPack's number of torch's device "privateuseone", which NPUs and others rename."""


class _Tensor(ctypes.Structure):
    """`DLManagedTensor` of DLPack."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule: Final = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

_module: Final[Any] = types.ModuleType("torch.privateuseone")
_module.is_available = lambda: False  # for all who ask torch which devices there are
_module._is_in_bad_fork = lambda: False  # and for those who seed all of them
_module.manual_seed_all = lambda seed: None
torch._register_device_module("privateuseone", _module)  # type: ignore[no-untyped-call]

_alive: Final[list[object]] = []
"""What the tensors refer to: nobody tells when they are gone."""


def tensor_at(address: int, shape: Sequence[int], *, ordinal: int, device_type: int = PRIVATE) -> torch.Tensor:
    """Return a tensor of float32 at an address of a device.

    Args:
        address: Address of the first element.
        shape: Its dimensions; the tensor is contiguous.
        ordinal: Number of the device.
        device_type: Its type, as DLPack numbers it.
    """
    strides = list(itertools.accumulate(shape[:0:-1], lambda one, other: one * other, initial=1))[::-1]
    words = ctypes.c_int64 * len(shape)
    dims, steps = words(*shape), words(*strides)
    described = _Tensor(address, device_type, ordinal, len(shape), 2, 32, 1, dims, steps, 0, None, None)
    _alive.extend((dims, steps, described))
    found: torch.Tensor = from_dlpack(_new_capsule(ctypes.addressof(described), b"dltensor", None))
    return found
