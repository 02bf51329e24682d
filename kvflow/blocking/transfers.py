"""One room each, as a scheduler holds it: what may be done and asked in its thread."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from typing_extensions import override

from kvflow import decode, prefill
from kvflow.decode import Handover
from kvflow.errors import (
    CapacityExceeded,
    FailureReason,
    KvflowError,
    LocalProtocolError,
    PagesInUse,
    RankBroken,
    RankDraining,
)
from kvflow.geometry.pages import Pages
from kvflow.geometry.ranges import TokenRange
from kvflow.room import RoomId
from kvflow.stages.enqueue import finish_chunk, make_chunk
from kvflow.state.events import Chunk, LayersReady, ReadyEvent
from kvflow.state.tables import Memory, Outcome
from kvflow.transfer import Transfer
from kvflow.wire.messages import Failure

if TYPE_CHECKING:
    from kvflow.blocking.ranks import BlockingRank, DecodeRank, PrefillRank

__all__ = ["BlockingReceiver", "BlockingSender", "BlockingTransfer", "TransferUpdate", "take_update"]

AnyTransfer = TypeVar("AnyTransfer", bound="BlockingTransfer")


class TransferUpdate(NamedTuple, Generic[AnyTransfer]):
    """How a transfer stands, from `completed`.

    Attributes:
        transfer: What `send` or `receive` gave.
        room: Its room.
        outcome: Whether it succeeded; decided once.
        failure: Why it did not succeed, once that is decided.
        memory: Whether somebody can still touch the pages: they may be used again when it is SAFE. It can change long
            after the outcome was decided; that of a sender may be SAFE before the outcome.
    """

    transfer: AnyTransfer
    room: RoomId
    outcome: Outcome
    failure: Failure | None
    memory: Memory


class BlockingTransfer:
    """One room: what the engine's thread may do and ask.

    Args:
        rank: Where it belongs.
        transfer: Not begun yet; it begins on the event loop.
    """

    __slots__ = ("_error", "_failure", "_is_changed", "_rank", "_told", "_transfer", "room")

    def __init__(self, rank: "BlockingRank[Any, Any]", transfer: Transfer) -> None:
        self.room = transfer.room
        self._is_changed = False
        self._told: object = None
        self._rank = rank
        self._transfer = transfer
        if self._has_pages:
            transfer.memory = Memory.HELD  # until it is refused, if it is
        self._error: KvflowError | None = None
        self._failure: Failure | None = None
        rank._call_soon(self._begin)

    @property
    def outcome(self) -> Outcome:
        """Whether it succeeded; decided once. FAILED if it could not even begin."""
        return Outcome.FAILED if self._error is not None else self._transfer.outcome

    @property
    def failure(self) -> Failure | None:
        """Why it did not succeed, once that is decided."""
        return self._failure or self._transfer.failure

    @property
    def memory(self) -> Memory:
        """Whether somebody can still touch the pages: they may be used again when it is SAFE."""
        return self._transfer.memory

    @property
    def is_settled(self) -> bool:
        """Its outcome is decided, and its pages are safe or in quarantine; those may still become safe."""
        if self.outcome is Outcome.PENDING:
            return False
        return self.memory in (Memory.SAFE, Memory.QUARANTINED)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until `is_settled`, until the rank is closed, or until the time is up. For scripts, not schedulers."""
        changes = self._rank._changes
        changes.wait(lambda: self.is_settled or changes.is_closed, timeout_s)
        return self.outcome

    def until_safe(self, timeout_s: float | None = None) -> Memory:
        """Wait until nobody can touch the pages any more, until the rank is closed, or until the time is up.

        For scripts; a scheduler sees it in `completed`.
        """
        changes = self._rank._changes
        changes.wait(lambda: self.memory is Memory.SAFE or changes.is_closed, timeout_s)
        return self.memory

    def abort(self) -> None:
        """Give the transfer up. Its pages may not be safe yet: `memory` says so. Does nothing after the end."""
        if self.outcome is Outcome.PENDING:
            with suppress(LocalProtocolError):  # closing the rank ends it as well
                self._rank._call_soon(self._transfer.abort)

    def _begin(self) -> None:
        self._transfer.on_change = self._note_change
        try:
            self._transfer.open()
            if self._has_pages:
                self._rank._note_begun(self)
        except KvflowError as error:
            self._transfer.never_begin()
            self._fail(_reason_of(error), error)
            self._note_change()

    def _fail(self, reason: FailureReason, error: KvflowError) -> None:
        self._failure = self._rank._opened.failure(reason, str(error))
        self._error = error

    def _note_change(self) -> None:
        """Have `completed` tell of it; what changes before it has told is told with it."""
        if self.outcome is not Outcome.PENDING and self.memory is Memory.SAFE:  # nothing follows
            self._transfer.on_change = None
        self._rank._warm_ups.skip()
        if self.is_settled:
            self._rank._note_settled(self)
        if self._is_changed:
            self._rank._changes.notify()
        else:
            self._is_changed = True
            self._rank._changes.add(self)

    @property
    def _has_pages(self) -> bool:
        """It may move bytes soon."""
        return True

    @property
    def _progress(self) -> object:
        """What else is worth telling when it changes."""
        return None

    def _check_success(self) -> None:
        if self._transfer.failure is not None:
            raise self._transfer.error() from self._error
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._transfer.outcome is Outcome.PENDING:
            raise LocalProtocolError("transfer has not ended; check `outcome` first", room=self.room)


