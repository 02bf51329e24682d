"""The engine's view of a transfer: its outcome and memory state, and ways to wait for each."""

import abc
import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvflow.aio.flag import Flag
from kvflow.aio.shield import run_shielded
from kvflow.errors import (
    CapacityExceeded,
    FailureReason,
    KvflowError,
    LocalProtocolError,
    PagesInUse,
    PlanError,
    RankBroken,
    RankDraining,
    TicketError,
    TransferFailed,
)
from kvflow.observe.trace import TransferLine
from kvflow.room import MAX_ROOM_BYTES, RoomId, as_room
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure

if TYPE_CHECKING:
    from kvflow.rank import Rank

__all__ = ["AT_REST", "NO_CONTEXT", "TraceContext", "Tracer", "Transfer", "check_room", "reason_of"]

MAX_LABEL = 256

AT_REST: Final = (Memory.SAFE, Memory.QUARANTINED)
"""States of the pages of a transfer that is settled: they are safe, or they wait for a proof without a deadline."""


def check_room(room: object) -> RoomId:
    """Convert an integer of any type, or a string, to a room; raise LocalProtocolError if it is no valid one."""
    checked = as_room(room)
    if checked is None:
        detail = f"an integer in 0 ... 2**63 - 1, or a string of 1 to {MAX_ROOM_BYTES} bytes of UTF-8"
        raise LocalProtocolError(f"room must be {detail}", room=room)
    return checked


def check_label(label: object) -> str | None:
    """Return a label; raise LocalProtocolError if it is neither a string of at most 256 characters nor None."""
    if label is None or (isinstance(label, str) and len(label) <= MAX_LABEL):
        return label
    raise LocalProtocolError(f"label must be a string of at most {MAX_LABEL} characters", label=label)


def reason_of(error: KvflowError) -> FailureReason:
    """Return the failure reason of a transfer that could not start."""
    match error:
        case CapacityExceeded():
            return FailureReason.CAPACITY
        case RankDraining():
            return FailureReason.PEER_CLOSED
        case RankBroken():
            return FailureReason.BROKEN
        case PagesInUse():
            return FailureReason.PAGES_IN_USE
        case PlanError():
            return FailureReason.INVALID_PAGES
        case TicketError():
            return FailureReason.REFUSED
        case _:
            return FailureReason.PROTOCOL


def _raise(error: BaseException) -> None:
    raise error


class TraceContext(NamedTuple):
    """W3C trace contexts of a transfer, empty if there are none.

    Attributes:
        own: That of the engine's span for the request.
        ticket: That of the ticket (decode).
        is_malformed: That of the ticket is not one, and is ignored.
    """

    own: str = ""
    ticket: str = ""
    is_malformed: bool = False


NO_CONTEXT: Final = TraceContext()


class Tracer(Protocol):
    """What makes spans of transfers, see `kvflow.otel`. It must not raise."""

    def begin_span(self, transfer: "Transfer") -> None:
        """Begin the span of a transfer, on its event loop."""

    def end_span(self, transfer: "Transfer") -> None:
        """End the span of a transfer whose outcome is decided, or that was refused."""

    def traceparent_of(self, transfer: "Transfer | None") -> str:
        """Return the trace context for a ticket: of the span of its room if it is open. Called in any thread."""


