"""A NIXL agent as used on its owner thread: its endpoints, and what is posted over them.

What ends a post is in `writes`. The measurements behind this module, and the conclusions:

* A failed endpoint stays failed, even if the peer is alive. Removing the agent and adding it again makes a new one.
* Removing a live peer leaves its connections open on both sides, one file descriptor per lane, until either process
  ends; removing on both sides changes nothing. Therefore some sound endpoints are kept when a rank disconnects a peer
  (which may only have been silent), and reused if the same incarnation comes back. The library closes endpoints to
  ended processes. The connections of removed peers are shut down (`outgoing`).
* After a partition, TCP retransmits unacknowledged data only after a pause that doubles each time: up to as long after
  the heal as the partition lasted. A peer that reconnects while posts to it are in flight therefore gets a fresh
  endpoint. A library agent has one endpoint per peer, and removing it would lose track of its posts, so several agents
  are created if necessary; peers write to the first one.

Source: nixl 1.5.1 (UCX 1.23) on Linux, host memory, one host.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvflow.backends.base import BackendEvent, NoticeArrived, PostEnded
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.library_sockets import CHECK_S, Address, LibrarySockets
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.nixl.library import error_text, load
from kvflow.backends.nixl.native import NativeAgents
from kvflow.backends.nixl.notices import pack_notices, unpack_notices
from kvflow.backends.nixl.outgoing import ANSWER_S, InUse, OutgoingSockets, StaleConnections
from kvflow.backends.nixl.paths import paths_besides_tcp
from kvflow.backends.nixl.posts import NativeEndpoint, PostQueue, PreparedLists, Write, joined
from kvflow.backends.nixl.writes import NativeWrites
from kvflow.errors import BackendError, RemoteProtocolError
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.layout import MemoryKind
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["NixlAgent"]

CLOSE_POLL_S: Final = 1e-3

CLOSING_ROUNDS: Final = 20
"""Rounds of progress between removing the last peer and destroying the agent; measured: zero is too few."""

MAX_KEPT: Final = 32
"""Maximum number of sound endpoints kept for disconnected peers; beyond it, the oldest is removed."""

NAME_AT: Final = b"nixlSerDes|Agent"
"""Start of a metadata blob; the length and then the name of its agent follow."""

MAX_WAITING: Final = 1_000_000
"""Maximum number of undelivered events; beyond it, notices are dropped, as with a full receive queue."""


class NixlAgent:
    """An endpoint made of one or more NIXL agents. Every method runs on the owner thread, or in `OwnerThread.run_now`.

    Args:
        name: Name of the first NIXL agent; further agents append a number to it.
        plugin: NIXL plugin to use.
        plugin_options: Its parameters.
        environment: As in `library.load`.
        delivery: Receives the events.

    Raises:
        BackendUnavailable: The library is missing, or its plugin does not start.
    """

    def __init__(
        self,
        name: str,
        plugin: str,
        plugin_options: dict[str, str],
        environment: Mapping[str, str] | None,
        delivery: EventDelivery,
    ) -> None:
        api = load(environment)
        self._log = get_logger(agent=name)
        self._delivery = delivery
        self._gathered: list[BackendEvent] = []
        self._emit = self._gathered.extend
        self._not_found = api.nixlBind.nixlNotFoundError
        # With plugin threads, posts run in an unknown order, so no post is a fence for another.
        has_fences = plugin == "UCX" and int(plugin_options.get("num_threads", "0")) == 0
        disconnected = api.nixlBind.nixlRemoteDisconnectError
        self._writes = NativeWrites(self._emit, self._clean_up, disconnected, has_fences=has_fences)
        self._other_paths = " or ".join(paths_besides_tcp(plugin))
        self._name = name
        self._blobs: set[bytes] = set()
        self._connections: dict[str, NativeEndpoint] = {}
        self._former: list[NativeEndpoint] = []
        self._disconnecting: dict[str, None] = {}
        self._kept: dict[str, None] = {}
        self._is_watching = False
        self._left_open = StaleConnections()
        self._silence_at = 0.0
        self._agents = NativeAgents(api, name, plugin, plugin_options)

    @property
    def epolls(self) -> tuple[int, ...]:
        """Epoll descriptors of the agent that peers write to, as returned by `find_epolls`."""
        return self._agents.epolls

    @property
    def unclosed(self) -> frozenset[str]:
        """Removed peers that still have open connections. Can be read from any thread."""
        return self._left_open.peers

    def register(self, memory: RegisteredMemory) -> bytes:
        """Register memory, and return the metadata of the agent.

        Raises:
            RegistrationError: NIXL rejected the memory.
        """
        blob = self._agents.register(memory)
        self._blobs.add(blob)
        return blob

    def connect(self, peer: str, blob: bytes) -> None:
        """Open an endpoint to a peer, unless it has a sound one without posts in flight.

        Raises:
            BackendError: NIXL rejected the blob, the blob belongs to another peer or to an agent of this process, or
                too many former endpoints to the peer still have unended posts.
        """
        self._check_self(peer, blob)
        self._hand_on()
        self._disconnecting.pop(peer, None)
        self._kept.pop(peer, None)
        connection = self._connections.get(peer)
        if connection is not None:
            is_sound = not connection.has_failed and connection.blob == blob
            if is_sound and not self._writes.is_used(connection):
                return
            if not self._clean_up(self.poll):  # posts over a failed endpoint raise during this poll
                raise BackendError("writes over the previous endpoint of this peer have not ended", peer=peer)
        agent = self._agent_for(peer)
        if connection is not None and self._connections.get(peer) is connection:
            self._former.append(connection)
            self._remove_former()
        self._add(agent, peer, blob)

    def disconnect(self, peer: str) -> None:
        """Disconnect a peer once its last post has ended. If removed earlier, the post would continue unobserved."""
        self._hand_on()
        self._disconnecting[peer] = None
        self._finish_disconnecting()

    def post_next(self, outbox: PostQueue) -> None:
        """Start the next writes of an outbox, if any are waiting; their outcome is reported as events."""
        writes = outbox.take_writes()
        if not writes:  # they were joined with an earlier write
            return
        prepared = self._prepare(outbox, writes)
        self._hand_on()  # the next call may take long
        if prepared is not None:
            self._writes.start(writes, *prepared)

    def post_now(self, outbox: PostQueue) -> None:
        """Start the next writes of an outbox on the event loop, then poll and deliver the resulting events."""
        self.post_next(outbox)
        self.poll()

    def is_used_to(self, peer: str) -> bool:
        """Return whether a post to this peer has succeeded before; the first one may have to wait for the connection.

        Can be called from any thread.
        """
        connection = self._connections.get(peer)
        return connection is not None and connection.is_used

    def _prepare(self, outbox: PostQueue, writes: Sequence[Write]) -> tuple[NativeEndpoint, Any] | None:
        connection = self._connections.get(outbox.peer)
        if connection is None or connection.has_failed:
            error = "the connection to the peer has failed; it must be connected anew"
            self._emit([PostEnded(write.post_id, error) for write in writes])
            return None
        try:
            payload = pack_notices(write.notice for write in writes)
            return connection, self._make_handle(connection, writes[0].kinds, joined(writes), payload)
        except Exception as error:  # noqa: BLE001 - nothing was posted; reported to the caller as an event
            connection.has_erred = True
            self._emit([PostEnded(write.post_id, error_text(error)) for write in writes])
            return None

    def _make_handle(
        self,
        connection: NativeEndpoint,
        kinds: tuple[MemoryKind, MemoryKind],
        moves: Descriptors | Blocks,
        payload: bytes,
    ) -> Any:
        if isinstance(moves, Blocks):
            src, dst = connection.lists.prepare(connection.agent, moves.lists, kinds, self._clean_up)
            return connection.agent.make_prepped_xfer("WRITE", src, moves.src, dst, moves.dst, payload)
        make = connection.agent.get_xfer_descs
        src, dst = make(moves.src, kinds[0]), make(moves.dst, kinds[1])
        return connection.agent.initialize_xfer("WRITE", src, dst, connection.peer, payload)

    def watch(self, active: bool) -> None:
        """Set whether notices are expected; if so, the owner thread polls often."""
        self._is_watching = active

    def may_sleep(self) -> bool:
        """Return False: notices come unannounced."""
        return False

    def is_busy(self) -> bool:
        """Return whether events are expected soon."""
        return self._writes.is_moving or self._is_watching

    def poll(self) -> bool:
        """Let the library make progress and deliver the resulting events. Return whether anything happened."""
        self._hand_on()
        num_running = self._writes.num_running
        try:
            self._writes.poll()
            notices = self._agents.progress()
            self._note_writers(notices)
            if len(self._delivery) < MAX_WAITING:
                self._take_in(notices)
            self._writes.end_failed()
        finally:
            self._hand_on()  # before raising, and before removing peers, which may take long
        self._finish_disconnecting()
        self._remove_former()
        self._look_at_left_open()
        self._close_silent()
        return bool(notices) or self._writes.num_running != num_running

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the agents: nothing else is certain to stop a post."""
        give_up = time.monotonic() + timeout_s
        while self._writes.num_running and time.monotonic() < give_up and self._clean_up(self.poll):
            time.sleep(CLOSE_POLL_S)
        stopped = self._writes.stop()
        self._remove_everybody()
        self._agents.close(self._clean_up)  # drops the last references: no post holds one any more
        # Bytes in flight may land for about another 100 ms, with no sign of when the last one has landed.
        self._emit(stopped)
        self._hand_on()

    def _note_writers(self, received: Sequence[tuple[str, bytes]]) -> None:
        """Mark peers that write here. Names of unknown peers are ignored, because notices are not authenticated."""
        for name, _ in received:
            connection = self._connections.get(name)
            if connection is not None:
                connection.is_written = True

    def _take_in(self, received: Sequence[tuple[str, bytes]]) -> None:
        for _, payload in received:
            try:
                notices = unpack_notices(payload)
            except RemoteProtocolError:
                notices = [payload]  # may come from anyone; the notice reader rejects and counts it
            self._emit([NoticeArrived(notice) for notice in notices])

    def _hand_on(self) -> None:
        """Deliver the gathered events.

        Call this before every call that may take long, but not earlier: it wakes the event loop, which competes for the
        GIL.
        """
        if self._gathered:
            self._delivery.deliver_soon(self._gathered)
            self._gathered.clear()

    def _remove_everybody(self) -> None:
        """Remove every peer, and give the library time to finish.

        UCX aborts the process if an agent is destroyed while data is queued for a peer that has closed.
        """
        while self._connections:
            self._former.append(self._connections.popitem()[1])
        while self._former:
            self._remove(self._former.pop())
        for _ in range(CLOSING_ROUNDS):
            for agent in self._agents:
                self._clean_up(agent.get_new_notifs)
            time.sleep(CLOSE_POLL_S)

    def _agent_for(self, peer: str) -> Any:
        """Return a NIXL agent that has no posts in flight to a peer.

        Raises:
            BackendError: There are too many agents, or a new one could not be started.
        """
        num_agents = len(self._agents)
        agent = self._agents.other_than(
            [it.agent for it in self._endpoints() if it.peer == peer and self._writes.is_used(it)]
        )
        if len(self._agents) > num_agents:
            self._log.info("nixl_agent_added", peer=peer, agents=len(self._agents))
        return agent

    def _endpoints(self) -> list[NativeEndpoint]:
        return [*self._connections.values(), *self._former]

    def _check_self(self, peer: str, blob: bytes) -> None:
        """Reject a peer with the name or metadata of an own agent, unless it is the agent that peers write to.

        Raises:
            BackendError: The peer has the name of an own agent (or one that a future agent could get) or the metadata
                of one, and is not the agent that peers write to, with both its name and its metadata.
        """
        is_first = peer == self._name and blob in self._blobs
        if not is_first and (peer == self._name or peer.startswith(f"{self._name}#") or blob in self._blobs):
            raise BackendError("peer has the name or the metadata of an own agent", peer=peer)

    def _add(self, agent: Any, peer: str, blob: bytes) -> None:
        if peer == agent.name:  # the agent itself, which need not be added
            self._connections[peer] = NativeEndpoint(peer, agent, blob, PreparedLists(peer))
            return
        _check_name(peer, blob)
        sockets = self._agents.outgoing(agent)
        if self._left_open.shut_down_of(peer, sockets):
            self._clean_up(agent.get_new_notifs)  # lets UCX close it
        before = sockets.now()
        try:
            name = _decoded(agent.add_remote_agent(blob))
        except Exception as error:
            self._undo_adding(agent, peer, before)
            raise BackendError("NIXL refused the peer's metadata", peer=peer, detail=error_text(error)) from error
        if name != peer:
            self._undo_adding(agent, name, before)
            raise BackendError("peer's metadata belongs to another agent", peer=peer, agent=name)
        opened = _without(sockets.now(), before)
        self._connections[peer] = NativeEndpoint(peer, agent, blob, PreparedLists(peer), opened, time.monotonic())

    def _undo_adding(self, agent: Any, name: str, before: Mapping[int, Address]) -> None:
        """Remove an agent that NIXL has added wrongly or in part, and shut down the connections opened for it.

        Args:
            agent: The NIXL agent.
            name: The name under which NIXL may have added the other agent.
            before: Connections that existed before the call.
        """
        if not any(it.peer == name and it.agent is agent for it in self._endpoints()):
            self._clean_up(agent.remove_remote_agent, name)
        sockets = self._agents.outgoing(agent)
        opened = _without(sockets.now(), before)
        shut_from = time.monotonic() + ANSWER_S
        self._left_open.add(name, sockets, opened, shut_from=shut_from, is_written=False)

    def _finish_disconnecting(self) -> None:
        """Keep or remove the endpoints of disconnected peers that have no posts in flight."""
        for peer in list(self._disconnecting):
            connection = self._connections.get(peer)
            if connection is None or self._try_to_keep(connection) or self._try_to_remove(connection):
                del self._disconnecting[peer]

    def _try_to_keep(self, connection: NativeEndpoint) -> bool:
        """Keep a sound, unused endpoint in case its peer comes back. Return whether it was kept."""
        if connection.has_erred or self._writes.is_used(connection):
            return False
        self._kept[connection.peer] = None
        if len(self._kept) > MAX_KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._try_to_remove(self._connections[oldest])
        return True

    def _try_to_remove(self, connection: NativeEndpoint) -> bool:
        """Remove an endpoint, unless posts may be in flight over it. Return whether it was removed."""
        if self._writes.is_used(connection):
            return False
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
        self._remove(connection)
        return True

    def _remove(self, connection: NativeEndpoint) -> None:
        connection.lists.drop(connection.agent, self._clean_up)
        if connection.peer == connection.agent.name:
            return
        self._clean_up(connection.agent.remove_remote_agent, connection.peer)
        shut_from = 0.0 if connection.is_used else connection.opened_at + ANSWER_S
        sockets = self._agents.outgoing(connection.agent)
        is_written = connection.is_written
        self._left_open.add(connection.peer, sockets, connection.opened, shut_from=shut_from, is_written=is_written)

    def look_at_sockets(self) -> list[LibrarySockets]:
        """Accept what has arrived, note the latest connections, and return those of all agents."""
        self._silence_at = 0.0
        self.poll()
        return [self._agents.outgoing(agent) for agent in self._agents]

    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        """Return the local ends of the sound connections to a peer, see `Backend.ends_to`."""
        connection = self._connections.get(peer)
        if connection is None or connection.has_failed:
            return ()
        return self._agents.outgoing(connection.agent).local_ends(connection.opened)

    def _close_silent(self) -> None:
        now = time.monotonic()
        if now < self._silence_at:
            return
        self._silence_at = now + CHECK_S
        for agent in self._agents:
            for address, silent_s in self._agents.outgoing(agent).close_silent():
                self._log.warning("data_connection_silent", address=address, silent_s=silent_s)
        for connection in self._connections.values():
            sockets = self._agents.outgoing(connection.agent)
            if connection.path.can_be_told and sockets.carried is not None:
                carried = [one for one in sockets.carried if one[:2] in connection.opened.values()]
                may_be_more = sockets.is_sending or connection.is_written  # over connections that the peer has opened
                connection.path.tell(self._log, connection.peer, carried, self._other_paths, may_be_more=may_be_more)

    def _look_at_left_open(self) -> None:
        now = time.monotonic()
        if self._left_open.is_due(now):
            self._left_open.shut_connections(now, self._sockets_in_use())

    def _sockets_in_use(self) -> dict[OutgoingSockets, InUse]:
        used: dict[OutgoingSockets, InUse] = {}
        for connection in self._endpoints():
            mine = used.setdefault(self._agents.outgoing(connection.agent), InUse())
            mine.inodes.update(connection.opened)
            if connection.peer not in self._kept or connection.is_written:
                mine.addresses.update(connection.opened.values())
        return used

    def _remove_former(self) -> None:
        """Remove former endpoints of reconnected peers, once they have no posts in flight."""
        if self._former:
            self._former = [connection for connection in self._former if not self._try_to_remove(connection)]

    def _clean_up(self, call: Callable[..., object], *args: object) -> bool:
        """Make a clean-up call, and return whether it succeeded. Errors are logged, not raised."""
        try:
            call(*args)
        except self._not_found:
            return True
        except Exception as error:  # noqa: BLE001 - the library keeps what it could not release
            self._log.warning("nixl_clean_up_failed", call=call.__name__, detail=error_text(error))
            return False
        return True


def _decoded(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _check_name(peer: str, blob: bytes) -> None:
    """Reject a blob that carries the name of another agent, before the library reads it.

    A truncated blob would make its name unusable in the library, even for the agent that owns the name.

    Raises:
        BackendError: The blob names another agent.
    """
    start = len(NAME_AT) + 8
    if blob[: len(NAME_AT)] != NAME_AT:  # written by another version of the library, which checks the name itself
        return
    name = blob[start : start + int.from_bytes(blob[len(NAME_AT) : start], "little")]
    if name != peer.encode():
        raise BackendError(
            "peer's metadata belongs to another agent", peer=peer, agent=name[:64].decode(errors="replace")
        )


def _without(found: Mapping[int, Address], before: Mapping[int, Address]) -> dict[int, Address]:
    return {inode: address for inode, address in found.items() if inode not in before}
