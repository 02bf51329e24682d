"""The Mooncake transport: TCP on any machine, RDMA where a device supports it.

Properties of the library determine the design:

* Each of its batch calls spins on a whole core, and after an error the rest of the batch continues unobserved. So each
  descriptor is a separate transfer, submitted and polled without blocking (`window`).
* If more descriptors are in flight to a peer than its queue holds, that peer becomes unreachable for good. So each peer
  has a window far smaller than the queue.
* An engine asks a new peer where its memory is under a lock that starting a write needs, too, so a peer that does not
  answer blocks that engine for up to a minute. So a peer is probed first, without that lock. As it may still hang
  afterwards, writes wait in a queue of their own while an engine opens a session, and the owner thread goes on. Over
  TCP, different principals have different engines, so a peer can block only its own principal. The lock is not needed
  to poll transfers, to register memory, or for the writes of peers.
* A peer can leave the threads that contact it hanging for a minute, so their number is limited, also for each
  principal.
* An engine caches a peer's address forever. A peer that returns under the same address stays unreachable for that
  engine, and the address may belong to another process by now. So each endpoint has a few random bytes in its memory,
  its incarnation, which peers read when they connect to it; an engine that cannot read them is replaced by a fresh one.
* After a partition, TCP retransmits unacknowledged data only after a pause that doubles each time: up to as long after
  the heal as the partition lasted. So a peer that reconnects while posts to it are in flight is connected through
  another engine.
* Sessions are not authenticated. A peer that claims the session of another endpoint has to give an address in that
  endpoint's memory as its incarnation. So if a peer gives an address that lies in the memory of a known endpoint or of
  this one, kvflow checks whether that endpoint's incarnation can be read there as well. Endpoints that are not
  connected here are not known.
* The library uses either IPv4 or IPv6 in the whole process, decided when it is imported.
* Its notices are slow, unauthenticated and lost silently, so they are not used.

Source: measurements with mooncake-transfer-engine-non-cuda 0.3.13.post1 on Linux, TCP on one host. RDMA was not
measured; there, bytes of a failed post may always linger.
"""

import dataclasses
import functools
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar, get_args

import anyio
from msgspec.structs import replace
from typing_extensions import override

from kvflow.backends.base import Capabilities
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.last_bytes import LastBytesBackend
from kvflow.backends.library_sockets import CHECK_S, SILENT_S
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.backends.mooncake.address import CELL_BYTES, INCARNATION_BYTES, EndpointAddress
from kvflow.backends.mooncake.agent import Agent
from kvflow.backends.mooncake.contacts import ContactThreads
from kvflow.backends.mooncake.engine import MooncakeEngine, WritingEngine
from kvflow.backends.mooncake.library import (
    ENVIRONMENT,
    PEER_TO_PEER,
    EngineSettings,
    Library,
    Protocol,
    environment_for,
    memory_kinds,
    shortest_timeout_s,
)
from kvflow.backends.owner import ConnectedPeer, PollIntervals
from kvflow.errors import BackendError, ConfigError
from kvflow.geometry.plan import Descriptors

__all__ = ["MooncakeBackend"]

Result = TypeVar("Result")

MAX_TCP_SENDERS: Final = 8
"""Engines over TCP for different principals. An idle one has two threads and five open file descriptors, and closing it
takes a second. Over RDMA there is one, because each registers all memory again."""

CONTACTS_AT_ONCE: Final = 64
"""Calls to peers at once; a single principal can have half of them. Includes calls that were given up but still run."""

ENGINES_TO_TRY: Final = 2
"""The second engine is fresh, unless it was already started for another peer."""

TCP_DESCRIPTOR_OVERHEAD_S: Final = 20e-6
"""Cost of each descriptor besides its bytes: 17 to 40 us, measured on one host under load. RDMA was not measured."""

LOCAL_HOST: Final = "127.0.0.1"

MAX_WINDOW: Final = 1024
"""Size of the library's queue for one peer, unless the environment makes it longer."""


@dataclasses.dataclass(eq=False)
class _MooncakePeer(ConnectedPeer):
    """A connected peer, with the address of its endpoint."""

    address: EndpointAddress


