"""Mooncake's TransferEngine as a transport: TCP on any machine, RDMA where there is a device for it.

What the library really does shapes these files:

* Its batch calls spin a whole core each, and after an error the rest of a batch goes on unseen. So each descriptor is
  a transfer of its own, submitted and asked about without blocking (`window`).
* More descriptors in flight to one peer than its queue takes make that peer unreachable for good, so each peer has a
  window that is far smaller.
* The first contact with a peer happens under a lock of the engine, and a peer that hangs then holds up all others for
  up to a minute. So a peer is probed first, in a thread, without that lock.
* What is known of a peer's address is kept for the life of an engine. A peer that comes back under the same address
  stays unreachable for that engine, and an address may belong to another process by now. So a peer has a few random
  bytes in its memory, its life, which are read when it is connected; an engine that cannot read them is passed over
  for a fresh one.
* It has notices, but they are slow, unsafe and lost in silence: not used.

Source: measurements with mooncake-transfer-engine-non-cuda 0.3.13.post1 on Linux, TCP on one host. RDMA is not
measured: there, bytes of a post that failed may always linger.
"""

import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar, get_args

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.aio.mailbox import Mailbox
from kvflow.backends.base import Backend, BackendEvent, Capabilities
from kvflow.backends.host import host_view
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory, check_unregistered
from kvflow.backends.mooncake.address import EndpointAddress
from kvflow.backends.mooncake.agent import Agent
from kvflow.backends.mooncake.engine import PEER_TO_PEER, Engine, EngineSettings, Protocol
from kvflow.backends.mooncake.environment import environment_for, shortest_timeout_s
from kvflow.backends.mooncake.library import ENVIRONMENT, Library, memory_kinds
from kvflow.backends.mooncake.sockets import Connections
from kvflow.backends.mooncake.writing import WritingEngine
from kvflow.backends.owner import OwnerThread
from kvflow.errors import BackendError, ConfigError, RegistrationError
from kvflow.geometry.layout import KVLayout, MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["MooncakeBackend"]

Result = TypeVar("Result")

CONNECTS_AT_ONCE: Final = 32
ENGINES_TO_TRY: Final = 2
"""The second is fresh, unless it was made meanwhile for another peer."""

LOOK_S: Final = 2e-3
"""Between looks at what the dead have left on its way."""

TCP_ROW_OVERHEAD_S: Final = 20e-6
"""What each descriptor costs besides its bytes: 17 to 40 us, measured on one host under load. RDMA is not measured."""

MAX_WINDOW: Final = 1024
"""The library's queue for one peer, if the environment does not make it longer."""


