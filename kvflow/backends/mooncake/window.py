"""The writes in flight to one peer: never more than the engine is certain to accept, shared fairly among the posts.

Each descriptor is a transfer with its own id, which is polled until it has ended. A post has ended when all of its
descriptors have. After the first failure no more of them are started, but those in flight continue: the library cannot
stop them.

The meaning of a failed descriptor depends on how long it took. If it failed before the library's timeouts can have
passed, the peer refused it or closed the connection, and the bytes in flight are lost with the connection. After a
timeout, the bytes may still be in the socket buffers of a hanging peer, and land when it continues (confirmed with a
stopped process). Such a post lingers.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvflow.backends.base import BackendEvent, PostEnded, PostInDoubt
from kvflow.backends.mooncake.address import host_of
from kvflow.backends.mooncake.engine import WritingEngine
from kvflow.backends.observed_path import ObservedPath
from kvflow.geometry.plan import Descriptors

__all__ = ["PeerConnection", "PostInFlight"]

RUNNING: Final = 0
DONE: Final = 1
FAILED: Final = -1
EXPIRED: Final = -2
"""The library has given up on the transfer, but not reported that it has ended."""

LOOK_AHEAD: Final = 8
"""Running transfers seen before a poll stops: four lanes execute them nearly in order, so later ones can wait."""

TURN: Final = 8
"""Descriptors started from one post before the next post's turn."""

Row = tuple[int, int, int]


class PostInFlight:
    """A post in flight.

    Attributes:
        num_running: Descriptors that have started and not ended.
        error: The first error.
        lingers: Its bytes may land after everything has ended here.
        is_in_doubt: A `PostInDoubt` was emitted for it.
    """

    def __init__(self, post_id: int, descriptors: Descriptors) -> None:
        self.post_id = post_id
        self.num_running = 0
        self.error: str | None = None
        self.lingers = False
        self.is_in_doubt = False
        self._src = descriptors.src
        self._dst = descriptors.dst
        self._next = 0
        self.num_bytes = descriptors.num_bytes

    @property
    def is_submitted(self) -> bool:
        """Whether no more of it will be started."""
        return self.error is not None or self._next >= len(self._src)

    def take_descriptors(self, count: int) -> list[Row]:
        """Take the next descriptors to start, as (source address, destination address, length)."""
        taken = slice(self._next, self._next + count)
        self._next = taken.stop
        src = self._src[taken]
        return list(zip(src[:, 0].tolist(), self._dst[taken, 0].tolist(), src[:, 1].tolist(), strict=True))


@dataclass(slots=True)
class _Transfer:
    transfer_id: int
    post: PostInFlight
    since: float


class PeerConnection:
    """The posts to one peer, and its window of transfers in flight.

    Attributes:
        is_leaving: Remove the connection once it is not active.

    Args:
        max_running: Maximum number of descriptors in flight.
        timeout_s: A descriptor that fails sooner than this was not timed out.
    """

    def __init__(
        self,
        engine: WritingEngine,
        session: str,
        *,
        max_running: int,
        timeout_s: float,
        emit: Callable[[Sequence[BackendEvent]], None],
    ) -> None:
        self.is_leaving = False
        self.engine = engine
        self.path = ObservedPath()
        self._session = session
        self._max_running = max_running
        self._timeout_s = timeout_s
        self._emit = emit
        self._posts: deque[PostInFlight] = deque()
        self._running: deque[_Transfer] = deque()
        self._unended: dict[int, PostInFlight] = {}

    @property
    def host(self) -> str:
        """The peer's host, as in its session."""
        return host_of(self._session)

    @property
    def is_active(self) -> bool:
        """Whether there is anything to start or poll."""
        return bool(self._posts or self._running)

    @property
    def unended(self) -> list[PostInFlight]:
        """Posts that have not ended. If the connection is not active, they end when the engine is destroyed."""
        return list(self._unended.values())

    @property
    def is_writing(self) -> bool:
        """Whether the engine has started descriptors and not reported that they have ended."""
        return any(post.num_running for post in self._unended.values())

    def post(self, post: PostInFlight) -> None:
        """Accept a post, and start as much of it as fits into the window."""
        self._unended[post.post_id] = post
        self._posts.append(post)
        self._fill()

    def poll(self) -> None:
        """Handle ended transfers, and start what fits into the window."""
        still_running: list[_Transfer] = []
        while self._running and len(still_running) < LOOK_AHEAD:
            transfer = self._running.popleft()
            status = self.engine.check(transfer.transfer_id)
            if status == RUNNING:
                still_running.append(transfer)
            else:
                self._ended(transfer, status)
        self._running.extendleft(reversed(still_running))
        self._fill()

    def _fill(self) -> None:
        """Start what fits into the window. Nothing is started while `submit` could block."""
        if self._posts and self.engine.begin_writes():
            try:
                self._start_writes()
            finally:
                self.engine.end_writes()

    def _start_writes(self) -> None:
        """Start what fits into the window, a few descriptors of each post in turn."""
        while self._posts and len(self._running) < self._max_running:
            post = self._posts.popleft()
            for descriptor in post.take_descriptors(min(TURN, self._max_running - len(self._running))):
                transfer_id = self.engine.submit(self._session, *descriptor)
                if not transfer_id:
                    post.error = post.error or "the engine did not take the write"
                    break
                post.num_running += 1
                self._running.append(_Transfer(transfer_id, post, time.monotonic()))
            if post.is_submitted:
                self._settle(post)
            else:
                self._posts.append(post)

    def _ended(self, transfer: _Transfer, status: int) -> None:
        post = transfer.post
        if status != EXPIRED:
            post.num_running -= 1
        if status != DONE:
            took_s = time.monotonic() - transfer.since
            was_closed = transfer.since <= self.engine.closed_at
            is_timeout = status != FAILED or took_s >= self._timeout_s or was_closed
            if is_timeout and not self.engine.was_aborted(self._session, transfer.since):
                self.engine.abort(self._session)  # it may have gone over any connection that is established
            post.lingers = post.lingers or is_timeout
            reason = "it timed out" if is_timeout else "the peer refused it or closed the connection"
            post.error = post.error or f"write failed after {took_s:.3f} s: {reason}"
            if post in self._posts:
                self._posts.remove(post)
        if post.is_submitted:
            self._settle(post)

    def _settle(self, post: PostInFlight) -> None:
        """Report the state of a post that will start no more descriptors."""
        if not post.num_running:
            del self._unended[post.post_id]
            if post.error is None:
                self.path.count(post.num_bytes)
            self._emit([PostEnded(post.post_id, post.error, post.lingers)])
        elif post.error is not None and not post.is_in_doubt:
            post.is_in_doubt = True
            self._emit([PostInDoubt(post.post_id, post.error)])
