"""The same two ranks for engines with a synchronous scheduler loop.

The event loop runs in a thread. What a scheduler calls for a request or in a step never waits for that thread: calls
check their arguments, queue what is to be done, and return; `completed` says in each step what has changed meanwhile.
What does wait says so.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from threading import Lock
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from typing_extensions import override

from kvflow import decode, directory, prefill
from kvflow.aio.changes import Changes
from kvflow.aio.doorbell import Doorbell
from kvflow.aio.loop_thread import LoopThread
from kvflow.aio.rehearsals import Rehearsals
from kvflow.aio.switching import SWITCHING
from kvflow.backends.base import Backend
from kvflow.backends.shared import SharedBackend
from kvflow.config import DecodeConfig, PrefillConfig
from kvflow.decode import Handover, Prefill
from kvflow.errors import (
    CapacityExceeded,
    ConfigError,
    FailureReason,
    KvflowError,
    LocalProtocolError,
    PagesInUse,
    RankBroken,
    RankDraining,
)
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import Pages
from kvflow.geometry.ranges import TokenRange
from kvflow.ports import Ports
from kvflow.quarantine import QuarantineRecord
from kvflow.room import RoomId
from kvflow.stages.enqueue import finish_chunk, make_chunk
from kvflow.state.events import Chunk, LayersReady, ReadyEvent
from kvflow.state.tables import Memory, Outcome
from kvflow.statistics import RankStatistics
from kvflow.transfer import Transfer
from kvflow.wire.messages import Failure

__all__ = [
    "BlockingReceiver",
    "BlockingSender",
    "DecodeRank",
    "LoopThread",
    "Memory",
    "Outcome",
    "PrefillRank",
    "Registry",
    "TransferUpdate",
]

Result = TypeVar("Result")
AnyRank = TypeVar("AnyRank", prefill.PrefillRank, decode.DecodeRank)
AnyTransfer = TypeVar("AnyTransfer", bound="_BlockingTransfer")


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


class _BlockingTransfer:
    """One room: what the engine's thread may do and ask.

    Args:
        rank: Where it belongs.
        transfer: Not begun yet; it begins on the event loop.
    """

    __slots__ = ("_error", "_failure", "_is_changed", "_rank", "_told", "_transfer", "room")

    def __init__(self, rank: "_BlockingRank[Any, Any]", transfer: Transfer) -> None:
        self.room = transfer.room
        self._is_changed = False
        self._told: object = None
        self._rank = rank
        self._transfer = transfer
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
        """Its outcome is decided, and its pages are quiet or in quarantine: nothing is left to wait for."""
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
        self._rank._rehearsals.skip()
        if self.is_settled:
            self._rank._note_settled(self)
        if self._is_changed:
            self._rank._changes.notify()
        else:
            self._is_changed = True
            self._rank._changes.add(self)

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
            raise LocalProtocolError("transfer has not ended; look at its outcome first", room=self.room)


def _take_update(transfer: AnyTransfer) -> TransferUpdate[AnyTransfer] | None:
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


class BlockingSender(_BlockingTransfer):
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
            raise LocalProtocolError("no chunk follows `finish`", room=self.room)

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


class BlockingReceiver(_BlockingTransfer):
    """One room, as the decode engine receives it. Made by `DecodeRank.receive`."""

    __slots__ = ("_receiver",)

    def __init__(self, rank: "DecodeRank", receiver: decode.RoomReceiver) -> None:
        self._receiver = receiver
        super().__init__(rank, receiver)

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


class _BlockingRank(Generic[AnyRank, AnyTransfer]):
    """A rank on the event loop of a thread. Use it as a context manager, or call `open` and `close`.

    Args:
        make_rank: Makes the rank; called on the event loop.
        loop: The thread to run on; one of its own by default.
        affinity: CPUs of its own thread, see `LoopThread`.
    """

    def __init__(
        self, make_rank: Callable[[], AnyRank], loop: LoopThread | None, affinity: Collection[int] | None
    ) -> None:
        if loop is not None and affinity is not None:
            raise ConfigError("affinity is that of the loop; give it to LoopThread", affinity=affinity)
        self._changes: Changes[AnyTransfer] = Changes()
        self._unsettled: set[_BlockingTransfer] = set()
        self._rehearsals: Rehearsals[_BlockingTransfer]
        self._switch_interval_s: float | None = None
        self._make_rank: Callable[[], AnyRank] = make_rank
        self._loop = loop
        self._affinity = affinity
        self._rank: AnyRank | None = None
        self._was_opened = False
        self._is_open = False
        self._stack = ExitStack()
        self._closing = Lock()

    def open(self) -> Self:
        """Open the rank, as entering the context does.

        Raises:
            LocalProtocolError: It was opened before.
            As the constructor and the entry of the rank for event loops.
        """
        if self._was_opened:
            raise LocalProtocolError("a rank can be opened only once; make another one")
        self._was_opened = True
        with ExitStack() as stack:
            stack.callback(self._changes.close)
            stack.callback(self._forget_unsettled)
            loop = self._loop or stack.enter_context(LoopThread(self._affinity))
            self._switch_interval_s = loop.switch_interval_s
            self._rehearsals = Rehearsals(self._rehearse, loop.rehearsal_interval_s)
            self._portal = stack.enter_context(loop.use())
            rank = self._portal.call(self._make_rank)
            stack.enter_context(self._portal.wrap_async_context_manager(rank))
            self._rank = rank
            self._doorbell = self._portal.call(Doorbell)
            stack.callback(self._portal.call, self._doorbell.close)
            stack.callback(self._portal.call, self._rehearsals.close)
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    def close(self) -> None:
        """End every transfer that is open, and close the rank, as leaving the context does. Waits for that.

        May be called twice, and from several threads.
        """
        self._is_open = False
        with self._closing:
            self._stack.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def completed(self) -> list[TransferUpdate[AnyTransfer]]:
        """Tell of each transfer whose outcome or memory has changed since the last call. Call it in every step.

        A sender is told of also when every decode rank has granted (`wanted`), and when it `is_quiesced`. Changes that
        come together are told together. What nobody has asked for is kept. Works after closing, too.
        """
        updates = (_take_update(transfer) for transfer in self._changes.take())
        return [update for update in updates if update is not None]

    def wait_any(self, timeout_s: float | None = None) -> list[TransferUpdate[AnyTransfer]]:
        """Wait until `completed` has something to tell, or until the time is up, and give it. For idle engines.

        A rank that is closed meanwhile ends the wait.

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
        """Give a descriptor that is readable while `completed` has something to tell, for engines that select.

        The rank closes it, which does not end a `select`. It may be readable once although there is nothing to tell.

        Raises:
            LocalProtocolError: The rank is closed.
        """
        try:
            return self._changes.fileno()
        except ValueError as error:
            raise LocalProtocolError("rank is not open") from error

    def statistics(self) -> RankStatistics:
        """Give counts at this moment. Waits for the event loop.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        return self._call(self._opened.statistics)

    def quarantined(self) -> list[QuarantineRecord]:
        """List ended transfers whose pages are not proved quiet; see `kvflow.DecodeRank.quarantined`. Waits for it.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        return self._call(self._opened.quarantined)

    def release(self, which: RoomId | QuarantineRecord) -> None:
        """Take pages in quarantine back without a proof; see `kvflow.DecodeRank.release`. Waits for it.

        Args:
            which: A room, or one of `quarantined()`.

        Raises:
            LocalProtocolError: It is not in quarantine, or the rank is not open.
        """
        self._call(lambda: self._opened.release(which))

    def start_drain(self) -> None:
        """Take nothing new, and let what is open end; see `kvflow.DecodeRank.start_drain`.

        Waits for the event loop, not for transfers: a scheduler goes on with its steps, chunks of open rooms included,
        until `is_drained`.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self._call(self._opened.start_drain)

    @property
    def is_drained(self) -> bool:
        """Draining has begun, and every transfer has its outcome, with its pages safe or in quarantine.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        self._check_open()
        return self._opened.is_drained

    def drain(self, timeout_s: float | None = None) -> bool:
        """Start to drain, and wait until all is done. For scripts: chunks must come from another thread meanwhile.

        Args:
            timeout_s: How long to wait; without limit by default.

        Returns:
            What `is_drained` says.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self.start_drain()
        return self._portal.call(self._opened.drain, timeout_s)

    @property
    def _opened(self) -> AnyRank:
        """The rank, which stays after closing.

        Raises:
            LocalProtocolError: The rank was not opened.
        """
        if self._rank is None:
            raise LocalProtocolError("rank is not open")
        return self._rank

    def _note_begun(self, transfer: _BlockingTransfer) -> None:
        """Have the interpreter switch threads soon while some transfer is open, and rehearse it."""
        self._rehearsals.add(transfer)
        if not self._unsettled and self._switch_interval_s is not None:
            SWITCHING.shorten(self._switch_interval_s)
        self._unsettled.add(transfer)

    def _note_settled(self, transfer: _BlockingTransfer) -> None:
        if transfer in self._unsettled:
            self._rehearsals.remove(transfer)
            self._unsettled.remove(transfer)
            if not self._unsettled and self._switch_interval_s is not None:
                SWITCHING.restore(self._switch_interval_s)

    def _rehearse(self, transfer: _BlockingTransfer) -> bool:
        try:
            return self._opened.rehearse(transfer.room)
        except KvflowError:  # the rank is broken or closed
            return False

    def _forget_unsettled(self) -> None:
        for transfer in list(self._unsettled):
            self._note_settled(transfer)

    def _check_open(self) -> None:
        if not self._is_open:
            raise LocalProtocolError("rank is not open")

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Have something done on the event loop, after all that was asked for before.

        Raises:
            LocalProtocolError: The rank is closed, or its event loop has ended.
        """
        self._check_open()
        try:
            self._doorbell.call_soon(call)
        except RuntimeError as error:
            raise LocalProtocolError("rank is not open") from error

    def _call(self, function: Callable[[], Result]) -> Result:
        """Call something on the event loop, in its turn, and wait for the result.

        Raises:
            LocalProtocolError: The rank is not open.
            BaseException: What the function raises.
        """
        result: Future[Result] = Future()

        def call() -> None:
            try:
                result.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where it was called
                result.set_exception(error)

        self._call_soon(call)
        return result.result()


