"""The contract on GPU memory; skipped without a GPU."""

from typing import Final

import pytest
import torch
from typing_extensions import override

from kvflow.testing.buffers import Buffer
from kvflow.testing.contract import BackendContract
from tests.support.torch_buffers import TorchBuffer, device_of_nixl

FOUND: Final = device_of_nixl()

if FOUND is None:
    pytest.skip("no device", allow_module_level=True)

DEVICE: Final[torch.device] = FOUND


@pytest.mark.device
class TestNixlOnDevice(BackendContract):
    backend = "nixl"
    memory_kind = "VRAM"

    @override
    def new_buffer(self, num_bytes: int) -> Buffer:
        return TorchBuffer(num_bytes, DEVICE)
