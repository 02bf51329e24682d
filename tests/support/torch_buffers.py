"""Buffers in memory that torch allocates, on any of its devices."""

import numpy as np
import torch
from typing_extensions import override

from kvflow.geometry.memory import MemoryKind
from kvflow.testing.buffers import Buffer, Bytes

__all__ = ["TorchBuffer", "device_of_cuda", "device_of_nixl"]


class TorchBuffer(Buffer):
    """A buffer in device memory, read and written by copies."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.address = self.tensor.data_ptr() % 2**64
        self.num_bytes = num_bytes
        self.memory_kind: MemoryKind = "DRAM" if device.type == "cpu" else "VRAM"
        self.device_id = self.tensor.device.index or 0

    @override
    def read(self, start: int = 0, stop: int | None = None) -> Bytes:
        found: Bytes = self.tensor[start:stop].cpu().numpy()
        return np.array(found)

    @override
    def write(self, start: int, data: Bytes) -> None:
        self.tensor[start : start + len(data)] = torch.from_numpy(np.array(data)).to(self.tensor.device)
        if self.memory_kind != "DRAM":
            torch.accelerator.synchronize()


def device_of_nixl() -> torch.device | None:
    """Return a GPU of a type that NIXL supports, if torch has one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found if found is not None and found.type in ("cuda", "xpu") else None


def device_of_cuda() -> torch.device | None:
    """Return the first CUDA GPU, if there is one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else None