class MooncakeBackend(LastBytesBackend[Agent, _MooncakePeer]):
    """A transport that writes through a Mooncake TransferEngine.

    `ends_with_process` is False: bytes in a peer's socket buffers land after the sender has died. Over TCP, the kernel
    shows when they have (`outlast`).

    Args:
        host: Name, or IPv4 or IPv6 address without brackets, at which peers reach this process. By default the host
            that the rank advertises, or 127.0.0.1 if it advertises none.
        protocol: "tcp", or "rdma" if there is a device for it.
        devices: RDMA devices to use; all if empty.
        metadata_server: URL of a Mooncake metadata server; without one, engines ask each other.
        environment: Variables to set before the library is loaded, unless they are set already. The library's log is
            silenced unless MC_LOG_LEVEL asks for more than errors.
        window: Maximum number of descriptors in flight to one peer.
        busy_interval_s: Seconds between polls while something is in flight. Otherwise connections are checked while
            transfers are open or sent data is unacknowledged, and there are no polls once nothing is left to check.
        connect_timeout_s: How long a peer may take to answer the first contact; by default as long as its handshake may
            take.
        close_timeout_s: How long `aclose` waits for running posts before it destroys the engine, which stops them.

    Raises:
        ConfigError: An option is invalid.
    """

    name = "mooncake"
    capabilities = Capabilities(in_band_notices=False, memory_kinds=frozenset({"DRAM"}))

    def __init__(  # noqa: PLR0913 - options, all by name
        self,
        *,
        host: str | None = None,
        protocol: Protocol = "tcp",
        devices: Sequence[str] = (),
        metadata_server: str = PEER_TO_PEER,
        environment: Mapping[str, str] = ENVIRONMENT,
        window: int = 64,
        busy_interval_s: float = 100e-6,
        connect_timeout_s: float | None = None,
        close_timeout_s: float = 5.0,
    ) -> None:
        if protocol not in get_args(Protocol):
            raise ConfigError("unknown protocol", protocol=protocol, known=list(get_args(Protocol)))
        if not 1 <= window <= MAX_WINDOW:
            raise ConfigError("window must be between 1 and the maximum", window=window, maximum=MAX_WINDOW)
        if host is not None and not _is_host(host):
            raise ConfigError("host must be a name or an address, without brackets or a port", host=host)
        if not metadata_server:
            raise ConfigError("metadata server must not be empty", known=PEER_TO_PEER)
        self.capabilities = Capabilities(
            in_band_notices=False,
            memory_kinds=memory_kinds(),
            queue_pairs=protocol == "rdma",
            descriptor_overhead_s=TCP_DESCRIPTOR_OVERHEAD_S if protocol == "tcp" else 0.0,
        )
        intervals = PollIntervals(busy_interval_s, busy_interval_s, CHECK_S)
        super().__init__(intervals, close_timeout_s, of_domain=False)
        self._is_host_given = host is not None
        self._settings = EngineSettings(host or LOCAL_HOST, protocol, tuple(devices), metadata_server)
        self._environment = environment
        self._window = window
        self._connect_timeout_s = connect_timeout_s
        self._contacts = ContactThreads(CONTACTS_AT_ONCE)

    @property
    @override
    def paths(self) -> str:
        if self._settings.protocol == "tcp":
            return "TCP"
        return f"RDMA over {', '.join(self._settings.devices) or 'any device'}"

    @property
    @override
    def observed_paths(self) -> Mapping[str, int]:
        return {} if self._agent is None else self._agent.observed_paths

    @override
    def advertise(self, host: str) -> None:
        if not self._is_host_given:
            self._settings = dataclasses.replace(self._settings, host=host)

    @override
    def _create_agent(self, agent_name: str, delivery: EventDelivery) -> Agent:
        library = Library(environment_for(self._settings, self._environment))
        protocol = self._settings.protocol
        timeout_s = min(shortest_timeout_s(), SILENT_S / 2) if protocol == "tcp" else 0.0
        start = functools.partial(MooncakeEngine, library, self._settings)
        return Agent(
            agent_name,
            start,
            delivery,
            protocol=protocol,
            window=self._window,
            timeout_s=timeout_s,
            max_senders=MAX_TCP_SENDERS if protocol == "tcp" else 1,
        )

    @override
    async def _connect(self, peer: str, theirs: PeerMetadata, principal: str) -> _MooncakePeer:
        address = EndpointAddress.unpack(theirs.agent, agent=peer, protocol=self._settings.protocol)
        try:
            with anyio.fail_after(self._connect_timeout_s):
                await self._reach(principal, peer, address)
        except TimeoutError as error:
            raise BackendError(
                "peer does not answer", peer=peer, session=address.session, timeout_s=self._connect_timeout_s
            ) from error
        return _MooncakePeer(peer, theirs.memory, address)

    @override
    def _post(self, post_id: int, peer: _MooncakePeer, descriptors: Descriptors, notice: bytes) -> None:
        owner, agent = self._running()
        owner.submit(functools.partial(agent.post, post_id, peer.name, descriptors))

    @override
    def watch(self, *, active: bool) -> None:
        if self._owner is not None and self._agent is not None:
            self._owner.submit(functools.partial(self._agent.watch, active))

    @override
    def _can_be_seen(self) -> bool:
        return self._settings.protocol == "tcp"

    async def _reach(self, principal: str, peer: str, address: EndpointAddress) -> None:
        """Open the connection to a peer through an engine that can write to it."""
        worn_out = await self._call(lambda agent: agent.engine_in_use(peer))
        for _ in range(ENGINES_TO_TRY):
            async with self._borrowed_sender(principal, worn_out) as engine:
                contact = functools.partial(self._contact, principal, engine)
                await contact(functools.partial(engine.probe, address))
                if not await contact(functools.partial(engine.open_session, address.session), is_opening=True):
                    raise BackendError("peer answers, but does not say where its memory is", session=address.session)
                await self._check_owner(contact, engine, peer, address)
                incarnation = await contact(functools.partial(engine.read_incarnation, address))
                if incarnation == address.incarnation:
                    connect = functools.partial(Agent.connect, peer=peer, engine=engine, session=address.session)
                    return await self._call(connect)
                if incarnation is not None:
                    raise BackendError("a different process answers at the peer's address", session=address.session)
                worn_out = engine
        raise BackendError("peer answers, but its memory cannot be reached", session=address.session)

    async def _check_owner(
        self,
        contact: Callable[[Callable[[], bytes | None]], Awaitable[bytes | None]],
        engine: WritingEngine,
        peer: str,
        address: EndpointAddress,
    ) -> None:
        """Reject the session of another endpoint, or of this one under another name (it may have several addresses).

        It is another's if the incarnation of that one can be read over it.
        """
        own = await self._call(lambda agent: agent.address)
        if peer == own.agent and address == own:
            return
        known = [(own, self._memory), *((other.address, other.memory) for other in self._peers.values())]
        for other, memory in known:
            if _is_in(other, memory, address.incarnation_address):
                at = replace(address, incarnation_address=other.incarnation_address)
                if await contact(functools.partial(engine.read_incarnation, at)) == other.incarnation:
                    raise BackendError("peer gives the session of another one", peer=peer, session=address.session)

    @asynccontextmanager
    async def _borrowed_sender(self, principal: str, worn_out: WritingEngine | None) -> AsyncIterator[WritingEngine]:
        owner, agent = self._running()
        borrowed: list[WritingEngine] = []

        def borrow() -> WritingEngine:
            borrowed.append(agent.borrow_sender(principal, worn_out))
            return borrowed[0]

        def give_back() -> None:  # also an engine that was borrowed when nobody waited for it any more
            for engine in borrowed:
                agent.give_back(engine)

        try:
            yield await self._call(lambda _agent: borrow())
        finally:
            if self._owner is owner:
                owner.submit(give_back)

    async def _contact(
        self, principal: str, engine: WritingEngine, function: Callable[[], Result], *, is_opening: bool = False
    ) -> Result:
        """Run a function that calls a peer through an engine in a thread. It continues if the caller gives up.

        An engine opens one session at a time, because of its lock; further ones wait without a thread. If this backend
        is closed before the function begins, this raises BackendError.
        """
        owner, agent = self._running()

        def call() -> Result:
            with engine.contact(is_opening=is_opening):
                self._running()
                return function()

        return await self._contacts.run(
            principal,
            call,
            resource=engine if is_opening else None,
            on_abandoned=functools.partial(owner.submit, agent.close_unused),
        )


def _is_in(endpoint: EndpointAddress, memory: RegisteredMemory | None, address: int) -> bool:
    """Return whether an incarnation at `address` overlaps memory that peers can read at an endpoint."""
    spans = [] if memory is None else [(item.address, item.end) for item in memory.ranges]
    spans.append((endpoint.incarnation_address, endpoint.incarnation_address + CELL_BYTES))
    return any(start < address + INCARNATION_BYTES and address < end for start, end in spans)


def _is_host(text: str) -> bool:
    """Return whether a text can be a host name or an address; only an IPv6 address has colons."""
    if ":" not in text:
        return bool(text)
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
