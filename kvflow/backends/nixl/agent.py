"""A NIXL agent as its owner thread uses it: what is posted, to whom, and what proves that a post has ended.

An error proves little. What was measured, and what follows:

* An error of the endpoint (RemoteDisconnect: the peer was killed, its agent closed, its connection broke) ends every
  post to that peer, and nothing reads the source any more: after 92 kills in the middle of 256 MiB, over CMA, shared
  memory and TCP, the kernel saw no page of it read. Such a post has ended, after one more round of progress for what
  the library still has to cancel. Over TCP, bytes may be in the socket buffers of a live peer: they linger.
* Any other error leaves the endpoint as it was, and earlier parts of the post under way, so the post is in doubt. A
  later post over the same endpoint is a fence: when it is done, so is everything before it.
* A failed endpoint stays failed, even if the peer is alive. Removing the agent and adding it again makes a new one.
* Removing a live peer leaves its connections open on both sides, one file each for every lane, until either process
  ends; removing on both sides changes nothing. So some sound endpoints are kept when a rank disconnects a peer (which
  may only have been silent), and used again if the same incarnation comes back. The library closes endpoints to ended
  ones. The connections of those that are removed are shut down (`outgoing`).
* After a partition, TCP retransmits what is unacknowledged only when a pause is over that has doubled each time: up to
  as long after the heal as the partition has lasted. So a peer that is connected again while posts to it still run gets
  a fresh endpoint. An agent of the library has one endpoint to a peer, and removing that would lose sight of its posts,
  so there are several agents if need be; peers write to the first one.

Source: nixl 1.5.1 (UCX 1.23) on Linux, host memory, one host.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvflow.backends.base import BackendEvent, NoticeArrived, PostEnded
from kvflow.backends.delivery import Delivery
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.nixl.library import error_text, load
from kvflow.backends.nixl.native import NativeAgents
from kvflow.backends.nixl.notices import pack_notices, unpack_notices
from kvflow.backends.nixl.outgoing import ANSWER_S, Address, InUse, OutgoingSockets, StaleConnections
from kvflow.backends.nixl.posts import Connection, Post, PostQueue, PreparedLists, Write, joined
from kvflow.errors import BackendError, RemoteProtocolError
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.layout import MemoryKind
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["NixlAgent"]

CLOSE_POLL_S: Final = 1e-3

CLOSING_ROUNDS: Final = 20
"""Rounds of progress between removing the last peer and destroying the agent; measured: none is too few."""

MAX_KEPT: Final = 32
"""Sound endpoints kept for peers that the rank has disconnected; beyond it the oldest is removed."""

NAME_AT: Final = b"nixlSerDes|Agent"
"""How a blob begins; the name of its agent follows behind its length."""

MAX_WAITING: Final = 1_000_000
"""Events kept while the event loop does not get to them; notices beyond it are lost, as on a full receive queue."""


class NixlAgent:
    """An endpoint made of agents of NIXL. Every method runs on the owner thread, or in `OwnerThread.run_now`.

    Args:
        name: Of the first agent of NIXL; the others have numbers behind it.
        plugin: NIXL plugin to use.
        plugin_options: Its parameters.
        environment: As in `library.load`.
        delivery: Takes the events.

    Raises:
        BackendUnavailable: The library is missing, or its plugin does not start.
    """

    def __init__(
        self,
        name: str,
        plugin: str,
        plugin_options: dict[str, str],
        environment: Mapping[str, str] | None,
        delivery: Delivery,
    ) -> None:
        api = load(environment)
        self._log = get_logger(agent=name)
        self._delivery = delivery
        self._gathered: list[BackendEvent] = []
        self._emit = self._gathered.extend
        self._not_found = api.nixlBind.nixlNotFoundError
        self._disconnected = api.nixlBind.nixlRemoteDisconnectError
        # Threads of the plugin's own post in an order that nobody knows, so that no post is a fence for another.
        self._has_fences = plugin == "UCX" and int(plugin_options.get("num_threads", "0")) == 0
        self._running: dict[int, Post] = {}
        self._in_doubt: dict[int, Post] = {}
        self._failed: dict[int, Post] = {}
        self._name = name
        self._blobs: set[bytes] = set()
        self._connections: dict[str, Connection] = {}
        self._former: list[Connection] = []
        self._disconnecting: dict[str, None] = {}
        self._kept: dict[str, None] = {}
        self._num_posts = 0
        self._is_watching = False
        self._left_open = StaleConnections()
        self._agents = NativeAgents(api, name, plugin, plugin_options)

    @property
    def epolls(self) -> tuple[int, ...]:
        """As in `find_epolls`, of the agent that peers write to."""
        return self._agents.epolls

    @property
    def unclosed(self) -> frozenset[str]:
        """Peers that were removed and to which connections are open. Any thread may ask."""
        return self._left_open.peers

    def register(self, memory: RegisteredMemory) -> bytes:
        """Register memory, and give the metadata of the agent.

        Raises:
            RegistrationError: NIXL does not take it.
        """
        blob = self._agents.register(memory)
        self._blobs.add(blob)
        return blob

    def connect(self, peer: str, blob: bytes) -> None:
        """Open an endpoint to a peer, unless there is one that is sound and over which nothing is under way.

        Raises:
            BackendError: NIXL does not take the blob, or it is another peer's or of an own agent; or there are too many
                former endpoints to the peer whose posts have not ended.
        """
        self._check_self(peer, blob)
        self._hand_on()
        self._disconnecting.pop(peer, None)
        self._kept.pop(peer, None)
        connection = self._connections.get(peer)
        if connection is not None:
            is_sound = not connection.has_failed and connection.blob == blob
            if is_sound and not self._is_in_use(connection):
                return
            if not self._clean_up(self.poll):  # what ran over a failed one raises now
                raise BackendError("writes over the previous endpoint of this peer have not ended", peer=peer)
        agent = self._agent_for(peer)
        if connection is not None and self._connections.get(peer) is connection:
            self._former.append(connection)
            self._remove_former()
        self._add(agent, peer, blob)

    def disconnect(self, peer: str) -> None:
        """Disconnect a peer when its last post has ended: earlier, the post would go on where nothing can see it."""
        self._hand_on()
        self._disconnecting[peer] = None
        self._finish_disconnecting()

    def post_next(self, outbox: PostQueue) -> None:
        """Begin the next writes of an outbox, if any wait; events report what becomes of them."""
        writes = outbox.take()
        if not writes:  # they were joined with an earlier one
            return
        post = self._prepare(outbox, writes)
        self._hand_on()  # the next call may take long
        if post is not None:
            self._follow(post, post.connection.agent.transfer)

    def post_now(self, outbox: PostQueue) -> None:
        """Begin the next writes of an outbox on the event loop, and deliver what has become of them by then."""
        self.post_next(outbox)
        self.poll()

    def is_used_to(self, peer: str) -> bool:
        """Return whether a post to a peer has ended well before: the first one may have to wait for the connection.

        Any thread may ask.
        """
        connection = self._connections.get(peer)
        return connection is not None and connection.is_used

    def _prepare(self, outbox: PostQueue, writes: Sequence[Write]) -> Post | None:
        connection = self._connections.get(outbox.peer)
        if connection is None or connection.has_failed:
            error = "the connection to the peer has failed; it must be connected anew"
            self._emit([PostEnded(write.post_id, error) for write in writes])
            return None
        try:
            payload = pack_notices(write.notice for write in writes)
            handle = self._make_handle(connection, writes[0].kinds, joined(writes), payload)
        except Exception as error:  # noqa: BLE001 - nothing was posted; the caller learns it as an event
            connection.has_erred = True
            self._emit([PostEnded(write.post_id, error_text(error)) for write in writes])
            return None
        post = Post(tuple(write.post_id for write in writes), connection, handle, self._num_posts)
        self._num_posts += 1
        return post

    def _make_handle(
        self,
        connection: Connection,
        kinds: tuple[MemoryKind, MemoryKind],
        moves: Descriptors | Blocks,
        payload: bytes,
    ) -> Any:
        if isinstance(moves, Blocks):
            src, dst = connection.lists.of(connection.agent, moves.lists, kinds, self._clean_up)
            return connection.agent.make_prepped_xfer("WRITE", src, moves.src, dst, moves.dst, payload)
        make = connection.agent.get_xfer_descs
        src, dst = make(moves.src, kinds[0]), make(moves.dst, kinds[1])
        return connection.agent.initialize_xfer("WRITE", src, dst, connection.peer, payload)

    def watch(self, active: bool) -> None:
        """Poll often because notices are expected, or not."""
        self._is_watching = active

    def is_busy(self) -> bool:
        """Return whether something is expected soon."""
        return bool(self._running or self._failed) or self._is_watching

    def poll(self) -> bool:
        """Let the library make progress, and deliver what has happened; say whether anything has."""
        self._hand_on()
        num_running = len(self._running)
        try:
            self._poll_posts()
            notices = self._agents.progress()
            self._note_writers(notices)
            if len(self._delivery) < MAX_WAITING:
                self._take_in(notices)
            self._end_failed()
        finally:
            self._hand_on()  # before a breakdown is reported, and before peers are removed, which may take long
        self._finish_disconnecting()
        self._remove_former()
        self._look_at_left_open()
        return bool(notices) or len(self._running) != num_running

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the agent: the only thing that stops a post for certain."""
        give_up = time.monotonic() + timeout_s
        while self._running and time.monotonic() < give_up and self._clean_up(self.poll):
            time.sleep(CLOSE_POLL_S)
        error = "stopped by closing the endpoint"
        stopped = [end for post in self._unended() for end in post.ended(error, lingers=True)]
        for posts in (self._running, self._in_doubt, self._failed):
            posts.clear()
        self._remove_everybody()
        self._agents.close(self._clean_up)  # the last references, since no post is kept: handles hold their agent, too
        # Bytes on their way go on landing for about 100 ms, and nothing shows when they have stopped.
        self._emit(stopped)
        self._hand_on()

    def _note_writers(self, received: Sequence[tuple[str, bytes]]) -> None:
        """Note which peers write here. Only what is known as a peer counts, since anybody can send any name."""
        for name, _ in received:
            connection = self._connections.get(name)
            if connection is not None:
                connection.is_written = True

    def _take_in(self, received: Sequence[tuple[str, bytes]]) -> None:
        for _, payload in received:
            try:
                notices = unpack_notices(payload)
            except RemoteProtocolError:
                notices = [payload]  # anybody can have sent it; it is refused and counted by the reader of notices
            self._emit([NoticeArrived(notice) for notice in notices])

    def _hand_on(self) -> None:
        """Deliver what has happened.

        Do it before every call that may take long, but not sooner: the event loop that it wakes wants the interpreter.
        """
        if self._gathered:
            self._delivery.put(self._gathered)
            self._gathered.clear()

    def _remove_everybody(self) -> None:
        """Remove every peer, and let the library finish with it.

        UCX aborts the process if an agent is destroyed while something is queued for a peer that has closed.
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
        """Return an agent of NIXL over which nothing is under way to a peer.

        Raises:
            BackendError: There are too many, or no other one could be started.
        """
        num_agents = len(self._agents)
        agent = self._agents.other_than(
            [it.agent for it in self._endpoints() if it.peer == peer and self._is_in_use(it)]
        )
        if len(self._agents) > num_agents:
            self._log.info("nixl_agent_added", peer=peer, agents=len(self._agents))
        return agent

    def _endpoints(self) -> list[Connection]:
        return [*self._connections.values(), *self._former]

    def _check_self(self, peer: str, blob: bytes) -> None:
        """Refuse what would be written to the own memory, unless it is known to be meant for it.

        Raises:
            BackendError: The peer has the name of an own agent, or may have the name of one that is to be started, and
                it is not the one that peers write to; or only one of name and blob is its.
        """
        is_first = peer == self._name and blob in self._blobs
        if not is_first and (peer == self._name or peer.startswith(f"{self._name}#") or blob in self._blobs):
            raise BackendError("peer has the name or the metadata of an own agent", peer=peer)

    def _add(self, agent: Any, peer: str, blob: bytes) -> None:
        if peer == agent.name:  # itself, which needs no adding
            self._connections[peer] = Connection(peer, agent, blob, PreparedLists(peer))
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
        self._connections[peer] = Connection(peer, agent, blob, PreparedLists(peer), opened, time.monotonic())

    def _undo_adding(self, agent: Any, name: str, before: Mapping[int, Address]) -> None:
        """Close what NIXL has opened for a blob that it, or this agent, does not take.

        Args:
            agent: NIXL's.
            name: Under which NIXL may know the other agent now.
            before: Connections of earlier.
        """
        if not any(it.peer == name and it.agent is agent for it in self._endpoints()):
            self._clean_up(agent.remove_remote_agent, name)
        sockets = self._agents.outgoing(agent)
        opened = _without(sockets.now(), before)
        shut_from = time.monotonic() + ANSWER_S
        self._left_open.add(name, sockets, opened, shut_from=shut_from, is_written=False)

    def _poll_posts(self) -> None:
        for post in list(self._running.values()):
            self._follow(post, post.connection.agent.check_xfer_state)

    def _follow(self, post: Post, call: Callable[[Any], str]) -> None:
        """Begin a post or ask about it, and note how it stands."""
        try:
            state = call(post.handle)
        except Exception as error:  # noqa: BLE001 - the caller learns it as an event
            self._running.pop(post.number, None)
            self._fail(post, error)
            return
        if state != "DONE":
            self._running[post.number] = post
            return
        self._running.pop(post.number, None)
        post.connection.is_used = True
        self._end(post, None)
        if self._has_fences:
            self._end_fenced(post)

    def _fail(self, post: Post, error: Exception) -> None:
        post.error = error_text(error)
        post.connection.has_erred = True
        if isinstance(error, self._disconnected):
            post.connection.has_failed = True
            self._failed[post.number] = post
            return
        post.fence = self._num_posts
        self._in_doubt[post.number] = post
        self._emit(post.in_doubt())

    def _end(self, post: Post, error: str | None, *, lingers: bool = False) -> None:
        self._clean_up(post.connection.agent.release_xfer_handle, post.handle)
        self._emit(post.ended(error, lingers=lingers))

    def _end_failed(self) -> None:
        """End the posts of endpoints that have failed; the library has made progress since."""
        for post in self._in_doubt.values():
            if post.connection.has_failed:
                self._failed[post.number] = post
        for number, post in self._failed.items():
            self._in_doubt.pop(number, None)
            self._end(post, post.error, lingers=True)
        self._failed.clear()

    def _end_fenced(self, fence: Post) -> None:
        """End the posts in doubt that have certainly ended because a later one is done."""
        for post in list(self._in_doubt.values()):
            if post.connection is fence.connection and post.fence <= fence.number:
                del self._in_doubt[post.number]
                self._end(post, post.error)

    def _finish_disconnecting(self) -> None:
        """Keep or remove the endpoints of disconnected peers, once nothing is under way to them."""
        for peer in list(self._disconnecting):
            connection = self._connections.get(peer)
            if connection is None or self._try_to_keep(connection) or self._try_to_remove(connection):
                del self._disconnecting[peer]

    def _try_to_keep(self, connection: Connection) -> bool:
        """Keep an endpoint in case its peer comes back, unless it is in use or not sound."""
        if connection.has_erred or self._is_in_use(connection):
            return False
        self._kept[connection.peer] = None
        if len(self._kept) > MAX_KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._try_to_remove(self._connections[oldest])
        return True

    def _try_to_remove(self, connection: Connection) -> bool:
        """Remove a peer, unless something may be under way over its endpoint."""
        if self._is_in_use(connection):
            return False
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
        self._remove(connection)
        return True

    def _remove(self, connection: Connection) -> None:
        connection.lists.drop(connection.agent, self._clean_up)
        if connection.peer == connection.agent.name:
            return
        self._clean_up(connection.agent.remove_remote_agent, connection.peer)
        shut_from = 0.0 if connection.is_used else connection.opened_at + ANSWER_S
        sockets = self._agents.outgoing(connection.agent)
        is_written = connection.is_written
        self._left_open.add(connection.peer, sockets, connection.opened, shut_from=shut_from, is_written=is_written)

    def _look_at_left_open(self) -> None:
        now = time.monotonic()
        if self._left_open.is_due(now):
            self._left_open.look(now, self._sockets_in_use())

    def _sockets_in_use(self) -> dict[OutgoingSockets, InUse]:
        used: dict[OutgoingSockets, InUse] = {}
        for connection in self._endpoints():
            mine = used.setdefault(self._agents.outgoing(connection.agent), InUse())
            mine.inodes.update(connection.opened)
            if connection.peer not in self._kept or connection.is_written:
                mine.addresses.update(connection.opened.values())
        return used

    def _remove_former(self) -> None:
        """Remove former endpoints of peers that were connected anew, once nothing is under way over them."""
        if self._former:
            self._former = [connection for connection in self._former if not self._try_to_remove(connection)]

    def _is_in_use(self, connection: Connection) -> bool:
        """Return whether a post over it has not ended."""
        return any(post.connection is connection for post in self._unended())

    def _unended(self) -> list[Post]:
        return [*self._running.values(), *self._in_doubt.values(), *self._failed.values()]

    def _clean_up(self, call: Callable[..., object], *args: object) -> bool:
        """Make a call after which nothing depends on its success; say whether it succeeded."""
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
    """Refuse a blob with the name of another agent before the library sees it.

    A blob that is cut makes its name unusable in the library, for whoever really has it.

    Raises:
        BackendError: It has another name.
    """
    start = len(NAME_AT) + 8
    if blob[: len(NAME_AT)] != NAME_AT:  # of another version of the library, which names it itself
        return
    name = blob[start : start + int.from_bytes(blob[len(NAME_AT) : start], "little")]
    if name != peer.encode():
        raise BackendError(
            "peer's metadata belongs to another agent", peer=peer, agent=name[:64].decode(errors="replace")
        )


def _without(found: Mapping[int, Address], before: Mapping[int, Address]) -> dict[int, Address]:
    return {inode: address for inode, address in found.items() if inode not in before}
