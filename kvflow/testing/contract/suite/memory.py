"""Registration, kinds of memory, high addresses, and views of memory."""

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from kvflow.errors import BackendError, RegistrationError
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import MemoryRange
from kvflow.testing.buffers import Buffer, HostBuffer
from kvflow.testing.contract.base import ContractBase, is_refused, write
from kvflow.testing.endpoints import Endpoint, copies, fresh_name, open_endpoint, same

__all__ = ["MemoryContract"]

SIZE = 4096
KINDS = ("DRAM", "VRAM")


class MemoryContract(ContractBase):
    """`register` and `view`."""

    @asynccontextmanager
    async def _opened(self, buffers: Sequence[Buffer], seed: int = 0) -> AsyncIterator[list[Endpoint]]:
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(open_endpoint(self.new_backend(), buffer, seed=seed + number))
                for number, buffer in enumerate(buffers)
            ]

    async def test_memory_of_the_kinds_it_names_can_be_registered(self) -> None:
        async with self.open_one() as endpoint:
            assert self.memory_kind in endpoint.backend.capabilities.memory_kinds
            assert endpoint.backend.metadata()

    @pytest.mark.parametrize("kind", KINDS)
    async def test_memory_of_another_kind_is_refused(self, kind: str) -> None:
        async with self.new_backend() as backend:
            await Endpoint(fresh_name(), backend, self.new_buffer(64)).open()
            if kind in backend.capabilities.memory_kinds:
                pytest.skip(f"registers {kind}")
            region = Region("kv", 0, SIZE, 1, 0, 1, 0, (0, 1), 0, 64, "uint8")
            with pytest.raises(RegistrationError):
                await backend.register(KVLayout((Component("kv", (region,)),), "test", memory_kind=kind))
            with pytest.raises(BackendError):
                backend.metadata()

    async def test_memory_is_registered_once(self) -> None:
        """A second layout is refused, whether it is the same or another, and the first one continues to work."""
        async with self.open_some() as (source, target):
            metadata, other = target.backend.metadata(), self.new_buffer(SIZE)
            for endpoint in (source, target):
                for buffer in (endpoint.buffer, other):
                    with pytest.raises(RegistrationError):
                        await endpoint.backend.register(buffer.layout())
            assert target.backend.metadata() == metadata
            await write(source, target, 1)

    async def test_memory_of_an_endpoint_that_was_closed_can_be_registered_again(self) -> None:
        """An engine restarts its ranks on its existing pools."""
        buffers = [self.new_buffer(SIZE) for _ in range(2)]
        for incarnation in range(3):
            async with self._opened(buffers, seed=incarnation) as (source, target):
                await source.connect(target)
                await write(source, target, incarnation)

    async def test_two_endpoints_can_register_the_same_memory(self) -> None:
        """One pool serves a prefill rank and a decode rank."""
        buffer = self.new_buffer(SIZE)
        async with self._opened([buffer, buffer]) as (one, other), self.open_one(seed=5) as third:
            for post_id, endpoint in enumerate((one, other)):
                await endpoint.connect(third)
                await write(endpoint, third, post_id)
            await third.connect(one, other)
            third.post(1, one, copies(third, one, (1024,)))
            third.post(2, other, copies(third, other, (2048,)))
            await third.take_ends(2)
            for start in (1024, 2048):
                assert same(third, one, start, start + 64)

    async def test_many_ranges_can_be_registered(self) -> None:
        """Every second page is registered, and those between are out of bounds."""
        buffer = self.new_buffer(64 * SIZE)
        regions = [
            Region("kv", layer, buffer.address + 2 * layer * SIZE, 1, 0, 1, 0, (0, 1), 0, SIZE, "uint8")
            for layer in range(32)
        ]
        layout = KVLayout(
            (Component("kv", tuple(regions)),), "test", memory_kind=buffer.memory_kind, device_id=buffer.device_id
        )
        async with self.open_one(64 * SIZE) as source, self.new_backend() as backend:
            target = Endpoint(fresh_name(), backend, buffer)
            await target.open()
            await backend.register(layout)
            await source.connect(target)
            with pytest.raises(BackendError):
                source.post(1, target, copies(source, target, (SIZE,)))
            source.post(2, target, copies(source, target, range(0, 64 * SIZE, 2 * SIZE), SIZE))
            await source.take_ends()
            assert source.ends()[0].error is None
            for start in range(0, 64 * SIZE, 2 * SIZE):
                assert same(source, target, start, start + SIZE)
                assert not target.buffer.read(start + SIZE, start + 2 * SIZE).any()

    async def test_addresses_with_bit_63(self) -> None:
        """Sums of such addresses must not pass through signed or floating-point numbers, which lose low bits."""
        buffers = [HostBuffer(SIZE, 2**63 + 0x1000), HostBuffer(SIZE, 2**64 - SIZE)]
        async with AsyncExitStack() as stack:
            backends = [self.new_backend_for(buffer) for buffer in buffers]
            source, target = [
                await stack.enter_async_context(open_endpoint(backend, buffer, seed=seed))
                for seed, (backend, buffer) in enumerate(zip(backends, buffers, strict=True))
            ]
            await source.connect(target)
            source.post(1, target, copies(source, target, (1, SIZE - 3), 3), b"high")
            await source.take_ends()
            await target.take_notices()
            assert same(source, target, 1, 4)
            assert same(source, target, SIZE - 3)
            assert not same(source, target, 4, SIZE - 3)
            view = source.backend.view(MemoryRange(source.address + 1, 3))
            assert np.array_equal(view, source.buffer.read(1, 4))
            with pytest.raises(BackendError):
                source.post(2, target, copies(source, target, (SIZE - 2,), 3))

    async def test_registered_memory_can_be_seen_without_a_copy(self) -> None:
        async with self.open_one() as endpoint:
            if self.memory_kind != "DRAM":
                pytest.skip("only host memory can be seen")
            view = endpoint.backend.view(MemoryRange(endpoint.address + 5, 100))
            assert np.array_equal(view, endpoint.buffer.read(5, 105))
            endpoint.buffer.write(7, view[2:3] ^ np.uint8(0xFF))
            assert np.array_equal(view, endpoint.buffer.read(5, 105))

    async def test_device_memory_cannot_be_seen(self) -> None:
        async with self.open_one() as endpoint:
            if self.memory_kind == "DRAM":
                pytest.skip("is host memory")
            with pytest.raises(BackendError):
                endpoint.backend.view(MemoryRange(endpoint.address, 64))

    async def test_memory_that_is_not_registered_cannot_be_seen(self) -> None:
        outside = [(-1, 8), (SIZE - 7, 8), (SIZE, 1), (0, 0), (8, 2**64 - 8)]
        async with self.open_one(SIZE) as endpoint:
            ranges = [MemoryRange(endpoint.address + start, length) for start, length in outside]
            assert [one for one in ranges if not is_refused(functools.partial(endpoint.backend.view, one))] == []

    async def test_memory_cannot_be_seen_before_it_is_registered(self) -> None:
        with pytest.raises(BackendError):
            self.new_backend().view(MemoryRange(4096, 8))