class PrefillRank(_BlockingRank[prefill.PrefillRank, BlockingSender]):
    """`kvflow.PrefillRank` for a scheduler loop. Use it as a context manager; the arguments are the same.

    Args:
        config: Settings.
        layout: The pools to send from; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name. Ranks that share one (a `SharedBackend`)
            have one `loop`, too.
        loop: The thread to run on; one of its own by default.
        affinity: CPUs of its own thread, see `LoopThread`.
        ports: The world to use instead of the real one.
    """

    def __init__(
        self,
        config: PrefillConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        loop: LoopThread | None = None,
        affinity: Collection[int] | None = None,
        ports: Ports | None = None,
    ) -> None:
        super().__init__(lambda: prefill.PrefillRank(config, layout, backend, ports=ports), loop, affinity)

    @property
    def endpoint(self) -> str:
        """Address of the control socket, once the rank is open.

        Raises:
            LocalProtocolError: It was not opened.
        """
        return self._opened.endpoint

    def send(self, room: RoomId, *, label: str | None = None) -> BlockingSender:
        """Start to send a room; see `kvflow.PrefillRank.send`.

        Does not wait: a room that is in use, or a rank that drains, shows in `outcome` soon. Chunks are queued without
        bound here: a scheduler that must not run ahead looks at `queued_chunks` of the sender.

        Raises:
            LocalProtocolError: The room or the label is none, or the rank is not open.
        """
        self._check_open()
        return BlockingSender(self, self._opened.send(room, label=label))

    def ticket(self, room: RoomId) -> dict[str, object]:
        """Give what a decode rank needs to receive a room from this instance; see `kvflow.PrefillRank.ticket`.

        Raises:
            LocalProtocolError: The room or the label is none, or the rank is not open.
            RankBroken: The rank is broken.
        """
        self._check_open()
        return self._opened.ticket(room)


