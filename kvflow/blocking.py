"""The same two ranks for engines with a synchronous scheduler loop.

The event loop runs in a thread of its own. Nothing here waits for a transfer: a scheduler starts one, goes on with its
steps, and looks at `outcome`, `failure` and `memory` in between, which are true at once. Only opening and closing a
rank wait, and what says so.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Self, TypeVar

from kvflow import decode, prefill
from kvflow.aio.calls import Calls
from kvflow.aio.loop_thread import LoopThread
from kvflow.backends.base import Backend
from kvflow.config import DecodeConfig, PrefillConfig
from kvflow.decode import Handover
from kvflow.errors import (
    CapacityExceeded,
    FailureReason,
    KvflowError,
    LocalProtocolError,
    RankBroken,
    RankDraining,
)
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import Pages
from kvflow.geometry.ranges import TokenRange
from kvflow.ports import Ports
from kvflow.stages.enqueue import finish_chunk, make_chunk
from kvflow.state.events import Chunk, LayersReady, ReadyEvent
from kvflow.state.tables import Memory, Outcome
from kvflow.statistics import RankStatistics
from kvflow.transfer import Transfer
from kvflow.wire.messages import Failure

__all__ = ["BlockingReceiver", "BlockingSender", "DecodeRank", "LoopThread", "Memory", "Outcome", "PrefillRank"]

Result = TypeVar("Result")
AnyRank = TypeVar("AnyRank", prefill.PrefillRank, decode.DecodeRank)


class _BlockingTransfer:
    """One room: what the engine's thread may do and ask. Made on the event loop."""

    __slots__ = ("_calls", "_error", "_failure", "_transfer", "room")

    def __init__(self, calls: Calls, rank: prefill.PrefillRank | decode.DecodeRank, transfer: Transfer) -> None:
        self.room = transfer.room
        self._calls = calls
        self._transfer = transfer
        self._error: KvflowError | None = None
        self._failure: Failure | None = None
        transfer.on_change = self._notify
        try:
            transfer.open()
        except KvflowError as error:
            self._failure = rank.failure(_reason_of(error), str(error))
            self._error = error

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
        """Wait until `is_settled`, or until the time is up. For scripts and tests, not for schedulers."""
        with self._calls.done:
            self._calls.done.wait_for(lambda: self.is_settled, timeout_s)
        return self.outcome

    def abort(self) -> None:
        """Give the transfer up. Its pages may not be safe yet: `memory` says so. Does nothing after the end."""
        if self.outcome is Outcome.PENDING:
            self._calls.put(self._transfer.abort)

    def _notify(self) -> None:
        with self._calls.done:
            self._calls.done.notify_all()

    def _check_success(self) -> None:
        if self._transfer.failure is not None:
            raise self._transfer.error() from self._error
        if self._error is not None:
            raise self._error
        if self._transfer.outcome is Outcome.PENDING:
            raise LocalProtocolError("transfer has not ended; look at its outcome first", room=self.room)


def _reason_of(error: KvflowError) -> FailureReason:
    """Say with which reason a transfer fails that the rank did not even begin."""
    match error:
        case CapacityExceeded():
            return FailureReason.CAPACITY
        case RankDraining():
            return FailureReason.PEER_CLOSED
        case RankBroken():
            return FailureReason.BROKEN
        case _:
            return FailureReason.PROTOCOL


