"""The Mooncake engines of one endpoint, and its connections to peers. Every method runs on the owner thread."""

import time
from collections.abc import Callable
from typing import Final

from kvflow.backends.base import PostEnded
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.library_sockets import CHECK_S, LibrarySockets
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.mooncake.address import EndpointAddress, IncarnationCell
from kvflow.backends.mooncake.engine import WritingEngine
from kvflow.backends.mooncake.library import Protocol
from kvflow.backends.mooncake.window import PeerConnection, PostInFlight
from kvflow.backends.observed_path import count_paths
from kvflow.errors import BackendError
from kvflow.gate.rates import Budget, Budgets
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["Agent"]

MAX_REPLACED: Final = 7
"""Limit on replaced engines in use. An engine stays until the last peer that was connected through it has left."""

MAX_DEPARTED: Final = 32
"""Peers that have departed from an engine before it is replaced; until then, each costs up to four descriptors."""

REPLACEMENTS: Final = Budget(8, 1 / 15)
"""Engines replaced because of a principal: destroying one holds the GIL for a second."""

CLOSE_POLL_S: Final = 1e-3


class Agent:
    """One endpoint's engines: one that peers write to, and those that new peers are connected through, the senders.

    The first sender is the engine that peers write to. Peers of different principals have different senders, because a
    peer can block the engine through which it is connected; with more principals than senders, some share one. A sender
    is replaced when it is worn out: when it has a stale address of a peer, or when many of its peers have left.

    Attributes:
        address: The address of this endpoint, for its peers.

    Args:
        window: Maximum number of descriptors in flight to one peer.
        timeout_s: A descriptor that fails sooner than this was not timed out.
        max_senders: Limit on engines that new peers are connected through.

    Raises:
        BackendUnavailable: No engine could be started.
    """

    def __init__(  # noqa: PLR0913 - most by name
        self,
        name: str,
        start_engine: Callable[[IncarnationCell], WritingEngine],
        delivery: EventDelivery,
        *,
        protocol: Protocol,
        window: int,
        timeout_s: float,
        max_senders: int = 1,
    ) -> None:
        self._start = start_engine
        self._max_senders = max_senders
        self._window = window
        self._emit = delivery.deliver_soon
        self._log = get_logger(agent=name)
        self._other_paths = "shared memory within the host" if protocol == "tcp" else "RDMA"
        self._timeout_s = timeout_s
        self._ranges: tuple[MemoryRange, ...] = ()
        self._connections: dict[str, PeerConnection] = {}
        self._former: list[PeerConnection] = []
        self._departed: list[PeerConnection] = []
        self._budgets = Budgets()
        self._cell = cell = IncarnationCell()
        self._engines: list[WritingEngine] = []
        self._silence_at = 0.0
        self._is_settled = self._is_watching = False
        self._senders: dict[str, WritingEngine] = {}  # by principal
        self._target = self._start_engine()
        self.address = EndpointAddress(name, protocol, self._target.session, cell.incarnation, cell.address)

    def register(self, memory: RegisteredMemory) -> bytes:
        """Register memory with every engine, and return the address of this endpoint."""
        for engine in self._engines:
            engine.register(memory.ranges)
        self._ranges += memory.ranges
        return self.address.pack()

    def engine_in_use(self, peer: str) -> WritingEngine | None:
        """Return the engine of a peer's connection if posts are in flight on it, else None."""
        connection = self._connections.get(peer)
        return connection.engine if connection is not None and connection.is_active else None

    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        """Return the local ends of the sound connections to a peer, see `Backend.ends_to`.

        Before a write lingers, its engine aborts the connections that it has opened, and the library never writes over
        those that it has accepted, so all established ones are sound.
        """
        connection = self._connections.get(peer)
        if connection is None:
            return ()
        engines = self._engines.copy()  # another thread calls this
        return tuple(end for engine in engines for end in engine.sockets.ends_at(connection.host))

    def look_at_sockets(self) -> list[LibrarySockets]:
        """Note the latest connections, and return those of all engines."""
        self._silence_at = 0.0
        self._close_silent()
        return [engine.sockets for engine in self._engines]

    def _close_silent(self) -> None:
        now = time.monotonic()
        self._is_settled = now >= self._silence_at
        if not self._is_settled:  # what has happened since is checked later
            return
        self._silence_at = now + CHECK_S
        for engine in self._engines:
            for address, silent_s in engine.sockets.close_silent():
                engine.closed_at = time.monotonic()
                self._log.warning("data_connection_silent", address=address, silent_s=silent_s)
            self._is_settled &= not engine.sockets.is_sending
        for peer, connection in self._connections.items():
            sockets = connection.engine.sockets
            if connection.path.can_be_told and sockets.carried is not None:
                carried = sockets.carried_to(connection.host)
                connection.path.tell(self._log, peer, carried, self._other_paths, may_be_more=sockets.is_sending)

    @property
    def observed_paths(self) -> dict[str, int]:
        """How many peers are written to over each path. May be read from any thread."""
        return count_paths([connection.path for connection in list(self._connections.values())])

    def borrow_sender(self, principal: str, worn_out: WritingEngine | None = None) -> WritingEngine:
        """Return the engine to connect a peer of a principal through, not a worn-out one; call `give_back` afterwards.

        If too many engines are in use, this raises BackendError.
        """
        engine = self._senders.get(principal) or self._choose_sender()
        if engine is worn_out or engine.num_departed >= MAX_DEPARTED:
            num_replaced = sum(one.is_worn_out and one.is_used for one in self._engines)
            if num_replaced < MAX_REPLACED and self._budgets.spend(REPLACEMENTS, principal, time.monotonic()):
                engine = self._replace(engine)
            elif engine is worn_out:
                raise BackendError(
                    "too many Mooncake engines are still in use by peers, or were replaced recently",
                    in_use=num_replaced,
                    maximum=MAX_REPLACED,
                )
        self._senders[principal] = engine
        engine.num_users += 1
        return engine

    def give_back(self, engine: WritingEngine) -> None:
        """Release one use of an engine, by a peer or by `borrow_sender`, and close engines that are no longer used."""
        engine.num_users -= 1
        self.close_unused()

    def close_unused(self) -> None:
        """Close worn-out engines that nothing uses any more. Others stay, as closing one takes a second."""
        for engine in self._engines.copy():
            if engine.is_worn_out and not engine.is_used and engine is not self._target:
                self._engines.remove(engine)
                engine.close()

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
            self._connections[peer].post(PostInFlight(post_id, descriptors))
        else:
            self._emit([PostEnded(post_id, "peer was disconnected")])

    def watch(self, active: bool) -> None:
        """Set whether peers are expected to write; if so, connections are checked."""
        self._is_watching = active

    def may_sleep(self) -> bool:
        """Return whether no connection has to be checked: nothing is expected, and what was sent is acknowledged."""
        return self._is_settled and not self._is_watching

    def is_busy(self) -> bool:
        """Return whether posts are queued or in flight."""
        return any(connection.is_active for connection in self._all_connections())

    def poll(self) -> bool:
        """Handle ended transfers, and start those that fit into the windows. Always returns True."""
        self._close_silent()
        for connection in self._all_connections():
            if connection.is_active:
                connection.poll()
        self._remove_leaving()
        return True

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the engines: nothing else is certain to stop a post.

        An engine is destroyed only when no contact uses it, so posts through it are waited for until then.
        """
        give_up = time.monotonic() + timeout_s
        try:
            while (self.is_busy() and time.monotonic() < give_up) or self._is_held():
                self.poll()
                time.sleep(CLOSE_POLL_S)
        finally:
            stopped = [post for connection in self._with_departed() for post in connection.unended]
            self._connections.clear()
            self._former.clear()
            self._departed.clear()
            for engine in self._engines:
                engine.close()
            self._emit([_stopped(post) for post in stopped])

    def _choose_sender(self) -> WritingEngine:
        """Return an engine for another principal: a new one, or else the one with the fewest users.

        A principal whose engine has no users loses it.
        """
        if not self._senders and not self._target.is_worn_out:
            return self._target
        senders = dict.fromkeys(self._senders.values())
        if len(senders) < self._max_senders:
            return self._start_engine()
        chosen = min(senders, key=lambda engine: (engine.is_opening, engine.num_users))
        if not chosen.num_users:
            self._senders = {name: one for name, one in self._senders.items() if one is not chosen}
        return chosen

    def _replace(self, worn_out: WritingEngine) -> WritingEngine:
        """Start an engine in place of a sender."""
        fresh = self._start_engine()
        worn_out.is_worn_out = True
        self._senders = {name: fresh if one is worn_out else one for name, one in self._senders.items()}
        self._log.info("mooncake_engine_replaced", engines=len(self._engines))
        self.close_unused()
        return fresh

    def _start_engine(self) -> WritingEngine:
        engine = self._start(self._cell)
        try:
            engine.register(self._ranges)
        except BaseException:
            engine.close()
            raise
        self._engines.append(engine)
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

    def _is_held(self) -> bool:
        """Return whether posts run on an engine that cannot be destroyed yet."""
        return any(connection.is_writing and connection.engine.num_contacts for connection in self._with_departed())

    def _with_departed(self) -> list[PeerConnection]:
        return [*self._all_connections(), *self._departed]

    def _all_connections(self) -> list[PeerConnection]:
        return [*self._connections.values(), *self._former]


def _stopped(post: PostInFlight) -> PostEnded:
    """End a post whose engine was destroyed; its data may still be in the peer's socket buffers."""
    lingers = post.lingers or post.num_running > 0
    return PostEnded(post.post_id, post.error or "stopped by closing the endpoint", lingers)
