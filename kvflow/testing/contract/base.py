"""Base class of the suite: its settings, and how its tests get endpoints."""

import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import anyio
import numpy as np
import pytest

from kvflow.backends import create_backend
from kvflow.backends.base import Backend
from kvflow.errors import BackendError
from kvflow.geometry.memory import MemoryKind
from kvflow.testing.buffers import Buffer, Bytes, HostBuffer
from kvflow.testing.endpoints import Endpoint, copies, open_endpoint, random_bytes, same

__all__ = ["ContractBase", "check_one_post", "check_only_this_arrives", "is_refused", "write"]

OPEN_FILES: Final = Path("/proc/self/fd")


class ContractBase:
    """Settings of the transport under test; contains no tests.

    Attributes:
        backend: Name of the transport, as in the settings.
        options: Options of the transport, as in the settings.
        impatient: Additional options, with which closing does not wait long for posts that do not end.
        memory_kind: Kind of the memory that the tests use.
        reaches_other_processes: False for a transport that works inside one process.
        timeout_s: Maximum duration of a test between opening and closing; a test that hangs fails after it.
        held_after_end: How many things, as `num_held` counts them, may be left of each peer whose process has ended.
    """

    backend: str
    options: Mapping[str, object] = MappingProxyType({})
    impatient: Mapping[str, object] = MappingProxyType({})
    memory_kind: MemoryKind = "DRAM"
    reaches_other_processes: bool = True
    timeout_s: float = 50.0
    held_after_end: int = 0

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        """Run on asyncio, the only event loop that kvflow supports."""
        return "asyncio"

    def new_backend(self) -> Backend:
        """Create a backend for another endpoint, without opening it."""
        return create_backend(self.backend, self.options)

    def new_impatient_backend(self) -> Backend:
        """Create a backend whose `aclose` does not wait long."""
        if not self.impatient:
            return self.new_backend()
        return create_backend(self.backend, {**self.options, **self.impatient})

    def new_buffer(self, num_bytes: int) -> Buffer:
        """Allocate memory of `memory_kind`; override it unless that is host memory."""
        if self.memory_kind != "DRAM":
            raise NotImplementedError("override new_buffer for memory that is not host memory")
        return HostBuffer(num_bytes)

    def num_held(self) -> int:
        """Return how much this process holds for peers: by default its open file descriptors.

        Override it if the library or a driver can be asked for more: mappings, handles, metadata.
        """
        return sum(1 for _ in OPEN_FILES.iterdir()) if OPEN_FILES.exists() else 0

    def new_backend_for(self, buffer: HostBuffer) -> Backend:
        """Create a backend that accesses a buffer's bytes although its address is not their real one.

        Override it where this is possible, to test addresses with bit 63 without a device that has them.
        """
        pytest.skip(f"nothing maps {buffer.address:#x} to other memory")

    @asynccontextmanager
    async def open_one(
        self, num_bytes: int = 4096, *, seed: int = 0, name: str | None = None, impatient: bool = False
    ) -> AsyncIterator[Endpoint]:
        """Open an endpoint; on exit, close it and check its events."""
        backend = self.new_impatient_backend() if impatient else self.new_backend()
        async with open_endpoint(backend, self.new_buffer(num_bytes), seed=seed, name=name) as endpoint:
            with anyio.fail_after(self.timeout_s):
                yield endpoint
            await endpoint.close()
            endpoint.check_ends()

    @asynccontextmanager
    async def open_some(
        self, num_bytes: int = 4096, *, count: int = 2, impatient: bool = False
    ) -> AsyncIterator[list[Endpoint]]:
        """Open several endpoints, each connected to all others."""
        async with AsyncExitStack() as stack:
            endpoints = [
                await stack.enter_async_context(self.open_one(num_bytes, seed=seed, impatient=impatient))
                for seed in range(count)
            ]
            for one, other in itertools.permutations(endpoints, 2):
                await one.connect(other)
            yield endpoints


def is_refused(call: Callable[[], object]) -> bool:
    """Return whether a call raises `BackendError`; other errors propagate."""
    try:
        call()
    except BackendError:
        return True
    return False


async def write(source: Endpoint, target: Endpoint, post_id: int) -> None:
    """Write 64 new bytes, and check that they arrive."""
    source.buffer.write(0, random_bytes(64, seed=1000 + post_id))
    source.post(post_id, target, copies(source, target))
    assert (await source.take_end(post_id)).error is None
    assert same(source, target, 0, 64)


async def check_one_post(source: Endpoint, target: Endpoint, expected: Bytes, *, post_id: int, notice: bytes) -> None:
    """Wait for the only post, close both sides, and check that it arrived once, and that nothing else did."""
    await source.take_ends()
    await target.take_notices()
    assert np.array_equal(target.buffer.read(), expected)
    await source.close()
    await target.close()
    assert [(end.post_id, end.error) for end in source.ends()] == [(post_id, None)]
    assert target.notices() == [notice]
    assert np.array_equal(target.buffer.read(), expected)


async def check_only_this_arrives(source: Endpoint, target: Endpoint) -> None:
    """Check, after a refusal, that both endpoints still work, and that nothing was written or notified by it."""
    expected = target.buffer.read()
    expected[:64] = source.buffer.read(0, 64)
    source.post(1, target, copies(source, target), b"good")
    await check_one_post(source, target, expected, post_id=1, notice=b"good")
