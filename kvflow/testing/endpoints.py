"""Endpoints on real memory, which record everything that their backends deliver."""

import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np
from numpy.typing import NDArray

from kvflow.backends.base import Backend, BackendEvent, NoticeArrived, PostEnded, PostInDoubt
from kvflow.errors import BackendError
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.plan import Descriptors
from kvflow.testing.buffers import Buffer, Bytes, HostBuffer

__all__ = ["Endpoint", "copies", "descriptors_of", "fresh_name", "open_endpoint", "random_bytes", "same"]

Words = NDArray[np.uint64]

_numbers = itertools.count()


def fresh_name(stem: str = "agent") -> str:
    """Return an agent name that is unique in this process."""
    return f"{stem}-{next(_numbers)}"


def random_bytes(count: int, seed: int) -> Bytes:
    """Return uint8[count], none of them 0 or 255."""
    return np.frombuffer(np.random.default_rng(seed).bytes(count), np.uint8) % 254 + 1


@dataclass
class Endpoint:
    """A backend with one registered buffer, everything that it has delivered, and the promises that it has broken.

    Notices that do not travel in band are delivered when the write has ended, as the pipeline does it.

    Attributes:
        name: Its agent name.
        events: Events so far, in order.
        posted: Post ids, in order.
        reactions: Called with each event when it is delivered.
        breakdowns: Errors passed to `on_broken`.
        violations: Promises about callbacks that the backend has broken.
    """

    name: str
    backend: Backend
    buffer: Buffer
    events: list[BackendEvent] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    reactions: list[Callable[[BackendEvent], None]] = field(default_factory=list)
    breakdowns: list[BackendError] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    _outgoing: dict[int, tuple["Endpoint", bytes]] = field(default_factory=dict)
    _num_taken: int = 0
    _thread: int = field(default_factory=threading.get_ident)
    _is_calling: bool = False
    _is_closed: bool = False
    _woken: anyio.Event = field(default_factory=anyio.Event)

    @property
    def address(self) -> int:
        """Address of the first byte of its buffer."""
        return self.buffer.address

    @property
    def memory(self) -> Bytes:
        """The bytes themselves, if the buffer is in host memory."""
        if not isinstance(self.buffer, HostBuffer):
            raise TypeError("only host memory can be seen without a copy")
        return self.buffer.memory

    async def open(self) -> None:
        """Open the backend, without registering memory."""
        await self.backend.open(self.name, self._take_in, self._break_down)

    async def connect(self, *others: "Endpoint") -> None:
        """Connect the backend to others, to write to them."""
        for other in others:
            await self.backend.connect(other.name, other.backend.metadata())

    def post(self, post_id: int, other: "Endpoint", moves: Descriptors | Blocks, notice: bytes = b"") -> None:
        """Start a write; its notice travels in band if the backend supports that."""
        in_band = self.backend.capabilities.in_band_notices
        payload = notice if in_band else b""
        was_calling, self._is_calling = self._is_calling, True
        try:
            if isinstance(moves, Blocks):
                self.backend.post_blocks(post_id, other.name, moves, payload)
            else:
                self.backend.post(post_id, other.name, moves, payload)
        finally:
            self._is_calling = was_calling
        self.posted.append(post_id)
        if notice and not in_band:
            self._outgoing[post_id] = (other, notice)

    async def take_events(self) -> list[BackendEvent]:
        """Wait until there are events that no earlier call has returned, and return them."""
        await self.take_until(lambda: self._num_taken < len(self.events))
        taken = self.events[self._num_taken :]
        self._num_taken = len(self.events)
        return taken

    async def take_until(self, condition: Callable[[], object]) -> None:
        """Wait until the events fulfil a condition; raise the error of a backend that breaks down meanwhile."""
        while not condition():
            if self.breakdowns:
                raise self.breakdowns[0]
            if self._woken.is_set():
                self._woken = anyio.Event()
            await self._woken.wait()

    async def take_ends(self, count: int = 1) -> None:
        """Wait until `count` posts have ended."""
        await self.take_until(lambda: len(self.ends()) >= count)

    async def take_notices(self, count: int = 1) -> None:
        """Wait until `count` notices have arrived."""
        await self.take_until(lambda: len(self.notices()) >= count)

    async def close(self) -> None:
        """Close the backend; any later event is a violation."""
        await self.backend.aclose()
        self._is_closed = True

    def _take_in(self, events: Sequence[BackendEvent]) -> None:
        self._check_callback("on_events")
        if not events:
            self.violations.append("on_events was called without an event")
        for event in events:
            self._take_one(event)

    def _take_one(self, event: BackendEvent) -> None:
        """Record an event, and deliver the notice of a write that has succeeded to the peer."""
        self.events.append(event)
        if isinstance(event, PostEnded) and event.post_id in self._outgoing:
            other, notice = self._outgoing.pop(event.post_id)
            if event.error is None:
                other._take_one(NoticeArrived(notice))
        for react in self.reactions:
            react(event)
        self._woken.set()

    def _break_down(self, error: BackendError) -> None:
        self._check_callback("on_broken")
        self.breakdowns.append(error)
        self._woken.set()

    def _check_callback(self, name: str) -> None:
        if threading.get_ident() != self._thread:
            self.violations.append(f"{name} was called in another thread")
        if self._is_calling:
            self.violations.append(f"{name} was called from inside a call into the backend")
        if self._is_closed:
            self.violations.append(f"{name} was called after aclose")

    def ends(self) -> list[PostEnded]:
        """Return the posts that have ended."""
        return [event for event in self.events if isinstance(event, PostEnded)]

    def doubts(self) -> list[PostInDoubt]:
        """Return the posts that have been in doubt."""
        return [event for event in self.events if isinstance(event, PostInDoubt)]

    def notices(self) -> list[bytes]:
        """Return the notices that have arrived."""
        return [event.payload for event in self.events if isinstance(event, NoticeArrived)]

    async def take_end(self, post_id: int) -> PostEnded:
        """Wait until one post has ended, and return its completion; others may end before or after it."""
        await self.take_until(lambda: any(end.post_id == post_id for end in self.ends()))
        return next(end for end in self.ends() if end.post_id == post_id)

    def check_ends(self) -> None:
        """Check, after closing, that each post has ended exactly once, and that the events are consistent."""
        assert not self.violations
        assert len(self.breakdowns) <= 1, f"on_broken was called more than once: {self.breakdowns}"
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
    """Open a backend on a buffer, and fill the buffer with random bytes."""
    buffer.write(0, random_bytes(buffer.num_bytes, seed))
    endpoint = Endpoint(name or fresh_name(), backend, buffer)
    async with backend:
        await endpoint.open()
        await backend.register(buffer.layout())
        yield endpoint


def descriptors_of(endpoint: Endpoint, offsets: Sequence[int], length: int) -> Words:
    """Return uint64[len(offsets), 3]: one side of descriptors of equal length."""
    found = np.zeros((len(offsets), 3), np.uint64)
    found[:, 0] = np.array(offsets, np.uint64) + np.uint64(endpoint.address)
    found[:, 1] = length
    found[:, 2] = endpoint.buffer.device_id
    return found


def copies(
    source: Endpoint, target: Endpoint, offsets: Sequence[int] = (0,), length: int = 64, *, to: Sequence[int] = ()
) -> Descriptors:
    """Describe copies of pieces of the source to the same places in the target, or to the places `to`."""
    return Descriptors(descriptors_of(source, offsets, length), descriptors_of(target, to or offsets, length))


def same(source: Endpoint, target: Endpoint, start: int = 0, stop: int | None = None) -> bool:
    """Return whether both sides hold the same bytes in a range."""
    return bool(np.array_equal(source.buffer.read(start, stop), target.buffer.read(start, stop)))
