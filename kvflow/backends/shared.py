"""One transport endpoint for several ranks of a process, such as a prefill and a decode rank on one pool.

The endpoint has one native agent, one thread and one registration of the memory. Each rank has a `RankEndpoint`, a
`Backend` like any other except that closing it is not a fence while other ranks use the agent. Writes of the rank that
have not ended by then are never reported as ended, so their pages are not reused by mistake.
"""

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends import create_backend
from kvflow.backends.base import Backend, BackendEvent, NoticeArrived, OnBroken, OnEvents, PostEnded
from kvflow.errors import BackendError, BackendUnavailable, LocalProtocolError, RegistrationError
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.plan import Descriptors

__all__ = ["RankEndpoint", "SharedBackend"]

Moves = TypeVar("Moves")

CLOSE_TIMEOUT_S = 5.0


class SharedBackend:
    """A transport for several ranks of one process, on one event loop. Pass it to each of them as `backend`.

    It opens with the first rank, closes when the last one leaves, and can then be opened again. The ranks usually have
    the same memory, which is registered once; each rank's staging memory is added, and kept until the endpoint closes.

    Args:
        name: Name of the transport, as in the settings of a rank, or a function that creates one.
        options: Options for the transport, as in the settings of a rank.
        close_timeout_s: How long a rank that leaves before the others waits for its writes.

    Raises:
        ConfigError: The transport is unknown, or does not accept these options.
        BackendUnavailable: A plugin of that name cannot be imported, or is not a backend.
    """

    def __init__(
        self,
        name: str | Callable[[], Backend] = "nixl",
        options: Mapping[str, object] | None = None,
        *,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.close_timeout_s = close_timeout_s
        chosen = dict(options or {})
        self._make = functools.partial(create_backend, name, chosen) if isinstance(name, str) else name
        self.inner = self._make()
        self.agent: str | None = None  # that of the rank that opened it; None while it is closed
        self.members: dict[RankEndpoint, str] = {}  # with their agent names
        self._host: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._has_memory = False
        self._error: BackendError | None = None
        self._connected: dict[str, dict[RankEndpoint, None]] = {}
        self._posts: dict[int, tuple[RankEndpoint, int]] = {}
        self._num_posts = 0
        self._kept: list[object] = []

    def advertise(self, host: str) -> None:
        """Set the host as in `Backend.advertise`; ignored once the endpoint is open."""
        if self.agent is None:
            self._host = host

    async def enter(self, member: "RankEndpoint", agent_name: str) -> None:
        """Add a rank, which must be on the event loop of the others; the first one opens the transport."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise LocalProtocolError("ranks that share a backend must be on one event loop", backend=self.inner.name)
        self._loop = loop
        async with self._lock:
            if self._error is not None:
                raise BackendUnavailable("shared transport has failed", detail=str(self._error))
            if self.agent is None:
                await self._open(agent_name)
            self.members[member] = agent_name

    async def _open(self, agent_name: str) -> None:
        if self._host is not None:
            self.inner.advertise(self._host)
        try:
            await self.inner.open(agent_name, self._distribute_events, self._break_down)
        except BaseException:
            self._reset()
            raise
        self.agent = agent_name

    def _reset(self) -> None:
        """Create a fresh transport, because a backend can be opened only once."""
        self.inner = self._make()
        self.agent = self._loop = self._error = None
        self._has_memory = False
        self._connected.clear()
        self._posts.clear()
        self._kept.clear()

    async def register(self, layout: KVLayout) -> None:
        """Register the parts of a rank's memory that are not registered yet, or raise RegistrationError."""
        async with self._lock:
            await (self.inner.extend(layout) if self._has_memory else self.inner.register(layout))
            self._has_memory = True

    def keep(self, memory: object) -> None:
        """Keep memory alive until the transport closes, because peers may write to it until then."""
        self._kept.append(memory)

    async def connect(self, member: "RankEndpoint", peer: str, metadata: bytes, principal: str) -> None:
        """Prepare for writes of one rank to a peer, as in `Backend.connect_authenticated`."""
        self._connected.setdefault(peer, {})[member] = None
        try:
            await self.inner.connect_authenticated(peer, metadata, principal)
        except BaseException:
            await self.disconnect(member, peer)
            raise

    async def disconnect(self, member: "RankEndpoint", peer: str) -> None:
        """Release a peer's resources, unless another rank is connected to it."""
        users = self._connected.get(peer)
        if users is None or member not in users:
            return
        del users[member]
        if not users:
            del self._connected[peer]
            await self.inner.disconnect(peer)

    def begin(self, member: "RankEndpoint", post_id: int) -> int:
        """Return a post number that is unique across all ranks."""
        number = self._num_posts
        self._num_posts += 1
        self._posts[number] = (member, post_id)
        return number

    def forget(self, number: int) -> None:
        """Forget a post that was refused."""
        del self._posts[number]

    def watch(self) -> None:
        """Poll for notices if any rank expects some."""
        self.inner.watch(active=any(member.is_watching for member in self.members))

    async def leave(self, member: "RankEndpoint") -> None:
        """Remove a rank once its writes have ended or its time is up; the last rank closes the transport."""
        if member not in self.members:
            return
        if len(self.members) > 1 and self._error is None:
            with anyio.move_on_after(self.close_timeout_s):
                await member.wait_until_idle()
        async with self._lock:
            if len(self.members) == 1:
                await self._close(member)
                return
            for peer in [peer for peer, users in self._connected.items() if member in users]:
                await self.disconnect(member, peer)
            del self.members[member]
            self.watch()

    async def _close(self, last: "RankEndpoint") -> None:
        try:
            await self.inner.aclose()  # delivers the end of every post
        finally:
            del self.members[last]
            self._reset()

    def _distribute_events(self, events: Sequence[BackendEvent]) -> None:
        """Distribute events: each rank gets those of its own posts, and notices go to the ranks that expect them."""
        found: dict[RankEndpoint, list[BackendEvent]] = {}
        for event in events:
            if isinstance(event, NoticeArrived):
                for member in self._readers():
                    found.setdefault(member, []).append(event)
                continue
            is_end = isinstance(event, PostEnded)
            known = self._posts.pop(event.post_id, None) if is_end else self._posts.get(event.post_id)
            if known is not None and known[0] in self.members:
                member, post_id = known
                found.setdefault(member, []).append(_renumbered(event, post_id))
        for member, its_events in found.items():
            member.forward_events(its_events)

    def _readers(self) -> list["RankEndpoint"]:
        """Return the ranks whose `watch` was ever called; if there are none, all ranks."""
        return [member for member in self.members if member.has_watched] or list(self.members)

    def _break_down(self, error: BackendError) -> None:
        self._error = error
        for member in list(self.members):
            member.break_down(error)


class RankEndpoint(Backend):
    """One rank's view of a `SharedBackend`.

    Attributes:
        is_watching: True while the rank expects notices.
        has_watched: True if `watch` was ever called.
    """

    def __init__(self, shared: SharedBackend) -> None:
        self.name = shared.inner.name
        self.capabilities = shared.inner.capabilities
        self.is_watching = False
        self.has_watched = False
        self._shared = shared
        self._is_open = False
        self._is_registered = False
        self._is_broken = False
        self._peers: dict[str, None] = {}
        self._running: dict[int, None] = {}
        self._idle = anyio.Event()

    @property
    @override
    def shared_agent(self) -> str | None:
        return self._shared.agent

    @property
    @override
    def paths(self) -> str:
        return self._shared.inner.paths

    @property
    @override
    def observed_paths(self) -> Mapping[str, int]:
        return self._shared.inner.observed_paths

    @override
    def is_shared_with(self, agent_name: str) -> bool:
        return agent_name in self._shared.members.values()

    @override
    def advertise(self, host: str) -> None:
        self._shared.advertise(host)

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        self._on_events, self._on_broken = on_events, on_broken
        await self._shared.enter(self, agent_name)
        self._is_open = True

    @override
    async def register(self, layout: KVLayout) -> None:
        self._check_open()
        if self._is_registered:
            raise RegistrationError("memory is already registered", backend=self.name)
        await self._shared.register(layout)
        self._is_registered = True

    def keep(self, memory: object) -> None:
        """Keep memory alive while peers may write to it."""
        self._shared.keep(memory)

    @override
    def metadata(self) -> bytes:
        self._check_registered()
        return self._shared.inner.metadata()

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        self._check_registered()
        return self._shared.inner.view(memory)

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        await self.connect_authenticated(peer, metadata, "")

    @override
    async def connect_authenticated(self, peer: str, metadata: bytes, principal: str) -> None:
        self._check_open()
        if peer not in self._peers:
            await self._shared.connect(self, peer, metadata, principal)
            self._peers[peer] = None

    @override
    async def disconnect(self, peer: str) -> None:
        if peer in self._peers:
            del self._peers[peer]
            await self._shared.disconnect(self, peer)

    @override
    def unclosed(self) -> Collection[str]:
        return self._shared.inner.unclosed()

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        self._post(self._shared.inner.post, post_id, peer, descriptors, notice)

    @override
    def post_blocks(self, post_id: int, peer: str, blocks: Blocks, notice: bytes) -> None:
        self._post(self._shared.inner.post_blocks, post_id, peer, blocks, notice)

    @override
    def watch(self, *, active: bool) -> None:
        if self._is_open:
            self.is_watching, self.has_watched = active, True
            self._shared.watch()

    @override
    def domain(self) -> bytes:
        self._check_registered()
        return self._shared.inner.domain()

    @override
    async def outlast(self, domain: bytes, ends: Collection[bytes] = (), *, is_alive: bool = False) -> bool:
        return await self._shared.inner.outlast(domain, ends, is_alive=is_alive)

    @override
    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        return self._shared.inner.ends_to(peer)

    @override
    async def aclose(self) -> None:
        """Leave the shared endpoint. A fence only for the last rank; others get no `PostEnded` for unended writes."""
        if not self._is_open:
            return
        self._is_open = False
        self._peers.clear()
        with anyio.CancelScope(shield=True):
            await self._shared.leave(self)

    async def wait_until_idle(self) -> None:
        """Wait until every write of this rank has ended, or the transport has failed."""
        while self._running and not self._is_broken:
            self._idle = anyio.Event()
            await self._idle.wait()

    def forward_events(self, events: Sequence[BackendEvent]) -> None:
        """Forward events to the rank."""
        for event in events:
            if isinstance(event, PostEnded):
                self._running.pop(event.post_id, None)
        if not self._running:
            self._idle.set()
        self._on_events(events)

    def break_down(self, error: BackendError) -> None:
        """Report to the rank that the transport has failed."""
        self._is_broken = True
        self._idle.set()
        self._on_broken(error)

    def _post(
        self, post: Callable[[int, str, Moves, bytes], None], post_id: int, peer: str, moves: Moves, notice: bytes
    ) -> None:
        if peer not in self._peers:
            raise BackendError("peer is not connected", peer=peer)
        self._running[post_id] = None
        number = self._shared.begin(self, post_id)
        try:
            post(number, peer, moves, notice)
        except BaseException:
            del self._running[post_id]
            self._shared.forget(number)
            raise

    def _check_open(self) -> None:
        if not self._is_open:
            raise BackendError("backend is not open", backend=self.name)

    def _check_registered(self) -> None:
        if not self._is_registered:
            raise BackendError("no memory has been registered yet", backend=self.name)


def _renumbered(event: BackendEvent, post_id: int) -> BackendEvent:
    if isinstance(event, NoticeArrived):
        return event
    if isinstance(event, PostEnded):
        return PostEnded(post_id, event.error, event.lingers)
    return type(event)(post_id, event.error)
