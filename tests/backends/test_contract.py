"""kvflow's own transports keep the contract that others are held to."""

from typing import Final

import torch
from typing_extensions import override

from kvflow.backends import Backend
from kvflow.backends.memory import MappedRange, MemoryBackend
from kvflow.testing.buffers import Buffer, HostBuffer
from kvflow.testing.contract import BackendContract
from tests.support.torch_buffers import TorchBuffer

IMPATIENT: Final = {"close_timeout_s": 0.2}


class TestMemory(BackendContract):
    backend = "memory"
    reaches_other_processes = False

    @override
    def new_backend_for(self, buffer: HostBuffer) -> Backend:
        return MemoryBackend(mapped=[MappedRange(buffer.address, buffer.num_bytes, buffer.real_address)])


class TestNixl(BackendContract):
    backend = "nixl"
    impatient = IMPATIENT


class TestMooncake(BackendContract):
    backend = "mooncake"
    impatient = IMPATIENT


class TestMemoryInTorch(BackendContract):
    """Memory that the suite did not allocate itself; on a device the same buffers are used."""

    backend = "memory"
    reaches_other_processes = False

    @override
    def new_buffer(self, num_bytes: int) -> Buffer:
        return TorchBuffer(num_bytes, torch.device("cpu"))
