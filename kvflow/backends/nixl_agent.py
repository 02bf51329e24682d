"""A NIXL agent as its owner thread uses it: what is posted, to whom, and what proves that it has ended.

An error proves less than one would wish. What was measured, and what follows:

* An error of the endpoint (RemoteDisconnect: the peer was killed, its agent closed, its connection broke) ends every
  post to that peer, and nothing reads the source any more: after 92 kills in the middle of 256 MiB, over CMA, shared
  memory and TCP, the kernel saw no page of it read. Such a post has ended, after one more round of progress for what
  the library still has to cancel. Over TCP, bytes may be in the socket buffers of a peer that lives: they linger.
* Any other error leaves the endpoint as it was, and earlier parts of the post under way, so it is in doubt. A later
  post over the same endpoint is the fence: when it is done, so is everything before it.
* A failed endpoint stays failed, also if the peer lives. Removing the agent and adding it again makes a new one.
* Removing a peer that lives leaves its connections open on both sides, one file each for every lane, until either
  process ends; removing on both sides changes nothing. So a sound endpoint is kept when a rank parts with a peer (which
  may only have been silent), and used again if the same life comes back. The library closes what leads to the dead.

Source: nixl 1.5.1 (UCX 1.23) on Linux, host memory, one host.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvflow.aio.mailbox import Mailbox
from kvflow.backends.base import BackendEvent, NoticeArrived, PostEnded
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.nixl_lists import PreparedLists
from kvflow.backends.nixl_posts import Connection, Outbox, Post, Write, joined
from kvflow.backends.notices import pack_notices, unpack_notices
from kvflow.errors import BackendError, BackendUnavailable, RegistrationError, RemoteProtocolError
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["NixlAgent"]

DISTRIBUTIONS: Final = ("nixl_cu12", "nixl_cu13")
"""Import names, in order of preference. The umbrella package `nixl` imports torch to choose between them."""

CLOSE_POLL_S: Final = 1e-3

PARTING_ROUNDS: Final = 20
"""Rounds of progress between removing the last peer and destroying the agent; measured: none is too few."""

MAX_KEPT: Final = 256
"""Sound endpoints kept for peers that the rank has parted with; beyond it the oldest is removed."""

MAX_UNTAKEN: Final = 1_000_000
"""Events kept for a rank that does not take them; notices beyond it are lost, as on a full receive queue."""


class NixlAgent:
    """A NIXL agent. Every method runs on the owner thread.

    Args:
        name: Of the agent.
        plugin: NIXL plugin to use.
        plugin_options: Its parameters.
        environment: Variables to set before the library is loaded, unless they are set already.
        mailbox: Takes what happens.

    Raises:
        BackendUnavailable: The library is missing, or its plugin does not start.
    """

    def __init__(
        self,
        name: str,
        plugin: str,
        plugin_options: dict[str, str],
        environment: Mapping[str, str],
        mailbox: Mailbox[BackendEvent],
    ) -> None:
        for variable, value in environment.items():
            os.environ.setdefault(variable, value)
        api = import_api()
        self._log = get_logger(agent=name)
        self._mailbox = mailbox
        self._news: list[BackendEvent] = []
        self._emit = self._news.extend
        self._not_found = api.nixlBind.nixlNotFoundError
        self._disconnected = api.nixlBind.nixlRemoteDisconnectError
        # Threads of the plugin's own post in an order that nobody knows, so that no post is a fence for another.
        self._has_fences = plugin == "UCX" and int(plugin_options.get("num_threads", "0")) == 0
        self._kind = "DRAM"
        self._registered: list[Any] = []
        self._running: dict[int, Post] = {}
        self._doubtful: dict[int, Post] = {}
        self._failed: dict[int, Post] = {}
        self._connections: dict[str, Connection] = {}
        self._leaving: dict[str, None] = {}
        self._kept: dict[str, None] = {}
        self._num_posts = 0
        self._is_watching = False
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(plugin, plugin_options)
        except Exception as error:
            raise BackendUnavailable(
                "NIXL could not start its plugin", plugin=plugin, options=plugin_options, detail=_text(error)
            ) from error

    def register(self, memory: RegisteredMemory) -> bytes:
        """Register memory, and give what a peer needs to write there.

        Raises:
            RegistrationError: NIXL does not take it.
        """
        rows = [(item.address, item.length, memory.device_id, "") for item in memory.ranges]
        try:
            registered = self._agent.register_memory(rows, memory.memory_kind)
        except Exception as error:
            raise RegistrationError(
                "NIXL refused to register memory",
                memory_kind=memory.memory_kind,
                ranges=len(rows),
                detail=_text(error),
            ) from error
        if registered is None:  # how NIXL reports arguments that it does not understand
            raise RegistrationError("NIXL did not accept the memory ranges", ranges=rows[:4])
        self._registered.append(registered)
        self._kind = memory.memory_kind
        return bytes(self._agent.get_agent_metadata())

    def connect(self, peer: str, blob: bytes) -> None:
        """Open an endpoint to a peer, or a new one if the last one has failed or led to another life.

        Raises:
            BackendError: NIXL does not take the blob, or it is another peer's.
        """
        self._hand_on()
        self._leaving.pop(peer, None)
        self._kept.pop(peer, None)
        connection = self._connections.get(peer)
        if connection is not None and not connection.has_failed and connection.blob == blob:
            return
        if connection is not None:
            self._clean_up(self.poll)  # what ran over it raises now
            if not self._try_to_remove(connection):
                raise BackendError("posts over the former endpoint of a peer have not ended", peer=peer)
        self._add(peer, blob)

    def disconnect(self, peer: str) -> None:
        """Part with a peer when its last post has ended: parting earlier loses sight of the post, not its bytes."""
        self._hand_on()
        self._leaving[peer] = None
        self._remove_leaving()

    def post_next(self, outbox: Outbox) -> None:
        """Begin what is next in an outbox, if anything is; what becomes of it is told as events."""
        writes = outbox.take()
        if not writes:  # they went with an earlier one
            return
        post = self._prepare(outbox, writes)
        self._hand_on()  # the next call may take long
        if post is not None:
            self._follow(post, self._agent.transfer)

    def _prepare(self, outbox: Outbox, writes: Sequence[Write]) -> Post | None:
        connection = self._connections.get(outbox.peer)
        if connection is None or connection.has_failed:
            error = "the connection to the peer has failed; it must be greeted anew"
            self._emit([PostEnded(write.post_id, error) for write in writes])
            return None
        try:
            payload = pack_notices(write.notice for write in writes)
            handle = self._make_handle(connection, outbox.kind, joined(writes), payload)
        except Exception as error:  # noqa: BLE001 - nothing was posted; the caller learns it as an event
            connection.has_erred = True
            self._emit([PostEnded(write.post_id, _text(error)) for write in writes])
            return None
        post = Post(tuple(write.post_id for write in writes), connection, handle, self._num_posts)
        self._num_posts += 1
        return post

    def _make_handle(self, connection: Connection, kind: str, moves: Descriptors | Blocks, payload: bytes) -> Any:
        if isinstance(moves, Blocks):
            src, dst = connection.lists.of(self._agent, moves.lists, (self._kind, kind), self._clean_up)
            return self._agent.make_prepped_xfer("WRITE", src, moves.src, dst, moves.dst, payload)
        rows = self._agent.get_xfer_descs
        src, dst = rows(moves.src, self._kind), rows(moves.dst, kind)
        return self._agent.initialize_xfer("WRITE", src, dst, connection.peer, payload)

    def watch(self, active: bool) -> None:
        """Poll sharply, or not."""
        self._is_watching = active

    def is_busy(self) -> bool:
        """Something is expected soon."""
        return bool(self._running or self._failed) or self._is_watching

    def poll(self) -> bool:
        """Let the library make progress, and tell what has happened; say whether anything has."""
        self._hand_on()
        num_running = len(self._running)
        try:
            self._poll_posts()
            notices = self._agent.get_new_notifs()
            if notices and len(self._mailbox) < MAX_UNTAKEN:
                for payloads in notices.values():
                    self._take_in(payloads)
            self._end_failed()
        finally:
            self._hand_on()  # before a breakdown is told, and before peers are removed, which may take long
        self._remove_leaving()
        return bool(notices) or len(self._running) != num_running

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the agent: the only thing that stops a post for certain."""
        give_up = time.monotonic() + timeout_s
        while self._running and time.monotonic() < give_up and self._clean_up(self.poll):
            time.sleep(CLOSE_POLL_S)
        error = "stopped by closing the endpoint"
        stopped = [end for post in self._unended() for end in post.ended(error, lingers=True)]
        for posts in (self._running, self._doubtful, self._failed):
            posts.clear()
        self._part_with_everybody()
        for registered in self._registered:
            self._clean_up(self._agent.deregister_memory, registered)
        self._registered.clear()
        self._agent = None  # the last reference, since no post is kept any more: handles hold the agent too
        # What was on its way goes on landing for about 100 ms, and nothing tells when it has stopped.
        self._emit(stopped)
        self._hand_on()

    def _take_in(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            try:
                notices = unpack_notices(payload)
            except RemoteProtocolError:
                notices = [payload]  # anybody can have sent it; it is refused and counted where notices are read
            self._emit([NoticeArrived(notice) for notice in notices])

    def _hand_on(self) -> None:
        """Put what has happened into the mailbox.

        To be called before every call that may take long, but not sooner: who is woken by it wants the interpreter.
        """
        if self._news:
            self._mailbox.put(self._news)
            self._news.clear()

    def _part_with_everybody(self) -> None:
        """Remove every peer, and let the library finish with it.

        UCX aborts the process if an agent is destroyed while something is queued for a peer that has closed.
        """
        for peer, connection in self._connections.items():
            connection.lists.drop(self._agent, self._clean_up)
            self._clean_up(self._agent.remove_remote_agent, peer)
        for _ in range(PARTING_ROUNDS):
            self._clean_up(self._agent.get_new_notifs)
            time.sleep(CLOSE_POLL_S)

    def _add(self, peer: str, blob: bytes) -> None:
        try:
            name = _decoded(self._agent.add_remote_agent(blob))
        except Exception as error:
            raise BackendError("NIXL refused the peer's metadata", peer=peer, detail=_text(error)) from error
        if name == peer:
            self._connections[peer] = Connection(peer, blob, PreparedLists(peer))
            return
        if name not in self._connections:
            self._clean_up(self._agent.remove_remote_agent, name)
        raise BackendError("peer's metadata belongs to another agent", peer=peer, agent=name)

    def _poll_posts(self) -> None:
        for post in list(self._running.values()):
            self._follow(post, self._agent.check_xfer_state)

    def _follow(self, post: Post, call: Callable[[Any], str]) -> None:
        """Begin a post or look after it, and file it under what it has come to."""
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
        self._end(post, None)
        if self._has_fences:
            self._end_fenced(post)

    def _fail(self, post: Post, error: Exception) -> None:
        post.error = _text(error)
        post.connection.has_erred = True
        if isinstance(error, self._disconnected):
            post.connection.has_failed = True
            self._failed[post.number] = post
            return
        post.fence = self._num_posts
        self._doubtful[post.number] = post
        self._emit(post.in_doubt())

    def _end(self, post: Post, error: str | None, *, lingers: bool = False) -> None:
        self._clean_up(self._agent.release_xfer_handle, post.handle)
        self._emit(post.ended(error, lingers=lingers))

    def _end_failed(self) -> None:
        """End what an endpoint has failed with; the library has made progress since."""
        for post in self._doubtful.values():
            if post.connection.has_failed:
                self._failed[post.number] = post
        for number, post in self._failed.items():
            self._doubtful.pop(number, None)
            self._end(post, post.error, lingers=True)
        self._failed.clear()

    def _end_fenced(self, fence: Post) -> None:
        """End the doubts that a post has dispelled by being done."""
        for post in list(self._doubtful.values()):
            if post.connection is fence.connection and post.fence <= fence.number:
                del self._doubtful[post.number]
                self._end(post, post.error)

    def _remove_leaving(self) -> None:
        """Part with the peers that the rank has parted with, once nothing is under way to them."""
        for peer in list(self._leaving):
            connection = self._connections.get(peer)
            if connection is None or self._try_to_keep(connection) or self._try_to_remove(connection):
                del self._leaving[peer]

    def _try_to_keep(self, connection: Connection) -> bool:
        """Keep an endpoint for when its peer comes back, unless it is not sound or in use."""
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
        del self._connections[connection.peer]
        connection.lists.drop(self._agent, self._clean_up)
        self._clean_up(self._agent.remove_remote_agent, connection.peer)
        return True

    def _is_in_use(self, connection: Connection) -> bool:
        """A post over it has not ended."""
        return any(post.connection is connection for post in self._unended())

    def _unended(self) -> list[Post]:
        return [*self._running.values(), *self._doubtful.values(), *self._failed.values()]

    def _clean_up(self, call: Callable[..., object], *args: object) -> bool:
        """Make a call after which nothing depends on its success; say whether it succeeded."""
        try:
            call(*args)
        except self._not_found:
            return True
        except Exception as error:  # noqa: BLE001 - the library keeps what it could not release
            self._log.warning("nixl_clean_up_failed", call=call.__name__, detail=_text(error))
            return False
        return True


def import_api() -> Any:
    """Import whichever NIXL build is installed.

    Raises:
        BackendUnavailable: None is, or it does not load.
    """
    failures = {}
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.import_module(f"{distribution}._api")
        except ImportError as error:  # noqa: PERF203 - two at most
            failures[distribution] = str(error)
    raise BackendUnavailable(
        "NIXL is not installed or does not load; install kvflow[nixl-cu12] or kvflow[nixl-cu13]", **failures
    )


def _text(error: Exception) -> str:
    """NIXL's exceptions carry only a status name; the type says the rest."""
    return f"{type(error).__name__}: {error}"


def _decoded(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
