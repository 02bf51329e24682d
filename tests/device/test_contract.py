"""The contract on memory of a device."""

from types import MappingProxyType

import pytest
from typing_extensions import override

from kvflow.testing.buffers import Buffer
from kvflow.testing.contract import BackendContract
from tests.device.devices import needs_device
from tests.device.handovers import has_mooncake

pytestmark = pytest.mark.device

DEVICE = needs_device()


class TestNixl(BackendContract):
    backend = "nixl"
    options = MappingProxyType({"close_timeout_s": 1.0})
    memory_kind = "VRAM"

    @override
    def new_buffer(self, num_bytes: int) -> Buffer:
        return DEVICE.allocate(num_bytes)


@pytest.mark.skipif(not has_mooncake(DEVICE), reason="no build of Mooncake for devices")
class TestMooncake(TestNixl):
    backend = "mooncake"
