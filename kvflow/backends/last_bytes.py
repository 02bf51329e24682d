"""Base class for transports whose bytes in flight to and from host memory the kernel shows, in TCP connections."""

import abc
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from typing_extensions import override

from kvflow.backends.library_sockets import LibrarySockets
from kvflow.backends.owner import AnyPeer, NativeAgent, OwnerBackend, PollIntervals
from kvflow.backends.socket_drain import SocketDrainCheck
from kvflow.backends.sockets import Elsewhere, domain_of_host, is_same_kernel
from kvflow.errors import BackendError
from kvflow.observe.logs import get_logger

__all__ = ["LastBytesBackend", "TcpAgent"]


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
        intervals: As in `OwnerBackend`.
        close_timeout_s: As in `OwnerBackend`.
        of_domain: On this kernel, check only connections with its own processes; see `Connections`.
    """

    def __init__(self, intervals: PollIntervals, close_timeout_s: float, *, of_domain: bool) -> None:
        super().__init__(intervals, close_timeout_s)
        self._of_domain = of_domain
        self._socket_drain = SocketDrainCheck(of_domain=of_domain)

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

                async def find() -> Elsewhere:
                    return Elsewhere.from_sockets(await self._call(_found_by), domain, ends)

                drain = SocketDrainCheck(find=find)
            await drain.wait()
            await self._call(lambda agent: agent.poll())
        except (OSError, BackendError) as error:
            get_logger(backend=self.name).warning("last_bytes_unknown", detail=str(error))
            return False
        return True


def _found_by(agent: TcpAgent) -> tuple[frozenset[int], frozenset[int], frozenset[bytes]]:
    """Return the inodes of the library's sockets, its listening ports, and all remote hosts so far.

    Raises:
        OSError: They cannot be listed, for example because there is no free descriptor.
    """
    found = agent.look_at_sockets()
    return (
        frozenset(inode for sockets in found for inode in sockets.listed()),
        frozenset(port for sockets in found for port in sockets.ports),
        frozenset(host for sockets in found for host in sockets.hosts),
    )
