"""Prefill and decode ranks that run on an event loop in a thread."""

import os
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from kvflow import decode, prefill
from kvflow.aio.change_queue import ChangeQueue
from kvflow.aio.loop_thread import LoopThread
from kvflow.aio.switch_interval import SWITCHING
from kvflow.aio.thread_waker import ThreadWaker
from kvflow.backends.base import Backend
from kvflow.backends.shared import SharedBackend
from kvflow.blocking.calls import call_from_here, call_on_loop, with_arguments_of
from kvflow.blocking.transfers import BlockingReceiver, BlockingSender, BlockingTransfer, TransferUpdate, take_update
from kvflow.config import DecodeConfig, PrefillConfig, RankConfig
from kvflow.errors import ConfigError, LocalProtocolError
from kvflow.geometry.layout import KVLayout
from kvflow.ports import Ports
from kvflow.rank import Rank
from kvflow.transfer import Tracer

__all__ = ["BlockingRank", "DecodeRank", "PrefillRank"]

Result = TypeVar("Result")
AnyConfig = TypeVar("AnyConfig", bound=RankConfig)
AnyRank = TypeVar("AnyRank", prefill.PrefillRank, decode.DecodeRank)
AnyTransfer = TypeVar("AnyTransfer", bound=BlockingTransfer)


