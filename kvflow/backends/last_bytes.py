"""Base class for transports whose bytes in flight to and from host memory the kernel shows, in TCP connections."""

import abc
import errno
import functools
import math
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

import anyio
from typing_extensions import override

from kvflow.aio.worker_threads import run_in_thread
from kvflow.backends.library_sockets import LibrarySockets
from kvflow.backends.owner import AnyPeer, NativeAgent, OwnerBackend, PollIntervals
from kvflow.backends.sockets import (
    Connections,
    Elsewhere,
    LibraryEnds,
    domain_of_host,
    hosts_of,
    is_same_kernel,
    listening_ports,
)
from kvflow.errors import BackendError, Shortage
from kvflow.observe.logs import get_logger
from kvflow.resources import check_shortage

__all__ = ["LastBytesBackend", "SocketDrainCheck", "TcpAgent", "accepted_ends", "choose_elsewhere", "ends_of"]

Result = TypeVar("Result")

LOOK_S: Final = 2e-3
MAX_LOOK_S: Final = 1.0
"""Longest pause between two checks; the first is `LOOK_S`, and each is twice as long. The kernel sends no event."""

AWAITED_S: Final = 5.0
"""After this long, the connections that are not dry are logged once."""

MAX_DESCRIBED: Final = 4


class TcpAgent(NativeAgent, Protocol):
    """A native agent whose connections are known."""

    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        """Return the local ends of the sound connections to a peer, see `Backend.ends_to`. Called on any thread."""

    def look_at_sockets(self) -> list[LibrarySockets]:
        """Let the library accept what has arrived, note its latest connections, and return them all."""


AnyTcpAgent = TypeVar("AnyTcpAgent", bound=TcpAgent)


class LastBytesBackend(OwnerBackend[AnyTcpAgent, AnyPeer], Generic[AnyTcpAgent, AnyPeer]):
    """Waits for last bytes: on this kernel until connections are dry, else until they are closed and read.

    Args:
        of_domain: On this kernel, check only connections with its own processes, whichever side opened them. Otherwise
            check those that peers opened, with any process.
    """

    def __init__(self, intervals: PollIntervals, close_timeout_s: float, *, of_domain: bool) -> None:
        super().__init__(intervals, close_timeout_s)
        self._of_domain = of_domain
        self._socket_drain = SocketDrainCheck(self.name, self._list_here)

    @abc.abstractmethod
    def _can_be_seen(self) -> bool:
        """Return whether every path of a write between host memory ends with its process, or shows its data."""

    @override
    def domain(self) -> bytes:
        """Name the kernel, network namespace and addresses, if the kernel shows all data in flight here."""
        is_on_host = self._memory is not None and set(self._memory.by_kind) == {"DRAM"}
        if not is_on_host or not self._can_be_seen():
            return b""
        try:
            return domain_of_host()
        except OSError as error:
            get_logger(backend=self.name).info("kernel_domain_unknown", detail=str(error))
            return b""

    @override
    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        return () if self._agent is None else self._agent.ends_to(peer)

    @override
    async def outlast(self, domain: bytes, ends: Collection[bytes] = (), *, is_alive: bool = False) -> bool:
        """Implement the contract for host memory. For device memory, data may be read but not yet copied."""
        if self.capabilities.ends_with_process and not is_alive:
            return True
        own = self.domain()
        if not own or (not domain and (is_alive or self._of_domain)):
            return False
        try:
            drain = self._socket_drain
            if domain and not is_same_kernel(domain, own):
                drain = SocketDrainCheck(self.name, functools.partial(self._list_elsewhere, domain, ends))
            await drain.wait()
            await self._call(lambda agent: agent.poll())
        except (OSError, BackendError) as error:
            get_logger(backend=self.name).warning("last_bytes_unknown", detail=str(error))
            return False
        return True

    async def _list_here(self) -> Connections:
        ends = await self._call(lambda agent: ends_of(agent.look_at_sockets()))
        if not self._of_domain:
            ends = accepted_ends(ends)
        return await _look(lambda: Connections(ends, of_domain=self._of_domain))

    async def _list_elsewhere(self, domain: bytes, spared: Collection[bytes]) -> Connections:
        def find(agent: AnyTcpAgent) -> tuple[LibraryEnds, Elsewhere]:
            found = agent.look_at_sockets()
            return ends_of(found), choose_elsewhere(found, domain=domain, spared=spared)

        ends, elsewhere = await self._call(find)
        return await _look(lambda: Connections(ends, elsewhere=elsewhere))


def ends_of(found: Collection[LibrarySockets]) -> LibraryEnds:
    """Return the ends of all connections of a library. If they cannot be listed, this raises OSError."""
    inodes = frozenset(inode for sockets in found for inode in sockets.listed())
    accepted_at = frozenset(port for sockets in found for port in sockets.ports)
    return LibraryEnds(inodes, accepted_at | listening_ports(inodes))


def accepted_ends(ends: LibraryEnds) -> LibraryEnds:
    """Return the ends of connections that peers opened. If no port is known that they came to, this raises OSError."""
    if not ends.ports:
        raise OSError(errno.ENOTSUP, "the port of the library is not known")
    return LibraryEnds(frozenset(), ends.ports)


def choose_elsewhere(found: Collection[LibrarySockets], *, domain: bytes, spared: Collection[bytes]) -> Elsewhere:
    """Return which connections are with a process of another kernel or network namespace.

    The addresses of its `domain_of_host` are used only if one of them has been seen here: otherwise another address
    stands for them, such as that of a NAT.
    """
    seen, hosts = {host for sockets in found for host in sockets.hosts}, hosts_of(domain)
    return Elsewhere(hosts if hosts & seen else frozenset(), spared)


class SocketDrainCheck:
    """Checks connections on behalf of all callers of `wait`.

    Each call to `wait` makes the check start over with all current connections. Its result also answers earlier calls:
    once the current connections are dry, so are those that existed earlier.

    Args:
        name: The transport, in logs.
        list_connections: Lists the connections to check. A BackendError that it raises is a reason to try again.
    """

    def __init__(self, name: str, list_connections: Callable[[], Awaitable[Connections]]) -> None:
        self._list = list_connections
        self._log = get_logger(backend=name)
        self._looking = anyio.Lock()
        self._num_asked = 0
        self._num_answered = 0

    async def wait(self) -> None:
        """Wait until every connection that exists now has been dry once, or is closed. This may never happen.

        Raises:
            OSError: The kernel does not show the connections. A shortage of descriptors is waited out.
        """
        self._num_asked += 1
        mine = self._num_asked
        async with self._looking:
            while self._num_answered < mine:
                self._num_answered = await self._wait_until_dry()

    async def _wait_until_dry(self) -> int:
        """Wait until the connections are dry, and return how many callers had asked when they were last listed."""
        connections, asked, pause_s = None, 0, LOOK_S
        patience = anyio.current_time() + AWAITED_S
        while True:
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_LOOK_S)
            with suppress(BackendError, Shortage):  # this time
                if connections is None or asked != self._num_asked:
                    now_asked = self._num_asked
                    connections = await self._list()
                    asked, pause_s = now_asked, LOOK_S
                if await _look(connections.are_dry):
                    return asked
                if anyio.current_time() >= patience:
                    patience = math.inf
                    self._log.warning("last_bytes_awaited", connections=connections.describe_wet(MAX_DESCRIBED))


async def _look(look: Callable[[], Result]) -> Result:
    """Call a function that reads the kernel's tables in a thread; raise a Shortage without thread or descriptor."""
    try:
        return await run_in_thread(look)
    except OSError as error:
        check_shortage(error.errno)
        raise
