"""The transport that SGLang plans for its single protocol layer, on any transport of kvflow.

SGLang plans to have its protocol (rooms, chunks, aborts) once, and a transport for each library, which names memory,
submits writes and reports their progress. `KvflowTransport` has the methods of that sketch, and adds what it lacks:
whether a write is *drained*. A write that has failed may still read its source, and may still land at its target, so a
protocol that frees pages needs to know three things of each write, not one:

- its `state`: whether it arrived;
- `is_source_drained`: nothing reads the source any more, so prefill may reuse it;
- `is_target_drained`: nothing of it can land any more, so decode may reuse its pages.

Elapsed time makes none of them true. What a writer cannot know (bytes that are in the network when its process ends),
its target can find out: see `outlast`.
"""

import enum
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from kvflow import BackendError, KVLayout
from kvflow.backends import BackendEvent, NoticeArrived, PostEnded, PostInDoubt, create_backend
from kvflow.blocking import LoopThread
from kvflow.geometry import Component, Descriptors, Location, MemoryRange, Region

__all__ = [
    "Handle",
    "KvflowTransport",
    "Peer",
    "State",
    "TransferBlock",
    "TransferStatus",
    "TransportCapabilities",
]

NO_OPTIONS: Final[Mapping[str, object]] = {}


class State(enum.Enum):
    """Whether a write has arrived."""

    IN_PROGRESS = "in progress"
    DONE = "done"
    """Every byte is in the target's memory."""
    FAILED = "failed"


class TransferStatus(NamedTuple):
    """What is known of a write. Once something is true, it stays true.

    Attributes:
        state: Whether it arrived.
        is_source_drained: Nothing reads its source any more.
        is_target_drained: Nothing of it can land at its target any more.
        error: Why it failed; empty unless it did.
    """

    state: State = State.IN_PROGRESS
    is_source_drained: bool = False
    is_target_drained: bool = False
    error: str = ""


class TransportCapabilities(NamedTuple):
    """Of the capabilities in SGLang's sketch, those that differ between transports, and kvflow's own.

    Attributes:
        cancel: A submitted write can be cancelled. Neither NIXL nor Mooncake can do that: what has been submitted is
            awaited, and `close` is the only way to cut it short.
        peer_probe: It notices by itself that a peer has died. The protocol's heartbeats do that.
        memory_kinds: Kinds of memory that it can register: "DRAM", "VRAM".
        in_band_notices: A notice can be sent with a write, and arrives after its bytes.
        ends_with_process: Nothing lands after the writing process has ended.
    """

    cancel: bool
    peer_probe: bool
    memory_kinds: frozenset[str]
    in_band_notices: bool
    ends_with_process: bool


class TransferBlock(NamedTuple):
    """Bytes to copy. Addresses are unsigned; devices are ordinals, 0 for host memory."""

    source: int
    target: int
    length: int
    source_device: int = 0
    target_device: int = 0


class Peer(NamedTuple):
    """A peer that can be written to."""

    name: str