class Transfer(abc.ABC):
    """Base class of senders and receivers.

    Attributes:
        room: The router's ID for the request.
        label: The engine's own ID for it, for log lines.
        trace_context: The trace that it belongs to.
        span: What the rank's tracer keeps for it.
        outcome: Whether it succeeded; set once.
        memory: Whether anything can still touch its pages.
        failure: Why it failed; None until then.
        on_change: Called on the event loop whenever outcome, memory or failure has changed. What it raises is logged
            and goes no further, because other transfers share the rank. Only a KeyboardInterrupt is raised again, by
            the event loop, once this event has been handled.
    """

    __slots__ = (
        "_decided",
        "_has_begun",
        "_is_given_up",
        "_is_refused",
        "_is_told",
        "_opened_at",
        "_quarantined_at",
        "_rank",
        "_safe",
        "_settled",
        "failure",
        "label",
        "memory",
        "on_change",
        "outcome",
        "room",
        "span",
        "trace_context",
    )

    def __init__(
        self,
        rank: "Rank[Any, Any, Any]",
        room: RoomId,
        label: str | None = None,
        trace_context: TraceContext = NO_CONTEXT,
    ) -> None:
        self.room = check_room(room)
        self.label = check_label(label)
        self.trace_context = trace_context
        self.span: object = None
        self.outcome = Outcome.PENDING
        self.memory = Memory.SAFE
        self.failure: Failure | None = None
        self.on_change: Callable[[], None] | None = None
        self._rank = rank
        self._decided = Flag()
        self._settled = Flag()
        self._safe = Flag()
        self._has_begun = False
        self._is_given_up = False
        self._is_refused = False
        self._is_told = False
        self._opened_at = 0.0
        self._quarantined_at = 0.0

    @property
    def is_settled(self) -> bool:
        """True if the outcome is decided and the pages are safe or in quarantine."""
        return self.outcome is not Outcome.PENDING and self.memory in AT_REST

    @property
    def _is_quarantined(self) -> bool:
        """True if its pages are in quarantine: they must not be reused."""
        return self.memory is Memory.QUARANTINED

    @property
    def _quarantined_s(self) -> float:
        """How long its pages have been in quarantine, in seconds; 0 if they are not."""
        return self._rank._now() - self._quarantined_at if self._is_quarantined else 0.0

    async def until_safe(self) -> Memory:
        """Wait until nothing can touch the pages. May also be called after the block has exited.

        Returns:
            `memory`: SAFE, or another value if the rank was closed before there was proof; it will not change any more.

        Raises:
            LocalProtocolError: The transfer was not entered or was refused, or this is the wrong event loop.
        """
        self._check_begun()
        await self._safe.wait()
        return self.memory

    @property
    def _elapsed_s(self) -> float:
        """Seconds since the engine opened it, or granted its pages."""
        return self._rank._now() - self._opened_at

    def _mark_rank_closed(self) -> None:
        """Record that no further proof will arrive."""
        self._safe.set()

    def _begin(self, memory: Memory) -> None:
        """Mark the transfer as started, with its pages HELD, or without; raise LocalProtocolError if it already was."""
        if self._has_begun:
            raise LocalProtocolError("transfer can be entered only once; create a new one", room=self.room)
        self._has_begun = True
        self._opened_at = self._rank._now()
        self.memory = memory

    def _mark_refused(self) -> None:
        """Mark the transfer as refused: nothing will ever touch its pages, and its room belongs to another transfer."""
        self._is_refused = True
        self.memory = Memory.SAFE

    def _report(self, outcome: Outcome, memory: Memory, failure: Failure | None) -> None:
        """Update the state from the core's report."""
        if memory is Memory.QUARANTINED and not self._is_quarantined:
            self._quarantined_at = self._rank._now()
        self.failure, self.memory, self.outcome = failure, memory, outcome  # outcome last: other threads read it first
        if outcome is not Outcome.PENDING:
            self._decided.set()
        if memory in AT_REST:
            self._settled.set()
        if memory is Memory.SAFE:
            self._safe.set()
        self._tell_engine()

    def _tell_engine(self) -> None:
        """Call `on_change`."""
        if self.on_change is None:
            return
        try:
            self.on_change()
        except BaseException as error:  # noqa: BLE001 - raised by the engine's function; other transfers go on
            self._rank._log_callback_failed(self, error)
            if isinstance(error, KeyboardInterrupt):
                asyncio.get_running_loop().call_soon(_raise, error)

    def error(self) -> TransferFailed:
        """Return the exception that describes the failure.

        Raises:
            LocalProtocolError: The transfer has not failed.
        """
        failure = self.failure
        if failure is None:
            raise LocalProtocolError("transfer has not failed", room=self.room, outcome=self.outcome.value)
        return TransferFailed(
            self.room, failure.reason, failure.stage, failure.detected_by, failure.detail, memory=lambda: self.memory
        )

    @abc.abstractmethod
    def _log_line(self) -> TransferLine:
        """Return the log line for the end of the transfer."""

    @abc.abstractmethod
    def _open_room(self) -> None:
        """Start the transfer, as entering the block does. If it is refused, this raises, and nothing has changed."""

    def abort(self, detail: str = "") -> None:
        """Abort the transfer, unless its outcome is already decided. Its pages may not be safe yet; check `memory`.

        Args:
            detail: Why, for log lines and for the failure on the other side (reason `aborted`).

        Raises:
            LocalProtocolError: It is called on another event loop or thread.
        """
        if self._has_begun and not self._is_refused and not self._decided.is_set:
            self._rank._check_loop()
            self._is_given_up = True
            text = f"the {self._rank._role} engine aborted the transfer"
            failure = self._rank._new_failure(FailureReason.ABORTED, f"{text}: {detail}" if detail else text)
            self._report_abort(failure)

    @abc.abstractmethod
    def _report_abort(self, failure: Failure) -> None:
        """Report the abort to the core."""

    async def _wait_until_decided(self) -> None:
        """Wait for the outcome, and raise TransferFailed unless it is a success."""
        self._check_begun()
        await self._decided.wait()
        self._raise_if_failed()

    async def _wait_until_settled(self) -> None:
        """Abort the transfer if it is open, then wait until its pages are safe or in quarantine, even if cancelled."""
        self.abort()
        if not self._settled.is_set:
            await run_shielded(self._settled.wait())

    def _check_begun(self) -> None:
        if self._is_refused:
            raise LocalProtocolError("transfer was refused; create a new one", room=self.room)
        if not self._has_begun:
            raise LocalProtocolError("enter the transfer with `async with` first", room=self.room)
        self._rank._check_loop()

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            self._is_told = True
            raise self.error()

    def _raise_if_untold(self) -> None:
        if not self._is_told and not self._is_given_up:
            self._raise_if_failed()
