"""The Mooncake engines of one endpoint, and its connections to peers. Every method runs on the owner thread."""

import time
from collections.abc import Callable
from typing import Final

from kvflow.backends.base import PostEnded
from kvflow.backends.delivery import Delivery
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.mooncake.address import EndpointAddress, IncarnationCell
from kvflow.backends.mooncake.engine import WritingEngine
from kvflow.backends.mooncake.library import Protocol
from kvflow.backends.mooncake.window import PeerConnection, Post
from kvflow.errors import BackendError
from kvflow.geometry.layout import MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["Agent"]

MAX_ENGINES: Final = 8
"""Limit on engines in use. An engine stays until the last peer that was connected through it has left."""

MAX_DEPARTED: Final = 32
"""Departed peers after which new peers get a fresh engine; until then, each costs four open file descriptors."""

CLOSE_POLL_S: Final = 1e-3


class Agent:
    """One endpoint's engines: one that peers write to, and one that new peers are connected through.

    They are the same at first. The second one is replaced when it is worn out: when it has a stale address of a peer,
    or when many of its peers have left.

    Attributes:
        address: The address of this endpoint, for its peers.

    Args:
        name: Agent name.
        start_engine: Starts an engine for a cell.
        delivery: Receives the events of posts.
        protocol: "tcp" or "rdma".
        window: Maximum number of descriptors in flight to one peer.
        timeout_s: A descriptor that fails sooner than this was not timed out.

    Raises:
        BackendUnavailable: No engine could be started.
    """

    def __init__(
        self,
        name: str,
        start_engine: Callable[[IncarnationCell], WritingEngine],
        delivery: Delivery,
        *,
        protocol: Protocol,
        window: int,
        timeout_s: float,
    ) -> None:
        self._start = start_engine
        self._window = window
        self._emit = delivery.put
        self._log = get_logger(agent=name)
        self._timeout_s = timeout_s
        self._ranges: tuple[MemoryRange, ...] = ()
        self._connections: dict[str, PeerConnection[WritingEngine]] = {}
        self._former: list[PeerConnection[WritingEngine]] = []
        self._departed: list[PeerConnection[WritingEngine]] = []
        self._cell = cell = IncarnationCell()
        self._sender = self._start_engine()
        self._engines = [self._sender]
        self.address = EndpointAddress(name, protocol, self._sender.session, cell.incarnation, cell.address)
        self._sender.num_users += 1  # it stays, because peers write to it

    def register(self, memory: RegisteredMemory) -> bytes:
        """Register memory with every engine, and return the address of this endpoint.

        Raises:
            RegistrationError: The library refused.
        """
        for engine in self._engines:
            engine.register(memory.ranges)
        self._ranges += memory.ranges
        return self.address.pack()

    def engine_in_use(self, peer: str) -> WritingEngine | None:
        """Return the engine of a peer's connection if posts are in flight on it, else None."""
        connection = self._connections.get(peer)
        return connection.engine if connection is not None and connection.is_active else None

    def borrow_sender(self, worn_out: WritingEngine | None = None) -> WritingEngine:
        """Return the engine to connect a peer through; call `give_back` afterwards.

        Args:
            worn_out: An engine that must not be used.

        Raises:
            BackendError: Too many engines are in use, or none could be started.
        """
        is_crowded = sum(engine.num_users > 0 for engine in self._engines) >= MAX_ENGINES
        if self._sender is worn_out or (self._sender.num_departed >= MAX_DEPARTED and not is_crowded):
            if is_crowded:
                raise BackendError("too many Mooncake engines are still in use by peers", engines=MAX_ENGINES)
            self._sender = self._start_engine()
            self._engines.append(self._sender)
            self._log.info("mooncake_engine_replaced", engines=len(self._engines))
            self._close_unused()
        self._sender.num_users += 1
        return self._sender

    def give_back(self, engine: WritingEngine) -> None:
        """Release one use of an engine, by a peer or by `borrow_sender`, and close engines that are no longer used."""
        engine.num_users -= 1
        self._close_unused()

    def connect(self, peer: str, engine: WritingEngine, session: str) -> None:
        """Create the connection to a peer that an engine has reached."""
        connection = self._connections.get(peer)
        if connection is not None and connection.engine is engine:  # the peer is back before its last post has ended
            connection.is_leaving = False
            return
        if connection is not None:  # posts in flight end by themselves; do not wait for them
            connection.is_leaving = True
            self._former.append(connection)
        engine.num_users += 1
        self._connections[peer] = PeerConnection(
            engine, session, max_running=self._window, timeout_s=self._timeout_s, emit=self._emit
        )

    def disconnect(self, peer: str) -> None:
        """Close the connection to a peer once its last post has ended."""
        if peer in self._connections:
            self._connections[peer].is_leaving = True
            self._remove_leaving()

    def post(self, post_id: int, peer: str, descriptors: Descriptors) -> None:
        """Start a write to a peer."""
        if peer in self._connections:
            self._connections[peer].post(Post(post_id, descriptors))
        else:
            self._emit([PostEnded(post_id, "peer was disconnected")])

    def is_busy(self) -> bool:
        """Return whether posts are queued or in flight."""
        return any(connection.is_active for connection in self._all_connections())

    def poll(self) -> bool:
        """Handle ended transfers, and start those that fit into the windows. Always returns True."""
        for connection in self._all_connections():
            if connection.is_active:
                connection.poll()
        self._remove_leaving()
        return True

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the engines: nothing else is certain to stop a post."""
        give_up = time.monotonic() + timeout_s
        try:
            while self.is_busy() and time.monotonic() < give_up:
                self.poll()
                time.sleep(CLOSE_POLL_S)
        finally:
            stopped = [
                post for connection in [*self._all_connections(), *self._departed] for post in connection.unended
            ]
            self._connections.clear()
            self._former.clear()
            self._departed.clear()
            for engine in self._engines:
                engine.close()
            self._emit([_stopped(post) for post in stopped])

    def _start_engine(self) -> WritingEngine:
        engine = self._start(self._cell)
        try:
            engine.register(self._ranges)
        except BaseException:
            engine.close()
            raise
        return engine

    def _remove_leaving(self) -> None:
        left = [
            connection for connection in self._all_connections() if connection.is_leaving and not connection.is_active
        ]
        if not left:
            return
        self._connections = {
            peer: connection for peer, connection in self._connections.items() if connection not in left
        }
        self._former = [connection for connection in self._former if connection not in left]
        for connection in left:
            connection.engine.num_departed += 1
            if connection.unended:
                self._departed.append(connection)
            else:
                self.give_back(connection.engine)

    def _all_connections(self) -> list[PeerConnection[WritingEngine]]:
        return [*self._connections.values(), *self._former]

    def _close_unused(self) -> None:
        for engine in [one for one in self._engines if one is not self._sender and not one.num_users]:
            self._engines.remove(engine)
            engine.close()


def _stopped(post: Post) -> PostEnded:
    """End a post whose engine was destroyed; its data may still be in the peer's socket buffers."""
    lingers = post.lingers or post.num_running > 0
    return PostEnded(post.post_id, post.error or "stopped by closing the endpoint", lingers)
