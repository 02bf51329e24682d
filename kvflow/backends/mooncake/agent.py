"""The engines of one endpoint and the lines to its peers. Every method runs on the owner thread."""

import os
import time
from collections.abc import Mapping
from typing import Final

from kvflow.aio.mailbox import Mailbox
from kvflow.backends.base import BackendEvent, PostEnded
from kvflow.backends.metadata import RegisteredMemory
from kvflow.backends.mooncake.address import LifeCell
from kvflow.backends.mooncake.engine import PEER_TO_PEER, Engine, EngineSettings
from kvflow.backends.mooncake.library import Library
from kvflow.backends.mooncake.window import Line, Post
from kvflow.errors import BackendError, BackendUnavailable
from kvflow.geometry.layout import MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.observe.logs import get_logger

__all__ = ["Agent"]

MAX_ENGINES: Final = 8
"""An engine stays until the last peer that was met through it has left."""

MAX_DEPARTED: Final = 32
"""Peers that have left before the next ones are met through a fresh engine; each costs four open files until then."""

TIMEOUT_VARIABLES: Final = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
TIMEOUT_DEFAULT_S: Final = 30.0
TIMEOUT_MARGIN: Final = 0.9
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
        settings: Of each engine.
        environment: Variables to set before the library is loaded, unless they are set already.
        window: Descriptors under way to one peer at once.
        mailbox: Takes what happens to posts.

    Raises:
        BackendUnavailable: The library is missing or broken, or no engine could be started.
    """

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        environment: Mapping[str, str],
        window: int,
        mailbox: Mailbox[BackendEvent],
    ) -> None:
        self._library = Library(_complete(environment, settings))
        self._settings = settings
        self._window = window
        self._emit = mailbox.put
        self._log = get_logger(agent=name)
        self._timeout_s = _shortest_timeout_s() if settings.protocol == "tcp" else 0.0
        self._ranges: tuple[MemoryRange, ...] = ()
        self._lines: dict[str, Line[Engine]] = {}
        self._departed: list[Line[Engine]] = []
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

    def borrow_sender(self, worn_out: Engine | None = None) -> Engine:
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

    def give_back(self, engine: Engine) -> None:
        """Say that a peer is not being met any more."""
        engine.num_users -= 1
        self._close_unused()

    def connect(self, peer: str, engine: Engine, session: str) -> None:
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

    def poll(self) -> None:
        """See what has ended, and start what there is room for."""
        for line in self._lines.values():
            if line.is_active:
                line.poll()
        self._remove_leaving()

    def close(self, timeout_s: float) -> None:
        """Wait for running posts, then destroy the engines: the only thing that stops a post for certain."""
        give_up = time.monotonic() + timeout_s
        try:
            while self.is_busy() and time.monotonic() < give_up:
                self.poll()
                time.sleep(CLOSE_POLL_S)
        finally:
            stopped = [post_id for line in [*self._lines.values(), *self._departed] for post_id in line.unended]
            self._lines.clear()
            self._departed.clear()
            for engine in self._engines:
                engine.close()
            self._emit([PostEnded(post_id, "stopped by closing the endpoint", lingers=True) for post_id in stopped])

    def _start_engine(self) -> Engine:
        engine = Engine(self._library, self._settings, self.cell)
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


def _complete(environment: Mapping[str, str], settings: EngineSettings) -> dict[str, str]:
    """Add what follows from the settings.

    Raises:
        BackendUnavailable: The process was told to use TCP only.
    """
    complete = dict(environment)
    if settings.protocol == "tcp":
        complete["MC_FORCE_TCP"] = "1"
    elif "MC_FORCE_TCP" in os.environ:
        raise BackendUnavailable(
            "MC_FORCE_TCP is set, so Mooncake would use TCP; unset it, and open no backend with protocol tcp before"
        )
    if settings.metadata_server != PEER_TO_PEER:
        complete["MC_TCP_BIND_ADDRESS"] = settings.host
    return complete


def _shortest_timeout_s() -> float:
    """A write that fails sooner than this was not timed out by the library."""
    return TIMEOUT_MARGIN * min(_seconds(os.environ.get(variable, "")) for variable in TIMEOUT_VARIABLES)


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() and int(text) > 0 else TIMEOUT_DEFAULT_S
