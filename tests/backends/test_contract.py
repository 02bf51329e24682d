"""kvflow's own transports keep the contract of `kvflow.testing`."""

from typing import Final

import pytest
import torch
from typing_extensions import override

from kvflow.backends import Backend
from kvflow.backends.shared import RankEndpoint, SharedBackend
from kvflow.testing.buffers import Buffer, HostBuffer
from kvflow.testing.contract import BackendContract
from kvflow.testing.contract.suite.blocks import BlockContract
from kvflow.testing.contract.suite.closing import ClosingContract
from kvflow.testing.contract.suite.memory import MemoryContract
from kvflow.testing.contract.suite.metadata import MetadataContract
from kvflow.testing.contract.suite.peers import PeerContract
from kvflow.testing.contract.suite.processes import ProcessContract
from kvflow.testing.contract.suite.writes import WriteContract
from tests.support.faulty_memory import MappedMemoryBackend
from tests.support.nixl_held import HeldByNixl
from tests.support.torch_buffers import TorchBuffer

IMPATIENT: Final = {"close_timeout_s": 0.2}
MIB: Final = 2**20


class TestMemory(BackendContract):
    backend = "memory"
    reaches_other_processes = False

    @override
    def new_backend_for(self, buffer: HostBuffer) -> Backend:
        return MappedMemoryBackend(buffer.address, buffer.num_bytes, buffer.real_address)


class TestNixl(BackendContract):
    backend = "nixl"
    impatient = IMPATIENT

    @pytest.fixture(autouse=True)
    def held(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = HeldByNixl(monkeypatch)

    @override
    def num_held(self) -> int:
        return super().num_held() + len(self.driver.held)


class SharedContract(BackendContract):
    """Runs the contract on an endpoint that ranks can share, used by a single rank."""

    @override
    def new_backend(self) -> Backend:
        return RankEndpoint(SharedBackend(self.backend, self.options))

    @override
    def new_impatient_backend(self) -> Backend:
        return RankEndpoint(SharedBackend(self.backend, {**self.options, **self.impatient}))


class TestSharedMemory(SharedContract):
    backend = "memory"
    reaches_other_processes = False


@pytest.mark.slow
class TestSharedNixl(SharedContract):
    backend = "nixl"
    impatient = IMPATIENT


class TestMooncake(WriteContract, PeerContract, ProcessContract):
    """100,000 descriptors in one post take Mooncake seconds, and most of a minute when all cores are busy."""

    backend = "mooncake"
    timeout_s = 150.0
    held_after_end = 4  # sockets that the library keeps until its engine is replaced
    impatient = IMPATIENT


@pytest.mark.slow
class TestMooncakeAtLength(BlockContract, MetadataContract, MemoryContract, ClosingContract):
    """The rest of the contract: each test spends two seconds closing engines."""

    backend = "mooncake"
    impatient = IMPATIENT


def test_mooncake_is_held_to_the_whole_contract() -> None:
    assert {*TestMooncake.__bases__, *TestMooncakeAtLength.__bases__} == set(BackendContract.__bases__)


@pytest.mark.slow
class TestMemoryInTorch(BackendContract):
    """Memory that torch allocates instead of the suite; on a device the same buffers are used."""

    backend = "memory"
    reaches_other_processes = False

    @override
    def new_buffer(self, num_bytes: int) -> Buffer:
        return TorchBuffer(num_bytes, torch.device("cpu"))


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("contract", [TestMemory, TestNixl, TestMooncake])
async def test_the_longest_posts_arrive(contract: type[WriteContract]) -> None:
    """As many pieces and as many bytes as a rank posts at once by default (`Limits.bytes_per_post`), and more."""
    await contract().check_every_byte([(100_000, 24), (3, 16 * MIB), (1, 64 * MIB)])
