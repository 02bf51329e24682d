"""Endpoints of kvflow's own transports, by name."""

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from kvflow.backends import create_backend
from kvflow.backends.base import Backend
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.testing.buffers import HostBuffer
from kvflow.testing.endpoints import Endpoint, copies, descriptors_of, fresh_name, open_endpoint, same

__all__ = [
    "BACKENDS",
    "Endpoint",
    "copies",
    "descriptors_of",
    "fresh_name",
    "make_layout",
    "open_backend",
    "open_bare",
    "open_endpoints",
    "same",
]

BACKENDS = ("memory", "nixl", "mooncake")

NO_OPTIONS: Mapping[str, object] = {}


def make_layout(address: int, num_bytes: int, *, memory_kind: str = "DRAM") -> KVLayout:
    """Return a layout of one cell."""
    region = Region("kv", 0, address, 1, 0, 1, 0, (0, 1), 0, num_bytes, "uint8")
    return KVLayout((Component("kv", (region,)),), "test", memory_kind=memory_kind)


async def open_bare(backend: Backend, name: str | None = None) -> None:
    """Open a backend and fail on any event."""

    def refuse(delivered: object) -> None:
        raise AssertionError(delivered)

    await backend.open(name or fresh_name(), refuse, refuse)


@asynccontextmanager
async def open_backend(backend: Backend, num_bytes: int = 4096, *, seed: int = 0) -> AsyncIterator[Endpoint]:
    """Open a backend on a buffer of random bytes without zeros."""
    async with open_endpoint(backend, HostBuffer(num_bytes), seed=seed) as endpoint:
        yield endpoint


@asynccontextmanager
async def open_endpoints(
    name: str, num_bytes: int = 4096, *, count: int = 2, options: Mapping[str, object] = NO_OPTIONS
) -> AsyncIterator[list[Endpoint]]:
    """Open several endpoints; each is connected to those before and after it."""
    async with AsyncExitStack() as stack:
        endpoints = [
            await stack.enter_async_context(open_backend(create_backend(name, options), num_bytes, seed=seed))
            for seed in range(count)
        ]
        for one, other in itertools.permutations(endpoints, 2):
            await one.connect(other)
        yield endpoints