class BlockingRank(Generic[AnyConfig, AnyRank, AnyTransfer]):
    """A rank whose event loop runs in a thread. Use it as a context manager, or call `open` and `close`.

    Args:
        config: Settings, a `PrefillConfig` or a `DecodeConfig`.
        layout: The pools to send from or receive into; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the configured one. Ranks that share one (a `SharedBackend`) must also
            share `loop`.
        loop: The thread to run on; by default the rank starts its own.
        affinity: CPUs for its own thread, see `LoopThread`.
        ports: Replacement for the real sockets, clock, threads and random bytes (for tests).
        tracer: Makes a span of each transfer, see `kvflow.otel.TransferTracer`.
    """

    _kind: ClassVar[Callable[..., Any]]
    """The async rank."""

    def __init__(  # noqa: PLR0913 - one parameter an option
        self,
        config: AnyConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        loop: LoopThread | None = None,
        affinity: Collection[int] | None = None,
        ports: Ports | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        if loop is not None and affinity is not None:
            raise ConfigError("affinity applies to the loop; pass it to LoopThread", affinity=affinity)
        self._make_rank: Callable[[], AnyRank] = partial(
            self._kind, config, layout, backend, ports=ports, tracer=tracer
        )
        self._changes: ChangeQueue[AnyTransfer] = ChangeQueue()
        self._unsettled: set[BlockingTransfer] = set()
        self._switch_interval_s: float | None = None
        self._loop = loop
        self._affinity = affinity
        self._rank: AnyRank | None = None
        self._was_opened = False
        self._is_open = False
        self._is_forked = False
        self._stack = ExitStack()
        self._closing = Lock()

    def open(self) -> Self:
        """Open the rank, as entering the context does.

        Raises:
            LocalProtocolError: It was already opened.
            Also everything that the constructor and entry of the async rank raise.
        """
        if self._was_opened:
            raise LocalProtocolError("rank can be opened only once; create a new one")
        self._was_opened = True
        _opened.add(self)
        with ExitStack() as stack:
            stack.callback(self._changes.close)
            stack.callback(self._forget_unsettled)
            loop = self._loop or stack.enter_context(LoopThread(self._affinity))
            self._switch_interval_s = loop.switch_interval_s
            self._portal = stack.enter_context(loop.use())
            rank = self._portal.call(self._make_rank)
            stack.enter_context(self._portal.wrap_async_context_manager(rank))
            self._rank = rank
            self._waker = self._portal.call(ThreadWaker)
            stack.callback(self._portal.call, self._waker.close)
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    def close(self) -> None:
        """Fail all open transfers and close the rank, as leaving the context does. Blocks until done.

        May be called repeatedly and from several threads. Does nothing in a forked child.
        """
        self._is_open = False
        if self._is_forked:
            return
        with self._closing:
            self._stack.close()

    def _abandon(self) -> None:
        """Detach from the rank, whose event loop stays with the parent. Call it in a process that was just forked."""
        self._is_open, self._is_forked = False, True
        self._changes = ChangeQueue()
        self._changes.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def completed(self) -> list[TransferUpdate[AnyTransfer]]:
        """Return an update for each transfer whose outcome or memory has changed since the last call.

        Call it in every step. A sender is also reported when every decode rank has granted (`wanted`) and when it
        `is_quiesced`. Several changes of one transfer are combined into one update. Updates are kept until you ask for
        them. Also works after the rank is closed.
        """
        changed = self._changes.take_changes()
        if not changed:  # the common case, in nearly every step
            return []
        updates = map(take_update, changed)
        return [update for update in updates if update is not None]

    def wait_any(self, timeout_s: float | None = None) -> list[TransferUpdate[AnyTransfer]]:
        """Wait until `completed` has updates or the timeout expires, and return them. For idle engines.

        Closing the rank ends the wait.

        Raises:
            LocalProtocolError: The rank was not opened.
        """
        if not self._was_opened:
            raise LocalProtocolError("rank is not open")
        updates: list[TransferUpdate[AnyTransfer]] = []

        def look() -> bool:
            updates.extend(self.completed())
            return bool(updates) or self._changes.is_closed

        self._changes.wait(look, timeout_s)
        return updates

    def fileno(self) -> int:
        """Return a file descriptor that is readable while `completed` has updates, for use with `select`.

        The rank closes it, which does not wake up a pending `select`. Spurious wake-ups are possible.

        Raises:
            LocalProtocolError: The rank is closed.
        """
        try:
            return self._changes.fileno()
        except ValueError as error:
            raise LocalProtocolError("rank is not open") from error

    def ask(self, function: Callable[[AnyRank], Result]) -> "Future[Result]":
        """Call a function with the async rank on the event loop, after all earlier calls, and do not wait.

        A scheduler that must not wait can ask for `rank.quarantined()` so, and look at the result in a later step.

        Args:
            function: Called once; must not block the event loop.

        Returns:
            Its result, or what it has raised.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        rank, result = self._opened, Future[Result]()

        def call() -> None:
            try:
                result.set_result(function(rank))
            except BaseException as error:  # noqa: BLE001 - raised to the caller, not on the event loop of all transfers
                result.set_exception(error)

        self._call_soon(call)
        return result

    statistics = call_on_loop(Rank.statistics)
    metrics = call_on_loop(Rank.metrics)
    health = call_on_loop(Rank.health)
    quarantined = call_on_loop(Rank.quarantined)
    release = call_on_loop(Rank.release)
    reload_trust = call_on_loop(Rank.reload_trust)
    announce_drain = call_on_loop(Rank.announce_drain)
    start_drain = call_on_loop(Rank.start_drain)

    @property
    def is_drained(self) -> bool:
        """True if draining has started and every transfer has an outcome, with its pages safe or in quarantine.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        self._check_open()
        return self._opened.is_drained

    def drain(self, timeout_s: float | None = None) -> bool:
        """Start draining and block until everything has finished.

        For scripts: remaining chunks must come from another thread.

        Args:
            timeout_s: How long to wait; no limit by default.

        Returns:
            The value of `is_drained`.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self.start_drain()
        return self._portal.call(self._opened.drain, timeout_s)

    @property
    def _opened(self) -> AnyRank:
        """The async rank; still available after closing."""
        if self._rank is None:
            raise LocalProtocolError("rank is not open")
        return self._rank

    def _note_begun(self, transfer: BlockingTransfer) -> None:
        """Track an open transfer, and shorten the switch interval while any transfer is open."""
        if not self._unsettled and self._switch_interval_s is not None:
            SWITCHING.shorten(self._switch_interval_s)
        self._unsettled.add(transfer)

    def _note_settled(self, transfer: BlockingTransfer) -> None:
        if transfer in self._unsettled:
            self._unsettled.remove(transfer)
            if not self._unsettled and self._switch_interval_s is not None:
                SWITCHING.restore(self._switch_interval_s)

    def _forget_unsettled(self) -> None:
        for transfer in list(self._unsettled):
            self._note_settled(transfer)

    def _check_open(self) -> None:
        if self._is_forked:
            raise LocalProtocolError("rank was opened before this process was forked; open another one here")
        if not self._is_open:
            raise LocalProtocolError("rank is not open")

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Schedule a call on the event loop, after all earlier ones; raise LocalProtocolError if the rank is closed."""
        self._check_open()
        try:
            self._waker.call_soon(call)
        except RuntimeError as error:
            raise LocalProtocolError("rank is not open") from error

    def _call(self, function: Callable[[AnyRank], Result]) -> Result:
        return self.ask(function).result()


_opened: "weakref.WeakSet[BlockingRank[Any, Any, Any]]" = weakref.WeakSet()


def _abandon_all() -> None:
    for rank in list(_opened):
        rank._abandon()


os.register_at_fork(after_in_child=_abandon_all)


class PrefillRank(BlockingRank[PrefillConfig, prefill.PrefillRank, BlockingSender]):
    """`kvflow.PrefillRank` for a scheduler loop."""

    _kind = prefill.PrefillRank

    ticket = call_from_here(prefill.PrefillRank.ticket)

    @property
    def endpoint(self) -> str:
        """Address of the control socket, once the rank is open.

        Raises:
            LocalProtocolError: The rank was not opened.
        """
        return self._opened.endpoint

    @property
    def has_offers(self) -> bool:
        """Whether there are offers for the engine, see `kvflow.OfferQueue`. This is cheap: call it in every step.

        Raises:
            LocalProtocolError: The rank was not opened.
        """
        return not self._opened.offers.is_empty

    @with_arguments_of(prefill.PrefillRank.send)
    def send(self, *args: Any, **options: Any) -> BlockingSender:
        """Start sending a room; see `kvflow.PrefillRank.send`.

        Does not block: if the room is in use or the rank is draining, `outcome` soon becomes FAILED. The queue of
        chunks is unbounded; to limit it, check the sender's `queued_chunks`.

        Raises:
            LocalProtocolError: The room or the label is invalid, or the rank is not open.
        """
        self._check_open()
        return BlockingSender(self, self._opened.send(*args, **options))


class DecodeRank(BlockingRank[DecodeConfig, decode.DecodeRank, BlockingReceiver]):
    """`kvflow.DecodeRank` for a scheduler loop."""

    _kind = decode.DecodeRank

    decline = call_from_here(decode.DecodeRank.decline)

    @with_arguments_of(decode.DecodeRank.receive)
    def receive(self, *args: Any, **options: Any) -> BlockingReceiver:
        """Start receiving a room; see `kvflow.DecodeRank.receive`.

        Does not block: if the room is in use or the rank is draining, `outcome` soon becomes FAILED.

        Raises:
            PlanError, ConfigError, TicketError, LocalProtocolError: As there, but not what is raised on entry.
        """
        self._check_open()
        return BlockingReceiver(self, self._opened.receive(*args, **options))

    @with_arguments_of(decode.DecodeRank.announce)
    def announce(self, *args: Any, **options: Any) -> BlockingReceiver:
        """Tell prefill that a room will be received, before pages are allocated; see `kvflow.DecodeRank.announce`.

        Does not block, and neither does `grant` on the result. If prefill gives up the room in the meantime, `outcome`
        shows it.

        Raises:
            ConfigError, TicketError, LocalProtocolError: As in `receive`.
        """
        self._check_open()
        return BlockingReceiver(self, self._opened.announce(*args, **options))
