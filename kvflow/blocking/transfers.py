"""Senders and receivers for a scheduler thread."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from typing_extensions import override

from kvflow.blocking.calls import with_arguments_of
from kvflow.errors import FailureReason, KvflowError, LocalProtocolError
from kvflow.geometry.ranges import TokenRange
from kvflow.receive_checks import Wanted
from kvflow.receiver import Handover, RoomReceiver
from kvflow.room import RoomId
from kvflow.sender import RoomSender
from kvflow.stages.enqueue import finish_chunk, make_chunk
from kvflow.state.events import Chunk
from kvflow.state.tables import Memory, Outcome
from kvflow.transfer import Transfer, reason_of
from kvflow.wire.messages import Failure

if TYPE_CHECKING:
    from kvflow.blocking.ranks import BlockingRank, DecodeRank, PrefillRank

__all__ = ["BlockingReceiver", "BlockingSender", "BlockingTransfer", "TransferUpdate", "take_update"]

AnyTransfer = TypeVar("AnyTransfer", bound="BlockingTransfer")


class TransferUpdate(NamedTuple, Generic[AnyTransfer]):
    """The state of a transfer, as reported by `completed`.

    Attributes:
        transfer: The sender or receiver, as returned by `send`, `receive` or `announce`.
        room: Its room.
        outcome: Whether it succeeded; set once.
        failure: Why it failed; None until then.
        memory: Whether anything can still touch the pages; they may be reused when it is SAFE. It can change long after
            the outcome; for a sender it may become SAFE before the outcome is decided.
    """

    transfer: AnyTransfer
    room: RoomId
    outcome: Outcome
    failure: Failure | None
    memory: Memory


class BlockingTransfer:
    """Base class of blocking senders and receivers, used in the engine's thread.

    Args:
        rank: The rank it belongs to.
        transfer: The async transfer, not started yet. It is started on the event loop.

    Attributes:
        room: The room.
    """

    __slots__ = ("_error", "_failure", "_is_changed", "_rank", "_told", "_transfer", "room")

    def __init__(self, rank: "BlockingRank[Any, Any, Any]", transfer: Transfer) -> None:
        self.room = transfer.room
        self._is_changed = False
        self._told: object = None
        self._rank = rank
        self._transfer = transfer
        if self._has_pages:
            transfer.memory = Memory.HELD  # SAFE again if the transfer is refused
        self._error: KvflowError | None = None
        self._failure: Failure | None = None
        rank._call_soon(self._begin)

    @property
    def outcome(self) -> Outcome:
        """Whether it succeeded; set once. FAILED if it could not start."""
        return Outcome.FAILED if self._error is not None else self._transfer.outcome

    @property
    def failure(self) -> Failure | None:
        """Why it failed; None until then."""
        return self._failure or self._transfer.failure

    @property
    def memory(self) -> Memory:
        """Whether anything can still touch the pages; they may be reused when it is SAFE."""
        return self._transfer.memory

    @property
    def is_settled(self) -> bool:
        """True if the outcome is decided and the pages are safe or in quarantine (which they may still leave)."""
        if self.outcome is Outcome.PENDING:
            return False
        return self.memory in (Memory.SAFE, Memory.QUARANTINED)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Block until `is_settled`, the rank is closed or the timeout expires. For scripts, not schedulers."""
        changes = self._rank._changes
        changes.wait(lambda: self.is_settled or changes.is_closed, timeout_s)
        return self.outcome

    def until_safe(self, timeout_s: float | None = None) -> Memory:
        """Block until nothing can touch the pages, the rank is closed or the timeout expires.

        For scripts; schedulers use `completed`.
        """
        changes = self._rank._changes
        changes.wait(lambda: self.memory is Memory.SAFE or changes.is_closed, timeout_s)
        return self.memory

    def abort(self, detail: str = "") -> None:
        """Abort the transfer. Its pages may not be safe yet; check `memory`. Does nothing if it has already ended.

        Args:
            detail: Why, for log lines and for the failure on the other side (reason `aborted`).
        """
        self._tell(partial(self._transfer.abort, detail))

    def _tell(self, call: Callable[[], None]) -> None:
        """Make a call on the event loop, unless the transfer has an outcome."""

        def tell() -> None:
            with suppress(LocalProtocolError):  # it was refused, and has failed
                call()

        if self.outcome is Outcome.PENDING:
            with suppress(LocalProtocolError):  # closing the rank also ends the transfer
                self._rank._call_soon(tell)

    def _begin(self) -> None:
        self._transfer.on_change = self._note_change
        try:
            self._transfer._open_room()
            if self._has_pages:
                self._rank._note_begun(self)
        except KvflowError as error:
            self._transfer._mark_refused()
            self._fail(reason_of(error), error)
            self._note_change()

    def _fail(self, reason: FailureReason, error: KvflowError) -> None:
        self._failure = self._rank._opened._new_failure(reason, str(error))
        self._error = error

    def _note_change(self) -> None:
        """Make `completed` report this transfer. Changes before it does are combined into one update."""
        if self.outcome is not Outcome.PENDING and self.memory is Memory.SAFE:  # the final state
            self._transfer.on_change = None
        if self.is_settled:
            self._rank._note_settled(self)
        if self._is_changed:
            self._rank._changes.notify()
        else:
            self._is_changed = True
            self._rank._changes.add(self)

    @property
    def _has_pages(self) -> bool:
        """True if it may move bytes soon."""
        return True

    @property
    def _progress(self) -> object:
        """Further state whose changes `completed` reports."""
        return None

    def _check_success(self) -> None:
        if self._transfer.failure is not None:
            raise self._transfer.error() from self._error
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._transfer.outcome is Outcome.PENDING:
            raise LocalProtocolError("transfer has not ended; check `outcome` first", room=self.room)


