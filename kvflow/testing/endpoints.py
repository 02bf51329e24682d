"""Endpoints on real memory, and what has happened at them."""

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np
from numpy.typing import NDArray

from kvflow.backends.base import Backend, BackendEvent, NoticeArrived, PostEnded, PostInDoubt
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.plan import Descriptors
from kvflow.testing.buffers import Buffer, Bytes, HostBuffer

__all__ = ["Endpoint", "copies", "fresh_name", "open_endpoint", "random_bytes", "rows", "same"]

Words = NDArray[np.uint64]

_numbers = itertools.count()


def fresh_name(stem: str = "agent") -> str:
    """Give an agent name that nobody else in this process has."""
    return f"{stem}-{next(_numbers)}"


def random_bytes(count: int, seed: int) -> Bytes:
    """Give uint8[count], none of them 0 or 255."""
    return np.random.default_rng(seed).integers(1, 255, count, np.uint8)


@dataclass
class Endpoint:
    """An open backend with one registered buffer, and all its events so far.

    Notices that do not travel in band are handed over when the write has ended, as the pipeline does it.

    Attributes:
        name: Its agent name.
        events: Taken so far, in order.
        posted: Ids of `post`, in order.
    """

    name: str
    backend: Backend
    buffer: Buffer
    events: list[BackendEvent] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    outgoing: dict[int, tuple["Endpoint", bytes]] = field(default_factory=dict)
    incoming: list[BackendEvent] = field(default_factory=list)
    woken: anyio.Event = field(default_factory=anyio.Event)

    @property
    def address(self) -> int:
        """Of the first byte of its buffer."""
        return self.buffer.address

    @property
    def memory(self) -> Bytes:
        """The bytes themselves, of a host buffer."""
        if not isinstance(self.buffer, HostBuffer):
            raise TypeError("only host memory can be seen without a copy")
        return self.buffer.memory

    async def connect(self, *others: "Endpoint") -> None:
        """Get ready to write to others."""
        for other in others:
            await self.backend.connect(other.name, other.backend.metadata())

    def post(self, post_id: int, other: "Endpoint", moves: Descriptors | Blocks, notice: bytes = b"") -> None:
        """Start to write; a notice goes in band where that is possible."""
        in_band = self.backend.capabilities.in_band_notices
        payload = notice if in_band else b""
        if isinstance(moves, Blocks):
            self.backend.post_blocks(post_id, other.name, moves, payload)
        else:
            self.backend.post(post_id, other.name, moves, payload)
        self.posted.append(post_id)
        if notice and not in_band:
            self.outgoing[post_id] = (other, notice)

    async def take(self) -> list[BackendEvent]:
        """Wait until something has happened here, or a notice was handed over, and take all of it."""
        if self.backend.capabilities.in_band_notices:
            return list(await self.backend.take_events())
        async with anyio.create_task_group() as tasks:

            async def take_from_backend() -> None:
                taken = await self.backend.take_events()
                self._hand_over(taken)
                self.incoming += taken  # kept if this wait is cancelled
                tasks.cancel_scope.cancel()

            tasks.start_soon(take_from_backend)
            if not self.incoming:
                await self.woken.wait()
            tasks.cancel_scope.cancel()
        arrived, self.incoming, self.woken = self.incoming, [], anyio.Event()
        return arrived

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
        """Posts that have ended."""
        return [event for event in self.events if isinstance(event, PostEnded)]

    def doubts(self) -> list[PostInDoubt]:
        """Posts that were in doubt at some time."""
        return [event for event in self.events if isinstance(event, PostInDoubt)]

    def notices(self) -> list[bytes]:
        """Notices that have come."""
        return [event.payload for event in self.events if isinstance(event, NoticeArrived)]

    def has_ended(self, post_id: int) -> bool:
        """Whether one post has ended."""
        return any(end.post_id == post_id for end in self.ends())

    def check_ends(self) -> None:
        """Check, once it is closed, that each post has ended once, and that its events make sense together.

        Raises:
            AssertionError: They do not.
        """
        counts = Counter(end.post_id for end in self.ends())
        assert counts == Counter(self.posted), f"posts {self.posted} have ended like this: {self.ends()}"
        ended: set[int] = set()
        for event in self.events:
            if isinstance(event, PostInDoubt):
                assert event.post_id in counts, f"a post that nobody made is in doubt: {event}"
                assert event.post_id not in ended, f"in doubt after it has ended: {event}"
            elif isinstance(event, PostEnded):
                ended.add(event.post_id)
                assert not (event.lingers and event.error is None), f"arrived, and yet lingers: {event}"


@asynccontextmanager
async def open_endpoint(
    backend: Backend, buffer: Buffer, *, seed: int = 0, name: str | None = None
) -> AsyncIterator[Endpoint]:
    """Open a backend on a buffer, which is filled with random bytes."""
    buffer.write(0, random_bytes(buffer.num_bytes, seed))
    endpoint = Endpoint(name or fresh_name(), backend, buffer)
    async with backend:
        await backend.open(endpoint.name)
        await backend.register(buffer.layout())
        yield endpoint


def rows(endpoint: Endpoint, offsets: Sequence[int], length: int) -> Words:
    """Give uint64[len(offsets), 3]: one side of descriptors of equal length."""
    found = np.zeros((len(offsets), 3), np.uint64)
    found[:, 0] = np.array(offsets, np.uint64) + np.uint64(endpoint.address)
    found[:, 1] = length
    found[:, 2] = endpoint.buffer.device_id
    return found


def copies(
    source: Endpoint, target: Endpoint, offsets: Sequence[int] = (0,), length: int = 64, *, to: Sequence[int] = ()
) -> Descriptors:
    """Describe copies of pieces of the source to the same place of the target, or to the places `to`."""
    return Descriptors(rows(source, offsets, length), rows(target, to or offsets, length))


def same(source: Endpoint, target: Endpoint, start: int = 0, stop: int | None = None) -> bool:
    """Whether both sides hold the same bytes in a range."""
    return bool(np.array_equal(source.buffer.read(start, stop), target.buffer.read(start, stop)))
