"""The engines of one endpoint and the lines to its peers. Every method runs on the owner thread."""

import time
from collections.abc import Callable
from typing import Final

from kvflow.aio.mailbox import Mailbox
from kvflow.backends.base import BackendEvent, PostEnded
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.mooncake.address import LifeCell
from kvflow.backends.mooncake.window import Line, Post
from kvflow.backends.mooncake.writing import WritingEngine
from kvflow.errors import BackendError
from kvflow.geometry.layout import MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["Agent"]

MAX_ENGINES: Final = 8
"""An engine stays until the last peer that was met through it has left."""

MAX_DEPARTED: Final = 32
"""Peers that have left before the next ones are met through a fresh engine; each costs four open files until then."""

CLOSE_POLL_S: Final = 1e-3


class Agent:
    """What one endpoint has inside Mooncake: an engine that peers write to, and one that writes to new peers.

    They are the same at first. The one that writes is replaced when it is worn out: it knows a peer's address wrongly,
    or many of its peers have left.

    Attributes:
        cell: What peers read to see whose memory this is.
        session: What peers call this endpoint.

    Args:
        name: Agent name.
        start_engine: Starts one for a cell.
        window: Descriptors under way to one peer at once.
        timeout_s: A descriptor that fails sooner than this was not timed out.
        mailbox: Takes what happens to posts.

    Raises:
        BackendUnavailable: No engine could be started.
    """

    def __init__(
        self,
        name: str,
        start_engine: Callable[[LifeCell], WritingEngine],
        mailbox: Mailbox[BackendEvent],
        *,
        window: int,
        timeout_s: float,
    ) -> None:
        self._start = start_engine
        self._window = window
        self._emit = mailbox.put
        self._log = get_logger(agent=name)
        self._timeout_s = timeout_s
        self._ranges: tuple[MemoryRange, ...] = ()
        self._lines: dict[str, Line[WritingEngine]] = {}
        self._departed: list[Line[WritingEngine]] = []
        self.cell = LifeCell()
        self._sender = self._start_engine()
        self._engines = [self._sender]
        self.session = self._sender.session
        self._sender.num_users += 1  # it stays, because peers write to it

    def register(self, memory: RegisteredMemory) -> None:
        """Register memory with every engine.

        Raises:
            RegistrationError: The library refused.
        """
        for engine in self._engines:
            engine.register(memory.ranges)
        self._ranges += memory.ranges

    def borrow_sender(self, worn_out: WritingEngine | None = None) -> WritingEngine:
        """Give the engine to meet a peer through; `give_back` it.

        Args:
            worn_out: Not this one.

        Raises:
            BackendError: There are too many in use, or none could be started.
        """
        is_crowded = sum(engine.num_users > 0 for engine in self._engines) >= MAX_ENGINES
        if self._sender is worn_out or (self._sender.num_departed >= MAX_DEPARTED and not is_crowded):
            if is_crowded:
                raise BackendError("too many engines are in use by peers that have not left", engines=MAX_ENGINES)
            self._sender = self._start_engine()
            self._engines.append(self._sender)
            self._log.info("mooncake_engine_replaced", engines=len(self._engines))
            self._close_unused()
        self._sender.num_users += 1
        return self._sender

    def give_back(self, engine: WritingEngine) -> None:
        """Say that a peer is not being met any more."""
        engine.num_users -= 1
        self._close_unused()

    def connect(self, peer: str, engine: WritingEngine, session: str) -> None:
        """Open the line to a peer that was met on an engine."""
        line = self._lines.get(peer)
        if line is None:
            engine.num_users += 1
            self._lines[peer] = Line(
                engine, session, max_running=self._window, timeout_s=self._timeout_s, emit=self._emit
            )
        else:  # it is back before its last post has ended
            line.is_leaving = False

    def disconnect(self, peer: str) -> None:
        """Close the line to a peer when its last post has ended."""
        if peer in self._lines:
            self._lines[peer].is_leaving = True
            self._remove_leaving()

    def post(self, post_id: int, peer: str, descriptors: Descriptors) -> None:
        """Start to write to a peer."""
        if peer in self._lines:
            self._lines[peer].post(Post(post_id, descriptors))
        else:
            self._emit([PostEnded(post_id, "peer was disconnected")])

    def is_busy(self) -> bool:
        """Something is under way."""
        return any(line.is_active for line in self._lines.values())

    def poll(self) -> bool:
        """See what has ended, and start what there is room for; True, as it may have."""
        for line in self._lines.values():
            if line.is_active:
                line.poll()
        self._remove_leaving()
        return True

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the engines: the only thing that stops a post for certain."""
        give_up = time.monotonic() + timeout_s
        try:
            while self.is_busy() and time.monotonic() < give_up:
                self.poll()
                time.sleep(CLOSE_POLL_S)
        finally:
            stopped = [post for line in [*self._lines.values(), *self._departed] for post in line.unended]
            self._lines.clear()
            self._departed.clear()
            for engine in self._engines:
                engine.close()
            self._emit([_stopped(post) for post in stopped])

    def _start_engine(self) -> WritingEngine:
        engine = self._start(self.cell)
        try:
            engine.register(self._ranges)
        except BaseException:
            engine.close()
            raise
        return engine

    def _remove_leaving(self) -> None:
        for peer, line in list(self._lines.items()):
            if line.is_leaving and not line.is_active:
                del self._lines[peer]
                line.engine.num_departed += 1
                if line.unended:
                    self._departed.append(line)
                else:
                    self.give_back(line.engine)

    def _close_unused(self) -> None:
        for engine in [one for one in self._engines if one is not self._sender and not one.num_users]:
            self._engines.remove(engine)
            engine.close()


def _stopped(post: Post) -> PostEnded:
    """The end of a post whose engine was destroyed: what was under way may still lie in the peer's buffers."""
    lingers = post.lingers or post.num_running > 0
    return PostEnded(post.post_id, post.error or "stopped by closing the endpoint", lingers)