def take_update(transfer: AnyTransfer) -> TransferUpdate[AnyTransfer] | None:
    """Return the transfer's state if it has changed since the last report."""
    transfer._is_changed = False  # first, so that later changes are reported next time
    update = TransferUpdate(transfer, transfer.room, transfer.outcome, transfer.failure, transfer.memory)
    news = (update.outcome, update.memory, transfer._progress)
    if news == transfer._told:
        return None
    transfer._told = news
    return update


class BlockingSender(BlockingTransfer):
    """The sending side of one room. Returned by `PrefillRank.send`."""

    __slots__ = (
        "_awaits_quiet",
        "_chunks",
        "_is_feeding",
        "_is_finished",
        "_is_quiesced",
        "_is_quiescing",
        "_num_quiesced",
        "_sender",
    )

    def __init__(self, rank: "PrefillRank", sender: RoomSender) -> None:
        self._sender = sender
        self._chunks: deque[Chunk] = deque()
        self._is_feeding = False
        self._is_finished = False
        self._is_quiescing = False
        self._awaits_quiet = False
        self._is_quiesced = False
        self._num_quiesced = 0
        super().__init__(rank, sender)

    @property
    def wanted(self) -> Mapping[str, TokenRange] | None:
        """Tokens of each component that decode wants, once all decode ranks have granted; see `kvflow.RoomSender`."""
        return self._sender.wanted

    @property
    def is_quiesced(self) -> bool:
        """True if nothing reads the pages of any chunk, and no chunk was offered since `quiesce`."""
        return self._is_quiesced

    @property
    def resume_at(self) -> int | None:
        """After `quiesce`, the token at which to continue; None if everything was posted. See `kvflow.RoomSender`."""
        return self._sender.resume_at

    @property
    def queued_chunks(self) -> int:
        """Number of chunks queued in this object, because the rank's own queue is full."""
        return len(self._chunks)

    @with_arguments_of(RoomSender.chunk)
    def chunk(self, *args: Any, **options: Any) -> None:
        """Send tokens, computed already or becoming ready with `ready` or `layers`; see `kvflow.RoomSender.chunk`.

        Raises:
            PlanError: As there.
            LocalProtocolError: Called after `finish`, after the transfer has ended, or while `quiesce` is in progress.
            TransferFailed: The transfer has failed; you need not compute the rest.
        """
        self._check_unfinished()
        self._put_chunk(make_chunk(self._sender._layout, *args, **options))

    @with_arguments_of(RoomSender.finish)
    def finish(self, *args: Any, metadata: bytes = b"", **options: Any) -> None:
        """Send the last tokens and the metadata; see `kvflow.RoomSender.finish`.

        Raises:
            As in `chunk`; and PlanError if the metadata is too long.
        """
        self._check_unfinished()
        chunk = make_chunk(self._sender._layout, *args, **options)
        self._put_chunk(finish_chunk(chunk, metadata, self._sender._max_metadata_bytes))
        self._is_finished = True

    def quiesce(self) -> None:
        """Get the source pages back but keep the room open; see `kvflow.RoomSender.quiesce`. Does not block.

        `is_quiesced` and `completed` show when the pages may be overwritten. Chunks are refused until then; continue at
        `resume_at`. If the pages stay in use too long, the transfer fails.

        Raises:
            LocalProtocolError: The rank is not open.
            If the transfer has failed, the same errors as `result`.
        """
        if self.outcome in (Outcome.FAILED, Outcome.ABORTED):
            self._check_success()
        if self._is_quiescing:
            return
        self._is_quiescing, self._is_quiesced = True, False
        try:
            self._rank._call_soon(self._quiesce)
        except LocalProtocolError:
            self._is_quiescing = False
            raise

    def start_lease(self) -> None:
        """Start `Timeouts.grant_s`: the ticket has left; see `kvflow.RoomSender.start_lease`. Does not block."""
        self._tell(self._sender.start_lease)

    def reclaim(self, *, with_announced: bool = False) -> None:
        """Fail the transfer unless decode needs its pages; see `kvflow.RoomSender.reclaim`. Does not block."""
        self._tell(partial(self._sender.reclaim, with_announced=with_announced))

    def result(self) -> None:
        """Return if every decode rank has received everything; raise otherwise.

        Raises:
            LocalProtocolError: The transfer has not ended yet, or its room was in use.
            CapacityExceeded, RankDraining, RankBroken: It could not start.
            TransferFailed: It failed or was aborted. If it was aborted because its chunks were not contiguous,
                `__cause__` is a LocalProtocolError that names both chunks.
        """
        self._check_success()

    def _check_unfinished(self) -> None:
        if self.outcome in (Outcome.FAILED, Outcome.ABORTED):
            self._check_success()
        if self._is_quiescing:
            raise LocalProtocolError("room is being quiesced", room=self.room)
        if self._is_finished or self.outcome is not Outcome.PENDING:
            raise LocalProtocolError("cannot send chunks after `finish`", room=self.room)

    def _put_chunk(self, chunk: Chunk) -> None:
        self._is_quiesced = False
        self._chunks.append(chunk)
        self._rank._call_soon(self._feed)

    def _feed(self) -> None:
        """Pass queued chunks on in order; start a task if one has to wait. If one is refused, abort the transfer."""
        if self._is_feeding:
            return
        try:
            while self._has_chunks():
                if not self._sender._offer_nowait(self._chunks[0]):
                    self._is_feeding = True
                    self._rank._opened._start_task(self._feed_waiting)
                    return
                self._chunks.popleft()
        except KvflowError as error:
            self._give_up(error)

    async def _feed_waiting(self) -> None:
        try:
            while self._has_chunks():
                await self._sender._offer_chunk(self._chunks.popleft())
        except KvflowError as error:
            self._give_up(error)
        finally:
            self._is_feeding = False

    def _has_chunks(self) -> bool:
        if self.outcome is not Outcome.PENDING:  # the transfer has ended
            self._chunks.clear()
        return bool(self._chunks)

    def _give_up(self, error: KvflowError) -> None:
        if self.outcome is Outcome.PENDING:  # else the transfer has already failed and reported why
            self._fail(FailureReason.ABORTED, error)
            self._sender.abort(str(error))
        self._chunks.clear()

    def _quiesce(self) -> None:
        """Drop the chunks queued here, and quiesce the sender. Failures are reported through `completed`."""
        self._chunks.clear()
        self._awaits_quiet = True
        try:
            self._sender._quiesce_nowait()
        except KvflowError as error:
            self._awaits_quiet = False
            self._give_up(error)
        if self._awaits_quiet and self._sender.is_quiesced:  # the sender reports no change after a success
            self._note_change()

    @override
    def _note_change(self) -> None:
        if self._awaits_quiet and self._sender.is_quiesced:
            self._awaits_quiet = False
            self._num_quiesced += 1
            self._is_finished = self._sender.resume_at is None
            self._is_quiesced, self._is_quiescing = True, False
        super()._note_change()

    @property
    @override
    def _progress(self) -> tuple[bool, int]:
        return self.wanted is not None, self._num_quiesced


