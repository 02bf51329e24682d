"""The same two ranks for engines with a synchronous scheduler loop.

The event loop runs in a thread of its own. Nothing here waits for a transfer: a scheduler starts one, goes on with its
steps, and asks `poll()` in between. Only opening and closing a rank wait.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, TypeVar

from typing_extensions import Self

from kvflow import decode, prefill
from kvflow.aio.calls import Calls
from kvflow.aio.loop_thread import LoopThread
from kvflow.backends.base import Backend
from kvflow.config import DecodeConfig, PrefillConfig
from kvflow.decode import Handover
from kvflow.errors import KvflowError, LocalProtocolError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import Pages
from kvflow.geometry.tokens import TokenRange
from kvflow.state.events import Chunk, LayersReady, ReadyEvent
from kvflow.state.tables import Memory, Outcome
from kvflow.statistics import RankStatistics
from kvflow.transfer import Transfer

__all__ = ["BlockingReceiver", "BlockingSender", "DecodeRank", "LoopThread", "Memory", "Outcome", "PrefillRank"]

Result = TypeVar("Result")
AnyRank = TypeVar("AnyRank", prefill.PrefillRank, decode.DecodeRank)


class _BlockingTransfer:
    """One room: what the engine's thread may do and ask. Made on the event loop."""

    __slots__ = ("_calls", "_error", "_has_ended", "_transfer", "room")

    def __init__(self, calls: Calls, transfer: Transfer) -> None:
        self.room = transfer.room
        self._calls = calls
        self._transfer = transfer
        self._error: Exception | None = None
        self._has_ended = False
        transfer.on_settled = self._end
        try:
            transfer.open()
        except KvflowError as error:
            self._error = error
            self._end()

    @property
    def memory(self) -> Memory:
        """Whether somebody can still touch the pages."""
        return self._transfer.memory

    def poll(self) -> Outcome:
        """Say how the transfer stands, without waiting.

        Returns:
            PENDING until it has ended *and* nobody can touch its pages (or `memory` says that they are quarantined).
        """
        if not self._has_ended:
            return Outcome.PENDING
        if self._error is not None:
            return Outcome.FAILED
        return self._transfer.outcome

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until `poll` no longer says PENDING, or the time is up. For scripts and tests, not for schedulers."""
        with self._calls.done:
            self._calls.done.wait_for(lambda: self._has_ended, timeout_s)
        return self.poll()

    def abort(self) -> None:
        """Give the transfer up. Go on polling: its pages may not be safe yet. Does nothing after the end."""
        if not self._has_ended:
            self._calls.put(self._transfer.give_up)

    def _end(self) -> None:
        self._transfer.on_settled = None
        with self._calls.done:
            self._has_ended = True
            self._calls.done.notify_all()

    def _check_success(self) -> None:
        if not self._has_ended:
            raise LocalProtocolError("transfer has not ended; poll first", room=self.room)
        if self._transfer.failure is not None:
            raise self._transfer.error() from self._error
        if self._error is not None:
            raise self._error


class BlockingSender(_BlockingTransfer):
    """One room, as the prefill engine sends it. Made by `PrefillRank.send`."""

    __slots__ = ("_chunks", "_is_feeding", "_rank", "_sender")

    def __init__(self, calls: Calls, rank: prefill.PrefillRank, sender: prefill.RoomSender) -> None:
        self._rank = rank
        self._sender = sender
        self._chunks: deque[Chunk] = deque()
        self._is_feeding = False
        super().__init__(calls, sender)

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
        """
        self._put(prefill.make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers))

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
            PlanError: A page table does not fit the pool or the tokens, or layers are out of order. Nothing was sent;
                the room stays open.
        """
        chunk = prefill.make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers)
        self._put(prefill.finish_chunk(chunk, metadata))

    def result(self) -> None:
        """Return if every decode rank has everything.

        Raises:
            LocalProtocolError: The transfer has not ended yet, or its chunks did not follow on each other.
            TransferFailed: It failed or was aborted.
        """
        self._check_success()

    def _put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._calls.put(self._wake)

    def _wake(self) -> None:
        """Pass chunks on, unless that is going on."""
        if self._chunks and not self._is_feeding:
            self._is_feeding = True
            self._rank.start_task(self._feed)

    async def _feed(self) -> None:
        """Pass chunks on in order; the first one that is refused gives the room up."""
        try:
            while self._chunks and self._sender.outcome is Outcome.PENDING:
                await self._sender.offer(self._chunks.popleft())
        except KvflowError as error:
            if self._sender.outcome is Outcome.PENDING:  # else it has failed meanwhile, which is said elsewhere
                self._error = error
                self._sender.give_up()
        finally:
            self._is_feeding = False


class BlockingReceiver(_BlockingTransfer):
    """One room, as the decode engine receives it. Made by `DecodeRank.receive`."""

    __slots__ = ("_receiver",)

    def __init__(self, calls: Calls, receiver: decode.RoomReceiver) -> None:
        self._receiver = receiver
        super().__init__(calls, receiver)

    def result(self) -> Handover:
        """Give what the transfer brought.

        Raises:
            LocalProtocolError: The transfer has not ended yet, or its room was in use.
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
            self._calls = self._portal.call(self._start_calls)
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    def _start_calls(self) -> Calls:
        calls = Calls()
        self._rank.start_task(calls.run)
        return calls

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._stack.close()

    def statistics(self) -> RankStatistics:
        """Counts at this moment.

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

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take nothing new and wait until what is open has ended; see `kvflow.DecodeRank.drain`.

        Raises:
            LocalProtocolError: The rank is not open.
        """
        if not self._is_open:
            raise LocalProtocolError("rank is not open")
        return self._portal.call(self._rank.drain, timeout_s)

    def _call(self, function: Callable[[], Result]) -> Result:
        if not self._is_open:
            raise LocalProtocolError("rank is not open")
        return self._portal.call(function)


class PrefillRank(_BlockingRank[prefill.PrefillRank]):
    """`kvflow.PrefillRank` for a scheduler loop. Use it as a context manager; the arguments are the same.

    Args:
        config: Settings.
        layout: The pools to send from; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name.
        loop: The thread to run on; one of its own by default.
    """

    def __init__(
        self,
        config: PrefillConfig,
        layout: KVLayout,
        backend: Backend | None = None,
        *,
        loop: LoopThread | None = None,
    ) -> None:
        super().__init__(lambda: prefill.PrefillRank(config, layout, backend), loop)

    @property
    def endpoint(self) -> str:
        """Address of the control socket, once the rank is open."""
        return self._rank.endpoint

    def send(self, room: int) -> BlockingSender:
        """Start to send a room; see `kvflow.PrefillRank.send`.

        A room that is in use shows in `poll`. Chunks are queued without bound here: a scheduler that must not run ahead
        looks at `statistics().queued_chunks`.

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
    """

    def __init__(
        self,
        config: DecodeConfig,
        layout: KVLayout,
        backend: Backend | None = None,
        *,
        loop: LoopThread | None = None,
    ) -> None:
        super().__init__(lambda: decode.DecodeRank(config, layout, backend), loop)

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
        """Start to receive a room; see `kvflow.DecodeRank.receive`. What is wrong with the room shows in `poll`.

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
            return BlockingReceiver(self._calls, receiver)

        return self._call(make)
