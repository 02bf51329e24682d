"""The contract between a rank and its transport.

A backend is one endpoint of a transport. It belongs to one rank, or to a `SharedBackend` used by several ranks. It
hides the library's threads and exceptions: methods are called on the event loop (`view` also from other threads), never
block it, and raise only `BackendError`s.

`kvflow.testing.contract` tests a transport against this contract, and docs/backends.md explains it.
"""

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import BackendError, RegistrationError
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryKind, MemoryRange
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
    """The abilities of a transport.

    Attributes:
        in_band_notices: A notice can be sent with a write and arrives after its bytes. Otherwise notices go over the
            control channel when the write has ended.
        memory_kinds: Kinds of memory it can register.
        max_descriptor_bytes: Maximum length of a single descriptor; None for no limit.
        ends_with_process: Nothing lands after the writing process has ended. False if bytes can wait in the network or
            in the receiver's library and land later.
        queue_pairs: It may write over RDMA queue pairs, for which an operator may know how long they outlive their
            process (`Proofs.queue_pairs_die_with_process_s`).
        prepared_lists: `post_blocks` is faster than `post`, because it uses descriptor lists prepared for each peer.
        descriptor_overhead_s: Measured fixed cost of a descriptor, in seconds; 0 if unknown. Small pieces are packed if
            it exceeds the time to copy their bytes twice.
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
        """Whether to post blocks: they are faster here, and no block can exceed the maximum descriptor length."""
        return self.prepared_lists and self.max_descriptor_bytes is None


@dataclass(frozen=True)
class PostEnded:
    """A posted write has ended: the transport no longer reads its source pages.

    Attributes:
        error: None if every byte is in the peer's memory; otherwise the error.
        lingers: Only with an error: bytes already sent may still land in the peer's memory, and this side cannot tell
            when.
    """

    post_id: int
    error: str | None
    lingers: bool = False


@dataclass(frozen=True)
class PostInDoubt:
    """It is unknown whether a posted write has ended. A `PostEnded` follows when it has, in `aclose` at the latest."""

    post_id: int
    error: str


@dataclass(frozen=True)
class NoticeArrived:
    """A notice has arrived in band. Its sender is not authenticated.

    Attributes:
        found_at: When the transport found it, in seconds of `time.monotonic()`; 0 if it does not tell.
    """

    payload: bytes
    found_at: float = field(default=0.0, compare=False)


BackendEvent = PostEnded | PostInDoubt | NoticeArrived

OnEvents = Callable[[Sequence[BackendEvent]], None]
"""Called with one or more events, in order. It must not raise, and may call the backend."""

OnBroken = Callable[[BackendError], None]
"""Called with the reason when a backend has stopped working."""


class Backend(abc.ABC):
    """One transport endpoint. Use it as an async context manager; leaving it calls `aclose`.

    Attributes:
        name: As in the settings; must be the same on both sides of a transfer.
        capabilities: Its abilities.
    """

    name: str
    capabilities: Capabilities

    def advertise(self, host: str) -> None:  # noqa: B027 - most transports need not know
        """Set the host at which peers reach this process. Called before `open`, or not at all.

        A transport that tells its peers an address overrides this; by default it does nothing.

        Args:
            host: A name, or an IPv4 or IPv6 address without brackets. A backend option for the same purpose takes
                precedence.
        """

    @abc.abstractmethod
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        """Start the endpoint.

        Both callbacks are called on the event loop that calls this, from the loop itself: never from another thread,
        and never from inside a call into the backend other than `aclose`. Neither is called if this method raises, or
        after `aclose` has returned.

        Args:
            agent_name: Unique in the deployment and different at every start.
            on_events: Called with the events since the last call, without waiting for a task to be scheduled.
            on_broken: Called at most once, when the library has failed. After that only `aclose` may be called, and
                only `aclose` calls `on_events`.

        Raises:
            BackendUnavailable: The library is missing or broken; the message says what to install.
        """

    @abc.abstractmethod
    async def register(self, layout: KVLayout) -> None:
        """Make the layout's allocations readable and writable for the transport, until `aclose`.

        Call it once, before `metadata`, `connect` and `post`.

        Raises:
            RegistrationError: The memory kind is not supported, the transport refused, or memory is already registered.
        """

    async def extend(self, layout: KVLayout) -> None:
        """Register the parts of another rank's memory that are not registered yet; `metadata` includes them afterwards.

        Called only on a backend that several ranks share. The default raises RegistrationError.

        Raises:
            RegistrationError: The transport does not support this, or refused.
        """
        raise RegistrationError("backend can register the memory of one rank only", backend=self.name)

    @property
    def shared_agent(self) -> str | None:
        """Name by which peers connect to this endpoint if several ranks share it; None if it is the `agent_name`."""
        return None

    @property
    def paths(self) -> str:
        """The paths that writes may take to peers, for the log; empty if there is nothing to choose."""
        return ""

    @property
    def observed_paths(self) -> Mapping[str, int]:
        """How many peers are written to over each path, as far as that is known; the default knows nothing."""
        return {}

    def is_shared_with(self, agent_name: str) -> bool:
        """Return whether the rank that passed this name to `open` shares this endpoint, and thus its memory."""
        return False

    @abc.abstractmethod
    def metadata(self) -> bytes:
        """Return what a peer needs to write here; opaque to kvflow.

        Raises:
            BackendError: No memory is registered yet.
        """

    @abc.abstractmethod
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        """Return registered memory as an array, without copying. Can be called from any thread.

        Args:
            memory: Addresses as in the layout. The array must not be used once they are freed.

        Returns:
            uint8[memory.length].

        Raises:
            BackendError: It is device memory, or not inside one registered range.
        """

    @abc.abstractmethod
    async def connect(self, peer: str, metadata: bytes) -> None:
        """Prepare for writes to a peer. Does nothing if the peer is already connected.

        A peer that was disconnected can be connected again, with other metadata if it has restarted.

        Args:
            peer: The peer's agent name. It is this endpoint's own name only for ranks that share this endpoint.
            metadata: The result of the peer's `metadata()`; not trusted.

        Raises:
            BackendError: The metadata is damaged or belongs to another transport.
        """

    async def connect_authenticated(self, peer: str, metadata: bytes, principal: str) -> None:
        """Prepare for writes to a peer whose key is known; otherwise like `connect`, which the default calls.

        A prefill rank calls only this method. A transport overrides it if one peer can hold up others, to keep
        principals apart.

        Args:
            peer: As in `connect`.
            metadata: As in `connect`.
            principal: Identifies the peers whose keys are listed for the same instances. A peer cannot choose it. Empty
                without keys.

        Raises:
            BackendError: As in `connect`.
        """
        await self.connect(peer, metadata)

    @abc.abstractmethod
    async def disconnect(self, peer: str) -> None:
        """Release a peer's resources once its posts have ended.

        Does nothing if the peer is unknown or the backend is closed.
        """

    def unclosed(self) -> Collection[str]:
        """Return the peers that were disconnected or refused but still hold file descriptors of this process open.

        Empty by default.
        """
        return ()

    @abc.abstractmethod
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        """Start to write `descriptors.src` here to `descriptors.dst` at the peer, and return at once.

        Exactly one `PostEnded` follows for each post.

        Args:
            post_id: Chosen by the caller, never reused.
            peer: A connected peer.
            descriptors: At least one; uint64[n, 3] on each side. On each side all are of one memory kind and device.
                The backend takes ownership of the arrays.
            notice: Delivered to the peer after the last byte; empty for none. Requires `in_band_notices`.

        Raises:
            BackendError: A memory range is not registered, or the peer is not connected; nothing was posted.
        """

    def post_blocks(self, post_id: int, peer: str, blocks: Blocks, notice: bytes) -> None:
        """Start to write blocks; otherwise like `post`. The default calls `post`.

        Args:
            post_id: As in `post`.
            peer: A connected peer.
            blocks: At least one; no position may exceed its list. The lists are the same object in every post to a
                peer, until the peer wants different cells than before.
            notice: As in `post`.

        Raises:
            BackendError: A list contains memory that is not registered, or the peer is not connected; nothing was
                posted.
        """
        self.post(post_id, peer, blocks.descriptors(), notice)

    @abc.abstractmethod
    def watch(self, *, active: bool) -> None:
        """Hint whether notices are expected, so that a polling transport can poll more or less often.

        Does nothing if the backend is closed.
        """

    def domain(self) -> bytes:
        """Identify the scope, such as one kernel, within which data in flight from an ended process can be observed.

        A prefill rank sends it to decode ranks, which pass it to `outlast`. Called after `register`.

        Returns:
            At most 256 bytes that a peer's `outlast` understands. Empty (the default) if there is no such scope or it
            does not matter.
        """
        return b""

    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        """Return this side's ends of sound connections to a peer: those of lingering writes are not among them.

        A prefill rank sends them to decode ranks that wait for last bytes, which pass them to `outlast`.

        Returns:
            For each connection its address and port in network byte order. Empty by default.
        """
        return ()

    async def outlast(self, domain: bytes, ends: Collection[bytes] = (), *, is_alive: bool = False) -> bool:
        """Wait until no ended write from processes of a domain can still land here.

        Args:
            domain: The result of `domain` in the writing process; not trusted.
            ends: Results of `ends_to` of living processes, which have listed them since; not trusted. What is awaited
                cannot come over these connections. The caller adds to them and removes from them while this waits.
            is_alive: The writing process has not ended, but all of its writes have, and some of them linger.

        Returns:
            True once nothing can land any more, or False if that can never be known. The default returns
            `capabilities.ends_with_process` for an ended process, and False for others.
        """
        return self.capabilities.ends_with_process and not is_alive

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Wait for posted writes, up to the backend's own time limit, then stop.

        This is a fence for every write of the endpoint. Pending events are delivered before this returns, so every post
        has had its `PostEnded`. Does nothing on a backend that is not open.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