class BlockingReceiver(BlockingTransfer):
    """The receiving side of one room. Returned by `DecodeRank.receive` and `DecodeRank.announce`."""

    __slots__ = ("_is_granted", "_queued", "_receiver")

    def __init__(self, rank: "DecodeRank", receiver: RoomReceiver) -> None:
        self._receiver = receiver
        self._is_granted = not receiver.is_announced
        self._queued: Wanted | None = None
        super().__init__(rank, receiver)

    @property
    def is_announced(self) -> bool:
        """True while the room is only announced and has no pages."""
        return not self._is_granted

    @property
    @override
    def memory(self) -> Memory:
        """Whether anything can still touch the pages. SAFE before `grant`, because there are no pages yet."""
        if self._queued is not None and self.outcome is Outcome.PENDING:
            return Memory.HELD
        return super().memory

    @with_arguments_of(RoomReceiver.grant)
    def grant(self, **options: Any) -> None:
        """Provide the pages of an announced room; see `kvflow.RoomReceiver.grant`. Does not block.

        If another transfer may still write to one of the pages, or the quarantine is full, the transfer fails;
        `outcome` and `memory` show it soon.

        Raises:
            PlanError, ConfigError: As in `receive`; nothing has changed.
            LocalProtocolError: It already has pages, or the rank is not open.
            If the transfer has failed, the same errors as `result`.
        """
        if self.outcome is not Outcome.PENDING:
            self._check_success()
        if self._is_granted:
            raise LocalProtocolError("transfer already has pages", room=self.room)
        self._rank._check_open()
        self._queued = self._receiver._check_grant(**options)
        self._is_granted = True
        try:
            self._rank._call_soon(self._grant)
        except LocalProtocolError:
            self._queued, self._is_granted = None, False
            raise

    def _grant(self) -> None:
        """Grant the pages on the event loop, unless the transfer has already failed."""
        wanted = self._queued
        try:
            if wanted is not None and self.outcome is Outcome.PENDING:
                self._receiver._take_pages(wanted)
                self._rank._note_begun(self)
        except KvflowError as error:
            self._fail(reason_of(error), error)
            self._receiver.abort(str(error))
        self._queued = None  # last, so that `memory` stays HELD until the rank has the pages

    @property
    @override
    def _has_pages(self) -> bool:
        return not self._receiver.is_announced

    def result(self) -> Handover:
        """Return the result of the transfer.

        Raises:
            LocalProtocolError: The transfer has not ended yet, or its room was in use.
            CapacityExceeded, RankDraining, RankBroken: It could not start.
            TransferFailed: It failed or was aborted.
        """
        self._check_success()
        return self._receiver._take_handover()