def take_update(transfer: AnyTransfer) -> TransferUpdate[AnyTransfer] | None:
    """Say how a transfer stands, if it is news."""
    transfer._is_changed = False  # first: what changes from here on is told the next time
    update = TransferUpdate(transfer, transfer.room, transfer.outcome, transfer.failure, transfer.memory)
    news = (update.outcome, update.memory, transfer._progress)
    if news == transfer._told:
        return None
    transfer._told = news
    return update


def _reason_of(error: KvflowError) -> FailureReason:
    """Say with which reason a transfer fails that the rank did not even begin."""
    match error:
        case CapacityExceeded():
            return FailureReason.CAPACITY
        case RankDraining():
            return FailureReason.PEER_CLOSED
        case RankBroken():
            return FailureReason.BROKEN
        case PagesInUse():
            return FailureReason.PAGES_IN_USE
        case _:
            return FailureReason.PROTOCOL


class BlockingSender(BlockingTransfer):
    """One room, as the prefill engine sends it. Made by `PrefillRank.send`."""

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

    def __init__(self, rank: "PrefillRank", sender: prefill.RoomSender) -> None:
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
        """Tokens of each component that decode wants, once every decode rank has granted; see `kvflow.RoomSender`."""
        return self._sender.wanted

    @property
    def is_quiesced(self) -> bool:
        """Nothing reads the pages of any chunk, and none was offered since `quiesce`."""
        return self._is_quiesced

    @property
    def resume_at(self) -> int | None:
        """After `quiesce`, the token at which chunks go on; None if everything is posted, see `kvflow.RoomSender`."""
        return self._sender.resume_at

    @property
    def queued_chunks(self) -> int:
        """Chunks that wait in this object: the rank has as many as it takes (`Limits.queued_chunks`)."""
        return len(self._chunks)

    def chunk(
        self,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        *,
        ready: ReadyEvent | None = None,
        layers: Sequence[LayersReady] = (),
    ) -> None:
        """Send tokens that are computed, or will be when `ready` is, or layer by layer; see `kvflow.RoomSender.chunk`.

        Raises:
            PlanError: A page table does not fit the pool or the tokens, or layers are out of order. Nothing was sent;
                the room stays open.
            LocalProtocolError: After `finish`, after the end, or while the sender is being quiesced.
            TransferFailed: The transfer has failed; there is no need to compute the rest.
        """
        self._check_unfinished()
        self._put(make_chunk(self._sender.layout, tokens, pages, ready=ready, layers=layers))

    def finish(
        self,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        *,
        metadata: bytes = b"",
        ready: ReadyEvent | None = None,
        layers: Sequence[LayersReady] = (),
    ) -> None:
        """Send the last tokens and the metadata; see `kvflow.RoomSender.finish`.

        Raises:
            As in `chunk`; and PlanError if the metadata is too long.
        """
        self._check_unfinished()
        chunk = make_chunk(self._sender.layout, tokens, pages, ready=ready, layers=layers)
        self._put(finish_chunk(chunk, metadata, self._sender.max_metadata_bytes))
        self._is_finished = True

    def quiesce(self) -> None:
        """Take the source pages back, and keep the room; see `kvflow.RoomSender.quiesce`. Does not wait.

        `is_quiesced` and `completed` show that the pages may be overwritten. Chunks are refused until then, and go on
        at `resume_at`. If the pages do not get quiet, the transfer fails.

        Raises:
            LocalProtocolError: The rank is not open.
            As `result`, if the transfer has failed.
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

    def result(self) -> None:
        """Return if every decode rank has everything.

        Raises:
            LocalProtocolError: The transfer has not ended yet, or its room was in use.
            CapacityExceeded, RankDraining, RankBroken: It could not begin.
            TransferFailed: It failed or was aborted. If it was aborted because its chunks did not follow on each other,
                `__cause__` is a LocalProtocolError with both.
        """
        self._check_success()

    def _check_unfinished(self) -> None:
        if self.outcome in (Outcome.FAILED, Outcome.ABORTED):
            self._check_success()
        if self._is_quiescing:
            raise LocalProtocolError("room is being quiesced", room=self.room)
        if self._is_finished or self.outcome is not Outcome.PENDING:
            raise LocalProtocolError("cannot send chunks after `finish`", room=self.room)

    def _put(self, chunk: Chunk) -> None:
        self._is_quiesced = False
        self._chunks.append(chunk)
        self._rank._call_soon(self._feed)

    def _feed(self) -> None:
        """Pass chunks on in order, and leave it to a task if one has to wait; the first refused one ends the room."""
        if self._is_feeding:
            return
        try:
            while self._has_chunks():
                if not self._sender.offer_nowait(self._chunks[0]):
                    self._is_feeding = True
                    self._rank._opened.start_task(self._feed_waiting)
                    return
                self._chunks.popleft()
        except KvflowError as error:
            self._give_up(error)

    async def _feed_waiting(self) -> None:
        try:
            while self._has_chunks():
                await self._sender.offer(self._chunks.popleft())
        except KvflowError as error:
            self._give_up(error)
        finally:
            self._is_feeding = False

    def _has_chunks(self) -> bool:
        if self.outcome is not Outcome.PENDING:  # nobody wants them any more
            self._chunks.clear()
        return bool(self._chunks)

    def _give_up(self, error: KvflowError) -> None:
        if self.outcome is Outcome.PENDING:  # else it has failed meanwhile, which is said elsewhere
            self._fail(FailureReason.ABORTED, error)
            self._sender.abort()
        self._chunks.clear()

    def _quiesce(self) -> None:
        """Forget what waits here, and pass it on; what has failed is told elsewhere."""
        self._chunks.clear()
        self._awaits_quiet = True
        try:
            self._sender.quiesce_nowait()
        except KvflowError as error:
            self._awaits_quiet = False
            self._give_up(error)
        if self._awaits_quiet and self._sender.is_quiesced:  # after a success, of which nothing more is told
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
    """One room, as the decode engine receives it. Made by `DecodeRank.receive` or `DecodeRank.announce`."""

    __slots__ = ("_is_granted", "_queued", "_receiver")

    def __init__(self, rank: "DecodeRank", receiver: decode.RoomReceiver) -> None:
        self._receiver = receiver
        self._is_granted = not receiver.is_announced
        self._queued: decode.Wanted | None = None
        super().__init__(rank, receiver)

    @property
    def is_announced(self) -> bool:
        """It has no pages yet."""
        return not self._is_granted

    @property
    @override
    def memory(self) -> Memory:
        """Whether somebody can still touch the pages. Before `grant` there are none, and it is SAFE."""
        if self._queued is not None and self.outcome is Outcome.PENDING:
            return Memory.HELD
        return super().memory

    def grant(
        self,
        *,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        digest: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Give pages to a room that was announced; see `kvflow.RoomReceiver.grant`. Does not wait.

        Pages that another transfer may still be written to, or a quarantine that is full, fail the transfer:
        `outcome` and `memory` show it soon.

        Raises:
            PlanError, ConfigError: As in `receive`; nothing has changed.
            LocalProtocolError: It has pages already, or the rank is not open.
            As `result`, if the transfer has failed.
        """
        if self.outcome is not Outcome.PENDING:
            self._check_success()
        if self._is_granted:
            raise LocalProtocolError("transfer already has pages", room=self.room)
        self._rank._check_open()
        self._queued = self._receiver.check_grant(tokens, pages, digest, timeout_s)
        self._is_granted = True
        try:
            self._rank._call_soon(self._grant)
        except LocalProtocolError:
            self._queued, self._is_granted = None, False
            raise

    def _grant(self) -> None:
        """Give the pages on the event loop; what has failed meanwhile is told elsewhere."""
        wanted = self._queued
        try:
            if wanted is not None and self.outcome is Outcome.PENDING:
                self._receiver.take_pages(wanted)
                self._rank._note_begun(self)
        except KvflowError as error:
            self._fail(_reason_of(error), error)
            self._receiver.abort()
        self._queued = None  # only now: until the rank has them, `memory` must say so

    @property
    @override
    def _has_pages(self) -> bool:
        return not self._receiver.is_announced

    def result(self) -> Handover:
        """Give what the transfer brought.

        Raises:
            LocalProtocolError: The transfer has not ended yet, or its room was in use.
            CapacityExceeded, RankDraining, RankBroken: It could not begin.
            TransferFailed: It failed or was aborted.
        """
        self._check_success()
        if self._receiver.handover is None:
            raise LocalProtocolError("transfer has no result", room=self.room)
        return self._receiver.handover
