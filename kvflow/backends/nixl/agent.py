"""A NIXL agent as used on its owner thread: its endpoints, and what is posted over them.

What ends a post is in `writes`; what becomes of the connections to a peer is in `endpoints`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvflow.backends.base import BackendEvent, NoticeArrived, PostEnded
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.library_sockets import LibrarySockets
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.nixl.endpoints import CLOSE_POLL_S, NativeEndpoints
from kvflow.backends.nixl.library import load
from kvflow.backends.nixl.native import NativeAgents
from kvflow.backends.nixl.paths import paths_besides_tcp
from kvflow.backends.nixl.posts import NativeEndpoint, PostQueue, Write, joined, pack_notices, unpack_notices
from kvflow.backends.nixl.writes import NativeWrites
from kvflow.errors import RemoteProtocolError
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.memory import MemoryKind
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger
from kvflow.resources import error_text

__all__ = ["NixlAgent"]

MAX_WAITING: Final = 1_000_000
"""Maximum number of undelivered events; beyond it, notices are dropped, as with a full receive queue."""


class NixlAgent:
    """An endpoint made of one or more NIXL agents. Every method runs on the owner thread, or in `OwnerThread.run_now`.

    Args:
        name: Name of the first NIXL agent; further agents append a number to it.
        environment: As in `library.load`.

    Attributes:
        epolls: Epoll descriptors of the agent that peers write to, as returned by `find_epolls`.

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
        self._is_watching = False
        self._agents = NativeAgents(api, name, plugin, plugin_options)
        self.epolls = self._agents.epolls
        other_paths = " or ".join(paths_besides_tcp(plugin))
        self._endpoints = NativeEndpoints(name, self._agents, self._writes, self._clean_up, other_paths)

    @property
    def unclosed(self) -> frozenset[str]:
        """Removed peers that still have open connections. Can be read from any thread."""
        return self._endpoints.unclosed

    @property
    def observed_paths(self) -> dict[str, int]:
        """How many peers are written to over each path. May be read from any thread."""
        return self._endpoints.observed_paths

    def register(self, memory: RegisteredMemory) -> bytes:
        """Register memory, and return the metadata of the agent; raise RegistrationError if NIXL rejects the memory."""
        blob = self._agents.register(memory)
        self._endpoints.blobs.add(blob)
        return blob

    def connect(self, peer: str, blob: bytes) -> None:
        """Open an endpoint to a peer, unless it has a sound one without posts in flight.

        Raises:
            BackendError: NIXL rejected the blob, the blob belongs to another peer or to an agent of this process, or
                too many former endpoints to the peer still have unended posts.
        """
        self._endpoints.check_self(peer, blob)
        self._hand_on()
        self._endpoints.connect(peer, blob, self.poll)

    def disconnect(self, peer: str) -> None:
        """Disconnect a peer once its last post has ended. If removed earlier, the post would continue unobserved."""
        self._hand_on()
        self._endpoints.disconnect(peer)

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
        connection = self._endpoints.find(peer)
        return connection is not None and connection.is_used

    def _prepare(self, outbox: PostQueue, writes: Sequence[Write]) -> tuple[NativeEndpoint, Any] | None:
        connection = self._endpoints.find(outbox.peer)
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
            src, dst = connection.prepare(moves.lists, kinds, self._clean_up)
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
        self._endpoints.tidy_up()
        return bool(notices) or self._writes.num_running != num_running

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the agents: nothing else is certain to stop a post."""
        give_up = time.monotonic() + timeout_s
        while self._writes.num_running and time.monotonic() < give_up and self._clean_up(self.poll):
            time.sleep(CLOSE_POLL_S)
        stopped = self._writes.stop()
        self._endpoints.remove_all()
        self._agents.close(self._clean_up)  # drops the last references: no post holds one any more
        # Bytes in flight may land for about another 100 ms, with no sign of when the last one has landed.
        self._emit(stopped)
        self._hand_on()

    def _note_writers(self, received: Sequence[tuple[str, bytes]]) -> None:
        """Mark peers that write here. Names of unknown peers are ignored, because notices are not authenticated."""
        for name, _ in received:
            connection = self._endpoints.find(name)
            if connection is not None:
                connection.is_written = True

    def _take_in(self, received: Sequence[tuple[str, bytes]]) -> None:
        for _, payload in received:
            try:
                notices = unpack_notices(payload)
            except RemoteProtocolError:
                notices = [payload]  # may come from anyone; the notice reader rejects and counts it
            now = time.monotonic()
            self._emit([NoticeArrived(notice, now) for notice in notices])

    def _hand_on(self) -> None:
        """Deliver the gathered events.

        Call this before every call that may take long, but not earlier: it wakes the event loop, which competes for the
        GIL.
        """
        if self._gathered:
            self._delivery.deliver_soon(self._gathered)
            self._gathered.clear()

    def look_at_sockets(self) -> list[LibrarySockets]:
        """Accept what has arrived, note the latest connections, and return those of all agents."""
        self._endpoints.expect_silence()
        self.poll()
        return [self._agents.outgoing(agent) for agent in self._agents]

    def ends_to(self, peer: str) -> tuple[bytes, ...]:
        """Return the local ends of the sound connections to a peer, see `Backend.ends_to`."""
        return self._endpoints.ends_to(peer)

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
