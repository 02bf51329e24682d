"""Endpoints on real memory, and what has happened at them."""

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np
from numpy.typing import NDArray

from kvflow.backends import create_backend
from kvflow.backends.base import Backend, BackendEvent, NoticeArrived, PostEnded, PostInDoubt
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.plan import Descriptors

__all__ = ["BACKENDS", "Endpoint", "copies", "fresh_name", "make_layout", "open_backend", "open_endpoints", "same"]

BACKENDS = ("memory", "nixl", "mooncake")

NO_OPTIONS: Mapping[str, object] = {}

Words = NDArray[np.uint64]

_numbers = itertools.count()


def fresh_name(stem: str = "agent") -> str:
    """An agent name that no other test has."""
    return f"{stem}-{next(_numbers)}"


def make_layout(address: int, num_bytes: int, *, memory_kind: str = "DRAM", device_id: int = 0) -> KVLayout:
    """A layout of one cell."""
    region = Region("kv", 0, address, 1, 0, 1, 0, (0, 1), 0, num_bytes, "uint8")
    return KVLayout((Component("kv", (region,)),), "test", memory_kind=memory_kind, device_id=device_id)


@dataclass
class Endpoint:
    """An open backend with one registered buffer, and all its events so far.

    Notices that do not travel in band are handed over when the write has ended, as the pipeline does it.
    """

    name: str
    backend: Backend
    memory: NDArray[np.uint8]
    address: int
    events: list[BackendEvent] = field(default_factory=list)
    outgoing: dict[int, tuple["Endpoint", bytes]] = field(default_factory=dict)
    incoming: list[BackendEvent] = field(default_factory=list)
    woken: anyio.Event = field(default_factory=anyio.Event)

    async def connect(self, *others: "Endpoint") -> None:
        for other in others:
            await self.backend.connect(other.name, other.backend.metadata())

    def post(self, post_id: int, other: "Endpoint", descriptors: Descriptors, notice: bytes = b"") -> None:
        in_band = self.backend.capabilities.in_band_notices
        self.backend.post(post_id, other.name, descriptors, notice if in_band else b"")
        if notice and not in_band:
            self.outgoing[post_id] = (other, notice)

    async def take(self) -> list[BackendEvent]:
        """Wait until something has happened here, or a notice was handed over, and take all of it."""
        if self.backend.capabilities.in_band_notices:
            return list(await self.backend.take_events())
        taken: list[BackendEvent] = []
        async with anyio.create_task_group() as tasks:

            async def take_from_backend() -> None:
                taken.extend(await self.backend.take_events())
                tasks.cancel_scope.cancel()

            tasks.start_soon(take_from_backend)
            if not self.incoming:
                await self.woken.wait()
            tasks.cancel_scope.cancel()
        self._hand_over(taken)
        taken, self.incoming, self.woken = taken + self.incoming, [], anyio.Event()
        return taken

    async def take_until(self, condition: Callable[[], object]) -> None:
        """Take events until they fulfil a condition."""
        while not condition():
            self.events += await self.take()

    async def take_ends(self, count: int = 1) -> None:
        """Take events until so many posts have ended."""
        await self.take_until(lambda: len(self.ends()) >= count)

    async def take_notices(self, count: int = 1) -> None:
        """Take events until so many notices have come."""
        await self.take_until(lambda: len(self.notices()) >= count)

    async def close(self) -> None:
        """Close the backend and keep its last events."""
        taken = await self.backend.aclose()
        self._hand_over(taken)
        self.events += [*taken, *self.incoming]
        self.incoming = []

    def _hand_over(self, taken: Sequence[BackendEvent]) -> None:
        """Give the peer the notices of writes that have ended well."""
        for event in taken:
            if isinstance(event, PostEnded) and event.post_id in self.outgoing:
                other, notice = self.outgoing.pop(event.post_id)
                if event.error is None:
                    other.incoming.append(NoticeArrived(notice))
                    other.woken.set()

    def ends(self) -> list[PostEnded]:
        return [event for event in self.events if isinstance(event, PostEnded)]

    def doubts(self) -> list[PostInDoubt]:
        return [event for event in self.events if isinstance(event, PostInDoubt)]

    def notices(self) -> list[bytes]:
        return [event.payload for event in self.events if isinstance(event, NoticeArrived)]


@asynccontextmanager
async def open_backend(
    backend: Backend, num_bytes: int = 4096, *, seed: int = 0, address: int | None = None
) -> AsyncIterator[Endpoint]:
    """Open a backend on a buffer of random bytes without zeros, which may pretend to be at another address."""
    memory = np.random.default_rng(seed).integers(1, 255, num_bytes, np.uint8)
    base = int(memory.ctypes.data) if address is None else address
    endpoint = Endpoint(fresh_name(), backend, memory, base)
    async with backend:
        await backend.open(endpoint.name)
        await backend.register(make_layout(base, num_bytes))
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


def rows(endpoint: Endpoint, offsets: Sequence[int], length: int) -> Words:
    """One side of descriptors of equal length."""
    found = np.zeros((len(offsets), 3), np.uint64)
    found[:, 0] = np.array(offsets, np.uint64) + np.uint64(endpoint.address)
    found[:, 1] = length
    return found


def copies(
    source: Endpoint, target: Endpoint, offsets: Sequence[int] = (0,), length: int = 64, *, to: Sequence[int] = ()
) -> Descriptors:
    """Copies of pieces of the source to the same place of the target, or to the places `to`."""
    return Descriptors(rows(source, offsets, length), rows(target, to or offsets, length))


def same(source: Endpoint, target: Endpoint, start: int = 0, stop: int | None = None) -> bool:
    """Both sides hold the same bytes in a range."""
    return bool(np.array_equal(source.memory[start:stop], target.memory[start:stop]))
