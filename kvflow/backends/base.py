"""The contract between a rank and its transport.

A backend belongs to one rank. It hides the library's threads and exceptions: every method is called on the event
loop, none blocks it, and they raise only `BackendError`s.

`kvflow.testing.contract` tests a transport against this contract, and docs/backends.md explains it.
"""

import abc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import BackendError, RegistrationError
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.layout import KVLayout, MemoryKind, MemoryRange
from kvflow.geometry.plan import Descriptors

__all__ = [
    "Backend",
    "BackendEvent",
    "Capabilities",
    "NoticeArrived",
    "OnBroken",
    "OnEvents",
    "PostEnded",
    "PostInDoubt",
]


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do.

    Attributes:
        in_band_notices: A notice can travel with a write, and arrives after its bytes. Without it, notices go over the
            control channel when the write has ended.
        memory_kinds: Kinds of memory it can register.
        max_descriptor_bytes: Longest single descriptor it takes; None for no limit.
        ends_with_process: Nothing lands any more once the process that wrote has ended. It is False where bytes can
            wait in the network, or in the receiver's library, and land later.
        queue_pairs: It may write over queue pairs of RDMA, of which a deployment can know how long they outlive their
            process (`Proofs.queue_pairs_die_with_process_s`).
        prepared_lists: `post_blocks` is faster than `post`, because it refers to lists that are kept for each peer.
        descriptor_overhead_s: Measured cost of a descriptor besides its bytes, in seconds; 0 if unknown. Where it
            exceeds the time to copy the bytes twice, small pieces are packed.
    """

    in_band_notices: bool
    memory_kinds: frozenset[MemoryKind]
    max_descriptor_bytes: int | None = None
    ends_with_process: bool = False
    queue_pairs: bool = False
    prepared_lists: bool = False
    descriptor_overhead_s: float = 0.0

    @property
    def takes_blocks(self) -> bool:
        """Whether to post blocks: they are faster, and no block can be too long for a descriptor."""
        return self.prepared_lists and self.max_descriptor_bytes is None


@dataclass(frozen=True)
class PostEnded:
    """A posted write has ended: the transport will not read its pages any more.

    Attributes:
        error: None if every byte is in the peer's memory, else what went wrong.
        lingers: Only with an error: bytes that have left this process may still land in the peer's memory, and
            nothing here will ever show when.
    """

    post_id: int
    error: str | None
    lingers: bool = False


@dataclass(frozen=True)
class PostInDoubt:
    """Nobody knows whether a posted write has ended. A `PostEnded` follows when it has, at the latest in `aclose`."""

    post_id: int
    error: str


@dataclass(frozen=True)
class NoticeArrived:
    """A notice has arrived in band. Nothing authenticates its sender."""

    payload: bytes


BackendEvent = PostEnded | PostInDoubt | NoticeArrived

OnEvents = Callable[[Sequence[BackendEvent]], None]
"""Takes what has happened, in order, at least one event. It must not raise, and may call the backend."""

OnBroken = Callable[[BackendError], None]
"""Takes the reason why a backend works no more."""


class Backend(abc.ABC):
    """One transport endpoint. Use it as an async context manager; leaving it is `aclose`.

    Attributes:
        name: As in the settings; both sides of a transfer must use the same.
        capabilities: What it can do.
    """

    name: str
    capabilities: Capabilities

    def advertise(self, host: str) -> None:  # noqa: B027 - most transports need not know
        """Learn under which host peers reach this process. Called before `open`, or not at all.

        A transport that tells its peers an address overrides this; by default it does nothing.

        Args:
            host: A name, or an IPv4 or IPv6 address without brackets. An option of the backend that says the same wins.
        """

    @abc.abstractmethod
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        """Start the endpoint.

        Both callbacks are called on the event loop that calls this, from the loop itself: never from another thread,
        and never from inside a call into the backend other than `aclose`. None is called if this raises, and none
        after `aclose` has returned.

        Args:
            agent_name: Unique in the deployment and new at every start.
            on_events: Called with what has happened since it was called last. Events do not wait for a task.
            on_broken: Called at most once, when the library has broken down. After it, `on_events` is only called by
                `aclose`, which is all that is left to do.

        Raises:
            BackendUnavailable: The library is missing or broken; says what to install.
        """

    @abc.abstractmethod
    async def register(self, layout: KVLayout) -> None:
        """Make the layout's allocations readable and writable for the transport, until `aclose`.

        To be called once, before `metadata`, `connect` and `post`.

        Raises:
            RegistrationError: The memory kind is not supported, the transport refused, or memory is registered already.
        """

    async def extend(self, layout: KVLayout) -> None:
        """Do the same for the memory of another rank, as far as it is not registered yet; `metadata` tells of it then.

        Only a backend that ranks share is asked to. By default it is refused.

        Raises:
            RegistrationError: The transport cannot, or refused.
        """
        raise RegistrationError("transport takes the memory of one rank only", backend=self.name)

    @property
    def shared_agent(self) -> str | None:
        """Name under which peers connect to this endpoint if ranks share it; None if that is the name in `open`."""
        return None

    def is_shared_with(self, agent_name: str) -> bool:
        """Say whether a rank that has given this name to `open` shares this endpoint, so that its memory is the own."""
        return False

    @abc.abstractmethod
    def metadata(self) -> bytes:
        """Give what a peer needs to write here, opaque to kvflow.

        Raises:
            BackendError: No memory is registered yet.
        """

    @abc.abstractmethod
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        """Give registered bytes as an array that shares their memory. Callable from any thread.

        Args:
            memory: Addresses as in the layout. The array must not be used once they are freed.

        Returns:
            uint8[memory.length].

        Raises:
            BackendError: It is device memory, or not inside one registered range.
        """

    @abc.abstractmethod
    async def connect(self, peer: str, metadata: bytes) -> None:
        """Get ready to write to a peer. Connecting to a connected peer again does nothing.

        A peer that was disconnected can be connected again, with other metadata if it has restarted.

        Args:
            peer: The peer's agent name. Only a rank that shares this endpoint has that of this endpoint.
            metadata: What its `metadata()` gave; not trusted.

        Raises:
            BackendError: The metadata is broken or of another transport.
        """

    @abc.abstractmethod
    async def disconnect(self, peer: str) -> None:
        """Release what is held for a peer, once its posts have ended.

        Does nothing if the peer is unknown or the backend is closed.
        """

    def unclosed(self) -> Collection[str]:
        """Name peers that were disconnected, or refused, and still have descriptors of this process open.

        There are none by default.
        """
        return ()

    @abc.abstractmethod
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        """Start to write `descriptors.src` here to `descriptors.dst` there, and return at once.

        Exactly one `PostEnded` follows for each post.

        Args:
            post_id: Chosen by the caller, never reused.
            peer: A connected peer.
            descriptors: At least one, uint64[n, 3] on each side, all of one kind of memory and on one device at each
                end. The backend owns the arrays from now on.
            notice: Delivered to the peer after the last byte; empty for none. Only with `in_band_notices`.

        Raises:
            BackendError: A range is not registered, or the peer is not connected; nothing was posted.
        """

    def post_blocks(self, post_id: int, peer: str, blocks: Blocks, notice: bytes) -> None:
        """Start to write blocks; otherwise like `post`, which a backend without prepared lists calls.

        Args:
            post_id: As in `post`.
            peer: A connected peer.
            blocks: At least one, and no position beyond its lists. The lists are the same object in every post to a
                peer, until the peer wants other cells than before.
            notice: As in `post`.

        Raises:
            BackendError: A list has memory that is not registered, or the peer is not connected; nothing was posted.
        """
        self.post(post_id, peer, blocks.descriptors(), notice)

    @abc.abstractmethod
    def watch(self, *, active: bool) -> None:
        """Say whether notices are expected, so that a transport that polls does so often or rarely.

        Does nothing if the backend is closed.
        """

    def domain(self) -> bytes:
        """Name the part of the world in which it can be seen whether bytes of an ended process are still on their way.

        A prefill rank tells it to decode ranks, which give it to `outlast`. Called after `register`.

        Returns:
            At most 256 bytes, the same for two endpoints that are in one such part; empty, the default, if there is no
            such part or it does not matter.
        """
        return b""

    async def outlast(self, domain: bytes) -> bool:
        """Wait until nothing that was written by processes of a domain that have already ended can land here.

        Args:
            domain: What `domain` gave in the ended process; not trusted.

        Returns:
            True then, or False if that can never be known. By default `capabilities.ends_with_process`.
        """
        return self.capabilities.ends_with_process

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Wait for posted writes within the backend's own bound, then stop: a fence for every write of this endpoint.

        What was not delivered yet is delivered before this returns, so that every post has had its `PostEnded`.
        Does nothing on a backend that is not open.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