class BlockingSender(_BlockingTransfer):
    """One room, as the prefill engine sends it. Made by `PrefillRank.send`."""

    __slots__ = ("_chunks", "_is_feeding", "_is_finished", "_rank", "_sender")

    def __init__(self, calls: Calls, rank: prefill.PrefillRank, sender: prefill.RoomSender) -> None:
        self._rank = rank
        self._sender = sender
        self._chunks: deque[Chunk] = deque()
        self._is_feeding = False
        self._is_finished = False
        super().__init__(calls, rank, sender)

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
            LocalProtocolError: After `finish`, or after the end.
            TransferFailed: The transfer has failed; there is no need to compute the rest.
        """
        self._check_unfinished()
        self._put(make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers))

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
        chunk = make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers)
        self._put(finish_chunk(chunk, metadata, self._rank.config.limits.metadata_bytes))
        self._is_finished = True

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
        if self._is_finished or self.outcome is not Outcome.PENDING:
            raise LocalProtocolError("no chunk follows `finish`", room=self.room)

    def _put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._calls.put(self._wake)

    def _wake(self) -> None:
        """Pass chunks on, unless that is going on."""
        if self._chunks and not self._is_feeding and self._sender.outcome is Outcome.PENDING:
            self._is_feeding = True
            self._rank.start_task(self._feed)

    async def _feed(self) -> None:
        """Pass chunks on in order; the first one that is refused gives the room up."""
        try:
            while self._chunks and self._sender.outcome is Outcome.PENDING:
                await self._sender.offer(self._chunks.popleft())
        except KvflowError as error:
            if self._sender.outcome is Outcome.PENDING:  # else it has failed meanwhile, which is said elsewhere
                self._failure = self._rank.failure(FailureReason.ABORTED, str(error))
                self._error = error
                self._sender.abort()
        finally:
            self._is_feeding = False


class BlockingReceiver(_BlockingTransfer):
    """One room, as the decode engine receives it. Made by `DecodeRank.receive`."""

    __slots__ = ("_receiver",)

    def __init__(self, calls: Calls, rank: decode.DecodeRank, receiver: decode.RoomReceiver) -> None:
        self._receiver = receiver
        super().__init__(calls, rank, receiver)

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


class _BlockingRank(Generic[AnyRank]):
    """A rank on the event loop of a thread. Use it as a context manager.

    Args:
        make_rank: Makes the rank; called on the event loop.
        loop: The thread to run on; one of its own by default.
    """

    def __init__(self, make_rank: Callable[[], AnyRank], loop: LoopThread | None) -> None:
        self._make_rank: Callable[[], AnyRank] = make_rank
        self._loop = loop
        self._is_open = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            loop = self._loop or stack.enter_context(LoopThread())
            self._portal = loop.portal
            self._rank: AnyRank = self._portal.call(self._make_rank)
            stack.enter_context(self._portal.wrap_async_context_manager(self._rank))
            self._calls = self._portal.call(Calls)
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._stack.close()

    def statistics(self) -> RankStatistics:
        """Give counts at this moment.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        return self._call(self._rank.statistics)

    def quarantined(self) -> list[int]:
        """Rooms of ended transfers whose pages are not proved quiet.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        return self._call(lambda: [transfer.room for transfer in self._rank.quarantined()])

    def release(self, room: int) -> None:
        """Take the pages of a room in quarantine back without a proof; see `kvflow.DecodeRank.release`.

        Raises:
            LocalProtocolError: No transfer of this room is in quarantine, or the rank is not open.
        """

        def release() -> None:
            transfers = [transfer for transfer in self._rank.quarantined() if transfer.room == room]
            if not transfers:
                raise LocalProtocolError("room is not in quarantine", room=room)
            for transfer in transfers:
                self._rank.release(transfer)

        self._call(release)

    def start_drain(self) -> None:
        """Take nothing new, and let what is open end; see `kvflow.DecodeRank.start_drain`.

        A scheduler goes on with its steps, chunks of open rooms included, until `is_drained`.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self._call(self._rank.start_drain)

    @property
    def is_drained(self) -> bool:
        """Draining has begun, and every transfer has its outcome, with its pages safe or in quarantine.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        self._check_open()
        return self._rank.is_drained

    def drain(self, timeout_s: float | None = None) -> bool:
        """Start to drain, and wait until all is done. For scripts: chunks must come from another thread meanwhile.

        Args:
            timeout_s: How long to wait; without limit by default.

        Returns:
            What `is_drained` says.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self._check_open()
        return self._portal.call(self._rank.drain, timeout_s)

    def _check_open(self) -> None:
        if not self._is_open:
            raise LocalProtocolError("rank is not open")

    def _call(self, function: Callable[[], Result]) -> Result:
        self._check_open()
        return self._portal.call(function)


class PrefillRank(_BlockingRank[prefill.PrefillRank]):
    """`kvflow.PrefillRank` for a scheduler loop. Use it as a context manager; the arguments are the same.

    Args:
        config: Settings.
        layout: The pools to send from; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name.
        loop: The thread to run on; one of its own by default.
        ports: The world to use instead of the real one.
    """

    def __init__(
        self,
        config: PrefillConfig,
        layout: KVLayout,
        backend: Backend | None = None,
        *,
        loop: LoopThread | None = None,
        ports: Ports | None = None,
    ) -> None:
        super().__init__(lambda: prefill.PrefillRank(config, layout, backend, ports=ports), loop)

    @property
    def endpoint(self) -> str:
        """Address of the control socket, once the rank is open."""
        return self._rank.endpoint

    def send(self, room: int) -> BlockingSender:
        """Start to send a room; see `kvflow.PrefillRank.send`.

        A room that is in use shows in `outcome`. Chunks are queued without bound here: a scheduler that must not run
        ahead looks at `statistics().queued_chunks`.

        Raises:
            LocalProtocolError: The room is no integer, or the rank is not open.
        """
        return self._call(lambda: BlockingSender(self._calls, self._rank, self._rank.send(room)))


class DecodeRank(_BlockingRank[decode.DecodeRank]):
    """`kvflow.DecodeRank` for a scheduler loop. Use it as a context manager; the arguments are the same.

    Args:
        config: Settings.
        layout: The pools to receive into; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name.
        loop: The thread to run on; one of its own by default.
        ports: The world to use instead of the real one.
    """

    def __init__(
        self,
        config: DecodeConfig,
        layout: KVLayout,
        backend: Backend | None = None,
        *,
        loop: LoopThread | None = None,
        ports: Ports | None = None,
    ) -> None:
        super().__init__(lambda: decode.DecodeRank(config, layout, backend, ports=ports), loop)

    def receive(  # noqa: PLR0913 - each one is a choice of the engine, by name
        self,
        room: int,
        *,
        prefill: str,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        digest: bool | None = None,
        priority: int = 0,
    ) -> BlockingReceiver:
        """Start to receive a room; see `kvflow.DecodeRank.receive`. A room that is in use shows in `outcome`.

        Raises:
            PlanError: A page table does not fit the pool or the tokens, or digests are wanted of device memory.
            ConfigError: `num_ranks`, `timeout_s` or `priority` is out of range.
        """

        def make() -> BlockingReceiver:
            receiver = self._rank.receive(
                room,
                prefill=prefill,
                tokens=tokens,
                pages=pages,
                num_ranks=num_ranks,
                timeout_s=timeout_s,
                digest=digest,
                priority=priority,
            )
            return BlockingReceiver(self._calls, self._rank, receiver)

        return self._call(make)
