"""Base class for transports whose native agent belongs to one thread."""

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.aio.thread_waker import ThreadWaker
from kvflow.backends.base import Backend, OnBroken, OnEvents
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory, check_memory_kinds, check_unregistered
from kvflow.backends.owner_thread import OwnerThread, Polled, PollIntervals
from kvflow.errors import BackendError, BackendUnavailable, RegistrationError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.resources import error_text

__all__ = ["ConnectedPeer", "NativeAgent", "OwnerBackend", "OwnerThread", "PollIntervals", "Polled"]

Result = TypeVar("Result")


class NativeAgent(Polled, Protocol):
    """A native agent as `OwnerBackend` uses it. Every method is called on the owner thread."""

    def register(self, memory: RegisteredMemory) -> bytes:
        """Register memory, and return what a peer's agent needs to write to all memory registered so far."""

    def disconnect(self, peer: str) -> None:
        """Release a peer's resources once the last post to it has ended."""

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the agent. Every post has had its `PostEnded` when this returns."""


@dataclass(eq=False)
class ConnectedPeer:
    """A peer that can be written to.

    Attributes:
        name: Its agent name.
        memory: The memory it has registered.
    """

    name: str
    memory: RegisteredMemory


AnyAgent = TypeVar("AnyAgent", bound=NativeAgent)
AnyPeer = TypeVar("AnyPeer", bound=ConnectedPeer)


class OwnerBackend(Backend, Generic[AnyAgent, AnyPeer]):
    """A transport whose native agent belongs to one thread. Subclasses define `name`, `capabilities` and three methods.

    Args:
        close_timeout_s: How long `aclose` waits for running posts before it destroys the agent, which stops them.

    Attributes:
        metadata_format: Transport and version that both sides of a connection must share; `name` by default.
    """

    metadata_format: ClassVar[str] = ""

    def __init__(self, intervals: PollIntervals, close_timeout_s: float) -> None:
        self._intervals = intervals
        self._close_timeout_s = close_timeout_s
        self._owner: OwnerThread | None = None
        self._agent: AnyAgent | None = None
        self._memory: RegisteredMemory | None = None
        self._blob = b""
        self._peers: dict[str, AnyPeer] = {}

    @abc.abstractmethod
    def _create_agent(self, agent_name: str, delivery: EventDelivery) -> AnyAgent:
        """Load the library and start an agent, or raise BackendUnavailable. Called on the owner thread."""

    @abc.abstractmethod
    async def _connect(self, peer: str, theirs: PeerMetadata, principal: str) -> AnyPeer:
        """Prepare for writes to a peer that is not connected, as in `Backend.connect_authenticated`."""

    @abc.abstractmethod
    def _post(self, post_id: int, peer: AnyPeer, descriptors: Descriptors, notice: bytes) -> None:
        """Submit a write, whose ranges have been checked, to the owner thread. If this raises, nothing was posted."""

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        self._waker = ThreadWaker()
        self._delivery = EventDelivery(on_events, on_broken, self._waker.call_soon)
        try:
            owner = OwnerThread(f"kvflow-{self.name}-{agent_name}", self._break_down, self._intervals)
            self._agent = await self._start(owner, agent_name)
        except BaseException:
            self._delivery.cancel()
            self._waker.close()
            raise
        self._owner = owner
        owner.submit(functools.partial(owner.adopt, self._agent))

    async def _start(self, owner: OwnerThread, agent_name: str) -> AnyAgent:
        """Create the agent. If this fails or is cancelled, the agent is closed again."""
        created: list[AnyAgent] = []

        def create() -> AnyAgent:
            created.append(self._create_agent(agent_name, self._delivery))
            return created[0]

        def close() -> None:
            for agent in created:
                agent.close(0.0)

        try:
            return await owner.call(create)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                owner.submit(close)
                await owner.stop()
            if isinstance(error, Exception) and not isinstance(error, BackendError):
                raise BackendUnavailable(
                    "transport could not be started", backend=self.name, detail=error_text(error)
                ) from error
            raise

    @override
    async def register(self, layout: KVLayout) -> None:
        self._running()
        check_memory_kinds(layout, self.capabilities.memory_kinds, self.name)
        check_unregistered(self._memory, self.name)
        memory = RegisteredMemory.from_layout(layout)
        self._blob = await self._call(lambda agent: agent.register(memory), RegistrationError)
        self._memory = memory

    @override
    async def extend(self, layout: KVLayout) -> None:
        self._running()
        check_memory_kinds(layout, self.capabilities.memory_kinds, self.name)
        mine = self._registered()
        added = RegisteredMemory.from_layout(layout).without(mine)
        if added:
            more = RegisteredMemory(added, mine.memory_kind, mine.device_id)
            self._blob = await self._call(lambda agent: agent.register(more), RegistrationError)
            self._memory = mine.also(added)

    @override
    def metadata(self) -> bytes:
        return PeerMetadata(self.metadata_format or self.name, self._blob, self._registered()).pack()

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        return self._registered().view(memory, memory.address)

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        await self.connect_authenticated(peer, metadata, "")

    @override
    async def connect_authenticated(self, peer: str, metadata: bytes, principal: str) -> None:
        if peer in self._peers:
            return
        self._running()
        theirs = PeerMetadata.unpack(metadata, backend=self.metadata_format or self.name)
        self._peers[peer] = await self._connect(peer, theirs, principal)

    @override
    async def disconnect(self, peer: str) -> None:
        is_known = self._peers.pop(peer, None) is not None
        if is_known and self._owner is not None and self._agent is not None:
            self._owner.submit(functools.partial(self._agent.disconnect, peer))

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        mine, to = self._both_sides(peer)
        mine.check(descriptors.src, side="source")
        to.memory.check(descriptors.dst, side="destination")
        self._post(post_id, to, descriptors, notice)

    @override
    def watch(self, *, active: bool) -> None:
        """Do nothing; transports that poll for notices override it."""

    @override
    async def aclose(self) -> None:
        owner, self._owner = self._owner, None
        agent, self._agent = self._agent, None
        if owner is None or agent is None or owner.is_abandoned:
            return
        with anyio.CancelScope(shield=True):
            try:
                owner.submit(functools.partial(owner.adopt, None))
                await owner.call(functools.partial(agent.close, self._close_timeout_s))
            except Exception as error:
                raise BackendError(
                    "transport was not closed properly", backend=self.name, detail=error_text(error)
                ) from error
            finally:
                await owner.stop()
                self._waker.close()
                self._delivery.close()

    async def _call(self, function: Callable[[AnyAgent], Result], failure: type[BackendError] = BackendError) -> Result:
        """Call a function with the agent on the owner thread, and return its result.

        Raises:
            BackendError: The backend is not open in this process, or the function has raised this.
            failure: The function has raised anything else.
        """
        owner, agent = self._running()
        try:
            return await owner.call(functools.partial(function, agent))
        except BackendError:
            raise
        except Exception as error:
            raise failure("transport library failed", backend=self.name, detail=error_text(error)) from error

    def _running(self) -> tuple[OwnerThread, AnyAgent]:
        """Return the owner thread and the agent; raise BackendError if the backend is not open in this process."""
        if self._owner is None or self._agent is None:
            raise BackendError("backend is not open", backend=self.name)
        self._owner.check()
        return self._owner, self._agent

    def _registered(self) -> RegisteredMemory:
        if self._memory is None:
            raise BackendError("no memory has been registered yet", backend=self.name)
        return self._memory

    def _both_sides(self, peer: str) -> tuple[RegisteredMemory, AnyPeer]:
        """Return the memory registered here, and a connected peer; raise BackendError if it is not connected."""
        if self._memory is None or peer not in self._peers:
            raise BackendError("peer is not connected", peer=peer)
        return self._memory, self._peers[peer]

    def _break_down(self, error: Exception) -> None:
        """Report an error from the owner thread."""
        self._delivery.fail(BackendError("transport library has failed", backend=self.name, detail=error_text(error)))
