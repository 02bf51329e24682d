"""The engine's view of a room that is sent: it offers chunks, and gets its pages back."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio.lowlevel
from typing_extensions import override

from kvflow.aio.flag import Flag
from kvflow.checks import check_traceparent
from kvflow.errors import FailureReason, KvflowError, LocalProtocolError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import Pages
from kvflow.geometry.ranges import TokenRange
from kvflow.observe.trace import TransferLine
from kvflow.room import RoomId
from kvflow.stages.enqueue import finish_chunk, make_chunk
from kvflow.state import events as ev
from kvflow.state.events import Chunk, LayersReady, ReadyEvent
from kvflow.state.quarantine import NO_MEMORY
from kvflow.state.tables import Memory, Outcome
from kvflow.transfer import TraceContext, Transfer
from kvflow.wire.messages import Failure

if TYPE_CHECKING:
    from kvflow.prefill import PrefillRank

__all__ = ["RoomSender"]


class RoomSender(Transfer):
    """The sending side of one room. Returned by `PrefillRank.send`.

    Attributes:
        wanted: The tokens `[start, stop)` that decode wants of each component; None until every decode rank has
            granted. Decode already has the tokens before `start`.
        is_quiesced: True if nothing reads the pages of any chunk, and no chunk was offered since `quiesce`.
        resume_at: After `quiesce`, the token at which to continue; None if everything was posted, including the last
            chunk.
    """

    __slots__ = (
        "_footprint",
        "_granted",
        "_has_lease",
        "_is_background",
        "_is_finished",
        "_is_quiescing",
        "_num_quiesced",
        "_quiesced",
        "_waiting",
        "is_quiesced",
        "resume_at",
        "wanted",
    )

    _rank: "PrefillRank"

    def __init__(
        self,
        rank: "PrefillRank",
        room: RoomId,
        label: str | None = None,
        *,
        defer_lease: bool = False,
        background: bool = False,
        traceparent: str | None = None,
    ) -> None:
        super().__init__(rank, room, label, TraceContext(check_traceparent(traceparent)))
        self._has_lease = not defer_lease
        self._is_background = background
        self.wanted: Mapping[str, TokenRange] | None = None
        self.is_quiesced = False
        self.resume_at: int | None = None
        self._quiesced = Flag()
        self._is_quiescing = False
        self._num_quiesced = 0
        self._granted = Flag()
        self._is_finished = False
        self._footprint = NO_MEMORY
        self._waiting: dict[int, Flag] = {}

    @property
    def _layout(self) -> KVLayout:
        """The layout of the pools that the room is sent from."""
        return self._rank.layout

    @property
    def _max_metadata_bytes(self) -> int:
        """Maximum length of the metadata for `finish`, in bytes."""
        return self._rank.config.limits.metadata_bytes

    async def chunk(
        self,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        *,
        ready: ReadyEvent | None = None,
        layers: Sequence[LayersReady] = (),
    ) -> None:
        """Send a range of tokens, either computed already, or becoming ready with `ready` or layer by layer (`layers`).

        Returns immediately, unless 1,024 pieces are already waiting for one of this room's decode ranks. If cancelled
        while waiting, nothing has been offered. Do not change the pages until the block has exited or `quiesce` has
        returned.

        Args:
            tokens: Positions `[start, stop)` in the request; must start where the previous chunk stopped.
            pages: For each component that comes with this chunk, the pool pages that hold `tokens`: one for each
                page-sized block that the range touches, so a chunk that begins or ends within a page lists that page
                too. Use a `TokenPages` for tokens other than the chunk's (a window that reaches back); for a component
                of kind "slot", pass its one slot. By the end, everything that decode wants must have been offered;
                anything else is ignored.
            ready: An event to wait for first, such as a `torch.cuda.Event` recorded after the last kernel that writes
                the pages. Its `synchronize` method is called in a worker thread.
            layers: Use instead of `ready` if layers are computed one after another. Each entry says when the pages of
                all (global) layers below its `stop` are ready; entries are in ascending order. The last entry covers
                all remaining layers, whatever its `stop`. Groups are merged until they are large enough for a write
                (`Limits.bytes_per_layer_piece`), so a short chunk is sent in one piece after its last event. Offer the
                chunk after all layers have been launched and their events recorded, or pass an object that also waits
                for that.

        Raises:
            PlanError: A page table does not match the pool or the tokens, layers are out of order, or an event was
                never recorded and would count as done. Nothing was sent, and the room stays open.
            LocalProtocolError: The tokens do not continue the previous chunk (or start after `resume_at`), `finish` was
                called, or `quiesce` has not returned yet.
            TransferFailed: The transfer has failed in the meantime; you need not compute the rest.
        """
        await self._offer_chunk(make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers))

    async def finish(
        self,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        *,
        metadata: bytes = b"",
        ready: ReadyEvent | None = None,
        layers: Sequence[LayersReady] = (),
    ) -> None:
        """Send the last tokens (possibly none) and the metadata that the decode engine needs to continue.

        Args:
            tokens: As in `chunk`; `(n, n)` if everything was sent.
            pages: As in `chunk`.
            metadata: Opaque bytes (first token, logprobs, ...). The decode side uses the metadata of the lowest rank
                that sent any.
            ready: As in `chunk`.
            layers: As in `chunk`.

        Raises:
            As in `chunk`; and PlanError if the metadata is too long.
        """
        chunk = make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers)
        await self._offer_chunk(finish_chunk(chunk, metadata, self._max_metadata_bytes))

    async def _offer_chunk(self, chunk: Chunk) -> None:
        """Send a chunk whose arguments have been checked; `chunk` and `finish` use this."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if not self._offer_nowait(chunk):
            num_quiesced = self._num_quiesced
            async with self._turn():
                if num_quiesced == self._num_quiesced:  # else `quiesce` has dropped all waiting chunks of the room
                    self._raise_if_failed()
                    self._offer(chunk)
        if not chunk.last:  # let other tasks run; after the last chunk, the engine waits anyway
            await anyio.lowlevel.cancel_shielded_checkpoint()

    def _offer_nowait(self, chunk: Chunk) -> bool:
        """Send a chunk as `offer` does, unless it has to wait for capacity, and return whether it was sent."""
        self._check_begun()
        self._raise_if_failed()
        if self._is_quiescing:
            raise LocalProtocolError("room is being quiesced", room=self.room, tokens=chunk.tokens)
        if not self._rank._line.is_open(self.room):
            return False
        self._offer(chunk)
        return True

    def _offer(self, chunk: Chunk) -> None:
        if self._is_finished:  # by now, the room may belong to a later transfer in the core
            raise LocalProtocolError("cannot send chunks after `finish`", room=self.room)
        footprint = self._rank._footprint_of(chunk.pages)
        self._rank._request(ev.ChunkOffered(self.room, chunk, footprint))
        self._raise_if_failed()
        self._is_finished = chunk.last
        self.is_quiesced = False
        self._footprint = self._footprint.plus(footprint)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for capacity, or until the transfer has failed or is being quiesced; then the next call has its turn."""
        call, turn = self._rank._next_call(), Flag()
        self._waiting[call] = turn  # first: it may be admitted at once
        try:
            self._rank._request(ev.ChunkWaits(self.room, call))
            try:
                await turn.wait()
                yield
            finally:
                self._rank._dispatch(ev.WaitEnded(call))
        finally:
            del self._waiting[call]

    def _admit_call(self, call: int) -> None:
        """Let a call go on that waits for capacity, unless it is gone."""
        if call in self._waiting:
            self._waiting[call].set()

    def _end_waits(self) -> None:
        for turn in self._waiting.values():
            turn.set()

    def _report_granted(self, wanted: Mapping[str, TokenRange]) -> None:
        """Record that every decode rank has granted."""
        self.wanted = wanted
        self._granted.set()
        self._tell_engine()

    async def quiesce(self) -> int | None:
        """Get the source pages back but keep the room open, for an engine that preempts a request.

        Waits for posted writes and, if some layers of a chunk have been sent, for the rest of that chunk, including its
        device events. Everything else that was offered is dropped, including `finish`. When this returns, nothing reads
        the pages any more and they may be overwritten. Call `chunk` and `finish` again when the tokens have been
        recomputed, in any pages; nothing is sent twice.

        Calling it again while it is in progress, or cancelling it, does not start it a second time.

        Returns:
            The token at which to continue (or earlier): from there on, offer everything again, including windows and
            slots, and call `finish`. None if everything was posted, including the last chunk, and nothing is left to
            offer.

        Raises:
            LocalProtocolError: The transfer was not entered, or this is the wrong event loop.
            TransferFailed: The transfer has failed, or it fails because the pages are still in use after `drain_s`;
                check its `memory`.
        """
        self._quiesce_nowait()
        await self._quiesced.wait()
        self._raise_if_failed()
        return self.resume_at

    def _quiesce_nowait(self) -> None:
        """Start `quiesce` without waiting; `is_quiesced` becomes true when it is done."""
        self._check_begun()
        self._raise_if_failed()
        if self.outcome is not Outcome.PENDING:  # by now, the room may belong to a later transfer in the core
            self._report_quiesced(None)
        elif not self._is_quiescing:
            self._is_quiescing, self.is_quiesced, self._quiesced = True, False, Flag()
            try:
                self._rank._request(ev.QuiesceAsked(self.room))
            except KvflowError:
                self._is_quiescing = False
                raise
            self._num_quiesced += 1
            self._end_waits()

    def _report_quiesced(self, resume_at: int | None) -> None:
        """Record that nothing reads the posted pages any more."""
        self._note_quiesced(resume_at)
        self._tell_engine()

    def _note_quiesced(self, resume_at: int | None) -> None:
        self._is_quiescing, self.is_quiesced, self.resume_at = False, True, resume_at
        self._is_finished = resume_at is None
        self._quiesced.set()

    @override
    def _report(self, outcome: Outcome, memory: Memory, failure: Failure | None) -> None:
        if outcome is Outcome.SUCCESS and self._is_quiescing:
            self._note_quiesced(None)
        super()._report(outcome, memory, failure)
        if outcome is not Outcome.PENDING:
            self._granted.set()  # end all waits
            self._quiesced.set()
        if failure is not None:
            self._end_waits()

    def start_lease(self) -> None:
        """Start `Timeouts.grant_s`, once the other side could ask: the ticket has left. See `PrefillRank.send`.

        Raises:
            LocalProtocolError: The transfer was not entered, or this is the wrong event loop.
        """
        self._check_begun()
        if self.outcome is Outcome.PENDING and not self._has_lease:
            self._has_lease = True
            self._rank._dispatch(ev.LeaseStarted(self.room))

    def reclaim(self, *, with_announced: bool = False) -> None:
        """Fail the transfer because its pages are needed for another one, unless decode needs them.

        Does nothing if a decode rank has granted or announced the room, so it is safe at any time. For engines whose
        memory is short while the pages of finished requests wait for decode ranks that may be dead.

        Args:
            with_announced: An announcement does not count. Decode has no pages for the room yet, so it can compute the
                request itself.

        Raises:
            LocalProtocolError: The transfer was not entered, or this is the wrong event loop.
        """
        self._check_begun()
        if self.outcome is Outcome.PENDING:
            detail = "prefill needs the pages for another request"
            failure = self._rank._new_failure(FailureReason.CAPACITY, detail)
            self._rank._dispatch(ev.ReclaimAsked(self.room, with_announced, failure))

    async def granted(self) -> Mapping[str, TokenRange]:
        """Wait until every decode rank has granted, and return `wanted`.

        Raises:
            TransferFailed: The transfer failed first.
        """
        self._check_begun()
        await self._granted.wait()
        self._raise_if_failed()
        return self.wanted or {}

    async def delivered(self) -> None:
        """Wait until every decode rank has confirmed that it has received everything.

        The source pages are free earlier: `memory` is SAFE as soon as every write has ended.

        Raises:
            TransferFailed: The transfer has failed.
        """
        await self._wait_until_decided()

    @override
    def _log_line(self) -> TransferLine:
        return TransferLine(
            role="send",
            room=self.room,
            outcome=self.outcome,
            prefill=None,
            num_bytes=self._footprint.num_bytes,
            num_pages=self._footprint.num_pages,
            page_bytes=self._footprint.num_bytes,
            elapsed_s=self._elapsed_s,
            failure=self.failure,
            label=self.label,
        )

    @override
    def _open_room(self) -> None:
        self._rank._open_transfer(self.room, self, ev.SendOpened(self.room, self._has_lease, self._is_background))

    async def __aenter__(self) -> Self:
        self._open_room()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rank._check_loop()
        is_forgotten = exc is None and not self._is_finished and self.outcome is Outcome.PENDING
        try:
            if exc is None and self._is_finished:
                await self._decided.wait()
        finally:
            await self._wait_until_settled()
        if is_forgotten:
            raise LocalProtocolError(
                "block exited without `finish` or `abort`; the transfer was aborted", room=self.room
            )
        if exc is None:
            self._raise_if_untold()

    @override
    def _report_abort(self, failure: Failure) -> None:
        self._rank._dispatch(ev.SendAborted(self.room, failure))