class MooncakeBackend(Backend):
    """Writes through a Mooncake TransferEngine.

    `ends_with_process` is False: bytes in the socket buffers of a peer land after the sender has died. With `same_host`
    it can be seen when they have.

    Args:
        host: Name or IPv4 address of this machine, to which peers connect.
        protocol: "tcp", or "rdma" where there is a device for it.
        devices: RDMA devices to use; all if empty.
        metadata_server: URL of a Mooncake metadata server; without one, engines ask each other.
        environment: Variables to set before the library is loaded, unless they are set already. The library's log
            is silenced unless MC_LOG_LEVEL asks for more than errors.
        same_host: That every peer is on this host and in the same network namespace, which only who runs it can know.
            It lets a decode rank take pages back when a prefill process that wrote to them has died. Only with tcp.
        window: Descriptors under way to one peer at once.
        busy_interval_s: Between polls while something is in flight; otherwise there are none.
        connect_timeout_s: How long a peer may take to answer the first contact.
        close_timeout_s: How long `aclose` waits for running posts before it destroys the engine, which stops them.

    Raises:
        ConfigError: An option is unusable.
    """

    name = "mooncake"
    capabilities = Capabilities(in_band_notices=False, memory_kinds=frozenset({"DRAM"}))

    def __init__(  # noqa: PLR0913 - options, all by name
        self,
        *,
        host: str = "127.0.0.1",
        protocol: Protocol = "tcp",
        devices: Sequence[str] = (),
        metadata_server: str = PEER_TO_PEER,
        environment: Mapping[str, str] = ENVIRONMENT,
        same_host: bool = False,
        window: int = 64,
        busy_interval_s: float = 100e-6,
        connect_timeout_s: float = 5.0,
        close_timeout_s: float = 5.0,
    ) -> None:
        if protocol not in get_args(Protocol):
            raise ConfigError("unknown protocol", protocol=protocol, known=list(get_args(Protocol)))
        if not 1 <= window <= MAX_WINDOW:
            raise ConfigError("window is out of range", window=window, most=MAX_WINDOW)
        if not host or ":" in host:
            raise ConfigError("host must be a name or an IPv4 address, without a port", host=host)
        if same_host and protocol != "tcp":
            raise ConfigError("same_host is only of use with tcp", protocol=protocol)
        if not metadata_server:
            raise ConfigError("metadata server must not be empty", known=PEER_TO_PEER)
        self.capabilities = Capabilities(
            in_band_notices=False,
            memory_kinds=memory_kinds(),
            row_overhead_s=TCP_ROW_OVERHEAD_S if protocol == "tcp" else 0.0,
        )
        self._settings = EngineSettings(host, protocol, tuple(devices), metadata_server)
        self._environment = environment
        self._same_host = same_host
        self._window = window
        self._busy_interval_s = busy_interval_s
        self._connect_timeout_s = connect_timeout_s
        self._close_timeout_s = close_timeout_s
        self._owner: OwnerThread | None = None
        self._agent: Agent | None = None
        self._memory: RegisteredMemory | None = None
        self._peers: dict[str, PeerMetadata] = {}

    @override
    async def open(self, agent_name: str) -> None:
        mailbox: Mailbox[BackendEvent] = Mailbox()
        self._mailbox = mailbox
        self._agent_name = agent_name
        self._log = get_logger(agent=agent_name)
        self._connecting = anyio.CapacityLimiter(CONNECTS_AT_ONCE)
        self._owner = OwnerThread(
            f"kvflow-mooncake-{agent_name}",
            self._break_down,
            busy_interval_s=self._busy_interval_s,
            quiet_interval_s=self._busy_interval_s,
            idle_interval_s=None,
        )
        try:
            self._agent = await self._owner.call(functools.partial(self._make_agent, agent_name, mailbox))
        except BaseException:
            owner, self._owner = self._owner, None
            with anyio.CancelScope(shield=True):
                await owner.stop()
            raise
        self._owner.submit(functools.partial(self._owner.adopt, self._agent))

    @override
    async def register(self, layout: KVLayout) -> None:
        owner, agent = self._running()
        if layout.memory_kind not in self.capabilities.memory_kinds:
            raise RegistrationError(
                "backend cannot register this kind of memory", backend=self.name, memory_kind=layout.memory_kind
            )
        check_unregistered(self._memory, self.name)
        memory = RegisteredMemory(layout.allocations, layout.memory_kind, layout.device_id)
        await owner.call(functools.partial(agent.register, memory))
        self._memory = memory

    @override
    def metadata(self) -> bytes:
        if self._memory is None or self._agent is None:
            raise BackendError("no memory is registered yet", backend=self.name)
        cell = self._agent.cell
        address = EndpointAddress(
            self._agent_name, self._settings.protocol, self._agent.session, cell.life, cell.address
        )
        return PeerMetadata(self.name, address.pack(), self._memory).pack()

    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        if self._memory is None:
            raise BackendError("no memory is registered yet", backend=self.name)
        return host_view(self._memory, memory, memory.address)

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        if peer in self._peers:
            return
        self._running()
        theirs = PeerMetadata.unpack(metadata, backend=self.name)
        address = EndpointAddress.unpack(theirs.agent, agent=peer, protocol=self._settings.protocol)
        try:
            with anyio.fail_after(self._connect_timeout_s):
                await self._meet(peer, address)
        except TimeoutError as error:
            raise BackendError(
                "peer does not answer", peer=peer, session=address.session, timeout_s=self._connect_timeout_s
            ) from error
        self._peers[peer] = theirs

    @override
    async def disconnect(self, peer: str) -> None:
        is_known = self._peers.pop(peer, None) is not None
        if is_known and self._owner is not None and self._agent is not None:
            self._owner.submit(functools.partial(self._agent.disconnect, peer))

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        owner, agent = self._running()
        if self._memory is None or peer not in self._peers:
            raise BackendError("peer is not connected", peer=peer)
        self._memory.check(descriptors.src, side="source")
        self._peers[peer].memory.check(descriptors.dst, side="destination")
        owner.submit(functools.partial(agent.post, post_id, peer, descriptors))

    @override
    def watch(self, *, active: bool) -> None:
        """Nothing to do: the library's own thread serves incoming writes, and there are no notices."""

    @override
    async def take_events(self) -> Sequence[BackendEvent]:
        return await self._mailbox.take()

    @override
    async def outlast(self) -> bool:
        """As the contract says; never for device memory, where what was read may still have to be copied."""
        if not self._same_host or self._memory is None or self._memory.memory_kind != "DRAM":
            return False
        try:
            connections = await anyio.to_thread.run_sync(Connections)
            are_dry = False
            while not are_dry:
                await anyio.sleep(LOOK_S)  # the kernel tells nobody when a connection runs dry
                are_dry = await anyio.to_thread.run_sync(connections.are_dry)
        except OSError as error:
            self._log.warning("mooncake_connections_unknown", detail=str(error))
            return False
        return True

    @override
    async def aclose(self) -> Sequence[BackendEvent]:
        """As the contract says; destroying an engine holds Python's lock for a few milliseconds.

        For up to a second if the library's log is on.
        """
        if self._owner is None:
            return ()
        owner, self._owner = self._owner, None
        if self._agent is not None:
            owner.submit(functools.partial(owner.adopt, None))
            await owner.call(functools.partial(self._agent.close, self._close_timeout_s))
            self._agent = None
        await owner.stop()
        return self._mailbox.take_nowait()

    def _make_agent(self, name: str, mailbox: Mailbox[BackendEvent]) -> Agent:
        """Load the library and start an engine, on the owner thread.

        Raises:
            BackendUnavailable: The library is missing or broken, or no engine could be started.
        """
        library = Library(environment_for(self._settings, self._environment))
        timeout_s = shortest_timeout_s() if self._settings.protocol == "tcp" else 0.0
        start = functools.partial(Engine, library, self._settings)
        return Agent(name, start, mailbox, window=self._window, timeout_s=timeout_s)

    async def _meet(self, peer: str, address: EndpointAddress) -> None:
        """Connect to a peer through an engine that reaches it.

        Raises:
            BackendError: The peer cannot be reached, or somebody else answers under its address.
        """
        worn_out = None
        for _ in range(ENGINES_TO_TRY):
            async with self._borrowed_sender(worn_out) as engine:
                await self._in_thread(functools.partial(engine.probe, address))
                life = await self._in_thread(functools.partial(engine.read_life, address))
                if life == address.life:
                    owner, agent = self._running()  # not if it was closed meanwhile
                    return await owner.call(functools.partial(agent.connect, peer, engine, address.session))
                if life is not None:
                    raise BackendError("somebody else answers under the peer's address", session=address.session)
                worn_out = engine
        raise BackendError("peer answers, but its memory cannot be reached", session=address.session)

    @asynccontextmanager
    async def _borrowed_sender(self, worn_out: WritingEngine | None) -> AsyncIterator[WritingEngine]:
        owner, agent = self._running()
        with anyio.CancelScope(shield=True):  # what is borrowed has to be known
            engine = await owner.call(functools.partial(agent.borrow_sender, worn_out))
        try:
            yield engine
        finally:
            if self._owner is owner:
                owner.submit(functools.partial(agent.give_back, engine))

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._connecting)

    def _break_down(self, error: Exception) -> None:
        self._mailbox.fail(BackendError("Mooncake broke down while it was polled", detail=repr(error)))

    def _running(self) -> tuple[OwnerThread, Agent]:
        if self._owner is None or self._agent is None:
            raise BackendError("backend is not open", backend=self.name)
        return self._owner, self._agent