class DecodeRank(_BlockingRank[decode.DecodeRank, BlockingReceiver]):
    """`kvflow.DecodeRank` for a scheduler loop. Use it as a context manager; the arguments are the same.

    Args:
        config: Settings.
        layout: The pools to receive into; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name. Ranks that share one (a `SharedBackend`)
            have one `loop`, too.
        loop: The thread to run on; one of its own by default.
        affinity: CPUs of its own thread, see `LoopThread`.
        ports: The world to use instead of the real one.
    """

    def __init__(
        self,
        config: DecodeConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        loop: LoopThread | None = None,
        affinity: Collection[int] | None = None,
        ports: Ports | None = None,
    ) -> None:
        super().__init__(lambda: decode.DecodeRank(config, layout, backend, ports=ports), loop, affinity)

    def receive(  # noqa: PLR0913 - each one is a choice of the engine, by name
        self,
        room: RoomId | None = None,
        *,
        prefill: Prefill,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        digest: bool | None = None,
        priority: int = 0,
        label: str | None = None,
    ) -> BlockingReceiver:
        """Start to receive a room; see `kvflow.DecodeRank.receive`.

        Does not wait: a room that is in use, or a rank that drains, shows in `outcome` soon.

        Raises:
            PlanError: A page table does not fit the pool or the tokens, or digests are wanted of device memory.
            ConfigError: `num_ranks`, `timeout_s` or `priority` is out of range, or `prefill` is a name and the settings
                have no registry.
            TicketError: The ticket is malformed, or it is for another room, model or protocol version.
        """
        self._check_open()
        receiver = self._opened.receive(
            room,
            prefill=prefill,
            tokens=tokens,
            pages=pages,
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            digest=digest,
            priority=priority,
            label=label,
        )
        return BlockingReceiver(self, receiver)


class Registry:
    """`kvflow.Registry` in a thread, for programs without an event loop. Use it as a context manager.

    Args:
        bind: "tcp://host:port"; port 0 takes a free one.
        advertise: Host to give to others, if not the one bound; needed if `bind` is a wildcard.
        loop: The thread to run on; one of its own by default.

    Attributes:
        endpoint: Address for the `registry` setting of ranks.

    Raises:
        ConfigError: The address is malformed, or others could not use it; on entry: it cannot be bound.
        LocalProtocolError: On entry: it is open.
    """

    endpoint: str

    def __init__(
        self, bind: str = "tcp://127.0.0.1:0", advertise: str | None = None, *, loop: LoopThread | None = None
    ) -> None:
        self._registry = directory.Registry(bind, advertise)
        self._loop = loop
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            loop = self._loop or stack.enter_context(LoopThread())
            portal = stack.enter_context(loop.use())
            stack.enter_context(portal.wrap_async_context_manager(self._registry))
            self.endpoint = self._registry.endpoint
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