class Handle:
    """One write."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._status = TransferStatus()

    def __repr__(self) -> str:
        return f"<write {self.number}: {self._status.state.value}>"


class KvflowTransport:
    """One endpoint. Its methods wait for its own thread for some 0.1 ms at most, except those that open and close.

    Args:
        name: Name of one of kvflow's transports; must be the same on both sides.
        options: Its options.
        on_progress: Called, on a thread of the transport, when a status has changed or a notice has arrived. It must
            not call the transport. For an owner that would rather be woken than poll.
    """

    def __init__(
        self, name: str, options: Mapping[str, object] = NO_OPTIONS, *, on_progress: Callable[[], object] = lambda: None
    ) -> None:
        self.backend = create_backend(name, options)
        self.error: BackendError | None = None
        """Why the transport has stopped working; only `close` may be called then."""
        self._on_progress = on_progress
        self._thread = LoopThread()
        self._numbers = itertools.count()
        self._open: dict[int, Handle] = {}
        self._notices: deque[bytes] = deque()
        self._is_open = False

    @property
    def capabilities(self) -> TransportCapabilities:
        """What it can do."""
        own = self.backend.capabilities
        return TransportCapabilities(
            cancel=False,
            peer_probe=False,
            memory_kinds=own.memory_kinds,
            in_band_notices=own.in_band_notices,
            ends_with_process=own.ends_with_process,
        )

    def init(self, name: str) -> None:
        """Start the endpoint; raise BackendUnavailable if its library is missing.

        Args:
            name: Unique in the deployment and different at every start.
        """
        self._thread.__enter__()
        try:
            self._thread.portal.call(self.backend.open, name, self._take_events, self._break)
        except BaseException:
            self._thread.__exit__(None, None, None)
            raise
        self._is_open = True

    def close(self) -> None:
        """Wait for submitted writes, up to the transport's own limit, and stop.

        All handles have ended then, and their sources are drained. Does nothing if the endpoint is not open.
        """
        if self._is_open:
            self._call(self.backend.aclose)
            self._is_open = False
            self._thread.__exit__(None, None, None)

    def register_memory(self, regions: Iterable[MemoryRange]) -> None:
        """Make memory readable and writable for the transport, until `close`. Call it once, for all regions.

        Raises:
            RegistrationError: It was refused, or memory is registered already.
        """
        self._call(partial(self.backend.register, _layout(sorted(regions))))

    def local_desc(self) -> bytes:
        """Return what a peer needs to write here; raise BackendError if no memory is registered."""
        found: bytes = self._call(self.backend.metadata)
        return found

    def open_peer(self, peer_id: str, desc: bytes) -> Peer:
        """Prepare for writes to a peer.

        Args:
            peer_id: The name that the peer gave to `init`.
            desc: Its `local_desc`; not trusted.

        Raises:
            BackendError: It is damaged, or of another peer or transport.
        """
        self._call(partial(self.backend.connect, peer_id, desc))
        return Peer(peer_id)

    def close_peer(self, peer: Peer) -> None:
        """Forget a peer. Submitted writes run to their end."""
        if self._is_open:
            self._call(partial(self.backend.disconnect, peer.name))

    def submit(self, peer: Peer, blocks: Sequence[TransferBlock], notice: bytes = b"") -> Handle:
        """Start to write, and return at once.

        Args:
            peer: Where to.
            blocks: At least one; of one kind of memory and one device on each side.
            notice: Arrives at the peer after the last byte (`take_notices`). Requires `in_band_notices`.

        Raises:
            BackendError: A block is outside registered memory, or the peer is not open; nothing was submitted.
        """
        columns = np.array(blocks, np.uint64).reshape(-1, 5)
        descriptors = Descriptors(columns[:, (0, 2, 3)].copy(), columns[:, (1, 2, 4)].copy())
        found: Handle = self._call(partial(self._submit, peer, descriptors, notice))
        return found

    def poll(self, handle: Handle) -> TransferStatus:
        """Return what is known of a write. This only reads it: progress does not depend on polling."""
        return handle._status

    def take_notices(self) -> list[bytes]:
        """Return the notices that have arrived since the last call. Their senders are not authenticated."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def watch(self, *, active: bool) -> None:
        """Say whether writes or notices are expected here: a target over TCP makes progress only while it polls."""
        if self._is_open:
            self._call(partial(self.backend.watch, active=active))

    def domain(self) -> bytes:
        """Return what the target of this endpoint's writes passes to `outlast` when this process has ended."""
        found: bytes = self._call(self.backend.domain)
        return found

    def outlast(self, domain: bytes, ends: Collection[bytes] = (), *, is_alive: bool = False) -> bool:
        """Wait until no ended write from another process can land here any more; see `kvflow.backends.Backend.outlast`.

        Returns:
            False if that cannot be known, so that only an operator can release the pages.
        """
        found: bool = self._call(partial(self.backend.outlast, domain, ends, is_alive=is_alive))
        return found

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call a method of the backend on its event loop, and return its result."""
        if not self._is_open:
            raise BackendError("transport is not open", backend=self.backend.name)
        return self._thread.portal.call(function)

    # What runs on the event loop

    def _submit(self, peer: Peer, descriptors: Descriptors, notice: bytes) -> Handle:
        handle = Handle(next(self._numbers))
        self.backend.post(handle.number, peer.name, descriptors, notice)
        self._open[handle.number] = handle
        return handle

    def _take_events(self, events: Sequence[BackendEvent]) -> None:
        for event in events:
            match event:
                case NoticeArrived():
                    self._notices.append(event.payload)
                case PostInDoubt():
                    self._open[event.post_id]._status = TransferStatus(State.FAILED, error=event.error)
                case PostEnded():
                    self._open.pop(event.post_id)._status = _ended(event)
        self._on_progress()

    def _break(self, error: BackendError) -> None:
        self.error = error
        self._on_progress()


def _ended(event: PostEnded) -> TransferStatus:
    if event.error is None:
        return TransferStatus(State.DONE, is_source_drained=True, is_target_drained=True)
    return TransferStatus(State.FAILED, is_source_drained=True, is_target_drained=not event.lingers, error=event.error)


def _layout(regions: Sequence[MemoryRange]) -> KVLayout:
    """Return a layout with these allocations; what is in them is the protocol's business."""
    first = regions[0]
    cell = Region("bytes", 0, first.address, 1, 0, 1, 0, (0, 1), 0, first.length, "uint8")
    default = first.location or Location("DRAM", 0)
    return KVLayout(
        (Component("bytes", (cell,)),),
        "",
        allocations=tuple(regions),
        memory_kind=default.memory_kind,
        device_id=default.device_id,
    )
