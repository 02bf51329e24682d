"""What kvflow asks of a transport. Everything fits behind these few methods.

A backend belongs to one rank. It hides the library's threads and exceptions: every method is called on the event
loop, none blocks it, and only `BackendError`s come out.

`kvflow.testing.contract` holds a transport to this, and docs/backends.md explains it.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvflow.geometry.blocks import Blocks
from kvflow.geometry.layout import KVLayout, MemoryKind, MemoryRange
from kvflow.geometry.plan import Descriptors

__all__ = ["Backend", "BackendEvent", "Capabilities", "NoticeArrived", "PostEnded", "PostInDoubt"]


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do.

    Attributes:
        in_band_notices: A notice can travel with a write and arrives only after its bytes. Without it, notices go
            over the control channel when the write has ended.
        memory_kinds: Kinds of memory it can register.
        max_descriptor_bytes: Longest single descriptor it takes; None for no limit.
        ends_with_process: Nothing lands any more once the process that wrote has ended. Not so where bytes can sit in
            the network, or in the receiver's own library, and land later.
        prepared_lists: `post_blocks` is quicker than `post`, because it refers to lists that are kept for each peer.
        row_overhead_s: What each descriptor costs besides its bytes, in seconds, measured; 0 if that is not known.
            Where it is more than copying the bytes twice, small pieces are packed.
    """

    in_band_notices: bool
    memory_kinds: frozenset[MemoryKind]
    max_descriptor_bytes: int | None = None
    ends_with_process: bool = False
    prepared_lists: bool = False
    row_overhead_s: float = 0.0

    @property
    def takes_blocks(self) -> bool:
        """Blocks are worth it, and none of them can be too long."""
        return self.prepared_lists and self.max_descriptor_bytes is None


@dataclass(frozen=True)
class PostEnded:
    """A posted write has ended: the transport will not read its pages any more.

    Attributes:
        error: None if every byte is in the peer's memory, else what went wrong.
        lingers: Only with an error: bytes that have left may still land in the peer's memory, and nothing here will
            ever tell.
    """

    post_id: int
    error: str | None
    lingers: bool = False


@dataclass(frozen=True)
class PostInDoubt:
    """It cannot be told whether a posted write has ended. If it ever can, a `PostEnded` follows."""

    post_id: int
    error: str


@dataclass(frozen=True)
class NoticeArrived:
    """A notice came in band. Nothing proves who sent it."""

    payload: bytes


BackendEvent = PostEnded | PostInDoubt | NoticeArrived


class Backend(abc.ABC):
    """One transport endpoint. Use it as an async context manager; leaving it is `aclose`.

    Attributes:
        name: As in the settings; two ranks must use the same.
        capabilities: What it can do.
    """

    name: str
    capabilities: Capabilities

    @abc.abstractmethod
    async def open(self, agent_name: str) -> None:
        """Start the endpoint.

        Args:
            agent_name: Unique in the deployment and new at every start.

        Raises:
            BackendUnavailable: The library is missing or broken; says what to install.
        """

    @abc.abstractmethod
    async def register(self, layout: KVLayout) -> None:
        """Make the layout's allocations readable and writable for the transport, until `aclose`.

        Once in the life of an endpoint, before anything is posted or told to peers.

        Raises:
            RegistrationError: The memory kind is not supported, the transport refused, or memory is registered already.
        """

    @abc.abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to write here, valid after `register`."""

    @abc.abstractmethod
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        """Give some registered bytes as this process sees them, without a copy. May be called in any thread.

        Args:
            memory: Addresses as in the layout; the view is of use for as long as they are allocated.

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
            peer: The peer's agent name.
            metadata: What its `metadata()` gave; not trusted.

        Raises:
            BackendError: The metadata is broken or of another transport.
        """

    @abc.abstractmethod
    async def disconnect(self, peer: str) -> None:
        """Release what is held for a peer, once its posts have ended.

        An unknown peer is ignored, and so is everything on a closed backend.
        """

    @abc.abstractmethod
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        """Start to write `descriptors.src` here to `descriptors.dst` there, and return at once.

        Exactly one `PostEnded` follows for each post.

        Args:
            post_id: Chosen by the caller, never reused.
            peer: A connected peer.
            descriptors: At least one row; handed over, so the caller does not change the arrays any more.
            notice: Delivered to the peer after the last byte; empty for none. Only with `in_band_notices`.

        Raises:
            BackendError: A range is not registered, or the peer is not connected; nothing was posted.
        """

    def post_blocks(self, post_id: int, peer: str, blocks: Blocks, notice: bytes) -> None:
        """Start to write blocks; otherwise like `post`, which is what it comes down to without prepared lists.

        Args:
            post_id: As in `post`.
            peer: A connected peer.
            blocks: At least one, and no position beyond its lists. Those are the same object in every post to a peer,
                until the peer wants other cells than before.
            notice: As in `post`.

        Raises:
            BackendError: A list has memory that is not registered, or the peer is not connected; nothing was posted.
        """
        self.post(post_id, peer, blocks.descriptors(), notice)

    @abc.abstractmethod
    def watch(self, *, active: bool) -> None:
        """Say whether notices are expected, so that a polling transport polls sharply or hardly at all.

        Does nothing on a closed backend.
        """

    @abc.abstractmethod
    async def take_events(self) -> Sequence[BackendEvent]:
        """Wait until something has happened, and take all of it. One caller at a time.

        Cancelling the wait loses no event.

        Raises:
            BackendError: The library broke down; nothing more will come but by `aclose`.
        """

    async def outlast(self) -> bool:
        """Wait until nothing lands here any more of what processes had written that have ended by now.

        Returns:
            False if that can never be known. Without another answer, what `ends_with_process` says.
        """
        return self.capabilities.ends_with_process

    @abc.abstractmethod
    async def aclose(self) -> Sequence[BackendEvent]:
        """Wait for posted writes within the backend's own bound, then stop: a fence for every write of this endpoint.

        Returns:
            What happened until the end and was not taken; every post has had its `PostEnded`.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
