"""One room on one decode rank.

A room may be announced first, and receive its pages later. It grants its pages to every rank of the prefill instance
and counts notices by `engine_rank`. It succeeds only when each rank that must send bytes has accounted for all of them
and, if digests were requested, the received bytes match the sent ones. Any other end drains the room: every rank that
could still write is told to stop, and the pages are returned once each has confirmed that it has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvflow.errors import FailureReason, Stage
from kvflow.state.decode.messages import grant_token, make_announce, make_grant, make_parts
from kvflow.state.decode.progress import RankProgress, Tally
from kvflow.state.effects import (
    ClockOffset,
    CountAnomaly,
    DecodeEffect,
    LastPiece,
    ReceivedRoom,
    ReportReceiver,
    ScatterStaged,
    SendMessage,
    VerifyDigests,
)
from kvflow.state.events import ConnectedRank, InstanceRef, ReceiveGranted, ReceiveOpened
from kvflow.state.tables import (
    QUIET,
    REQUEST,
    Memory,
    Outcome,
    RankSignal,
    RankState,
    RequestSignal,
    RequestState,
    Signal,
    TransferState,
)
from kvflow.wire.messages import PAGE_BYTES, Ack, Cancel, Failure, Grant, Notice, PagesQuery, PeerId, SlotReleased

__all__ = ["PAGES_INLINE_IN_ALL", "ReceiveContext", "Room"]

PAGES_INLINE_IN_ALL = 2**18
"""Rooms that are granted at once send about this many pages with their grants. Prefill ranks ask for the others, so
that a burst of grants does not exceed what may wait to be read."""


class ReceiveContext(NamedTuple):
    """Settings and callbacks that all rooms of a rank share.

    Attributes:
        progress_s: Longest time between arrivals after the first, in seconds.
        probe: Checks whether the process of a rank still exists.
        decline: Tells an instance that a room which was never granted will not be received.
        reconnect: Connects an instance, so that it can be asked for proofs.
        clocks: Offsets of the clocks of prefill ranks, as far as they are known.
    """

    me: PeerId
    progress_s: float
    probe: Callable[[PeerId], list[DecodeEffect]]
    decline: Callable[["Room", Failure, float], list[DecodeEffect]]
    reconnect: Callable[[InstanceRef, float], list[DecodeEffect]]
    clocks: Mapping[PeerId, ClockOffset]


class Room:
    """One room, from the engine's request to the last proof that its pages are quiet.

    Attributes:
        generation: Number of this transfer, never reused by this incarnation.
        told: All ranks of the instance, once the room was announced or granted to them.
        granted: All ranks of the instance, once they may write; empty before.
        num_retransmits: Number of retransmissions in the current phase.
        is_verifying: Whether the received bytes are being compared with their digests.
        is_closing: Whether the outcome is decided, and `Rooms` has acted on it.
        is_inline: Whether grants carry the pages; otherwise prefill ranks ask for them.
    """

    def __init__(self, context: ReceiveContext, opened: ReceiveOpened, deadline: float) -> None:
        self.opened = opened
        self.room = opened.room
        self.generation = opened.generation
        self.deadline = deadline
        self.request = RequestState.ANNOUNCED if opened.is_announced else RequestState.WAITING
        self.told: tuple[PeerId, ...] = ()
        self.granted: tuple[PeerId, ...] = ()
        self.state = TransferState(Memory.SAFE if opened.is_announced else Memory.HELD)
        self.failure: Failure | None = None
        self.ranks: dict[int, RankProgress] = {}
        self.tally = Tally()
        self.num_retransmits = 0
        self.is_closing = False
        self.is_inline = True
        self._context = context
        self._first_notice_at = 0.0
        self._asked_at = 0.0
        self.is_verifying = False
        self._is_verified = False

    @property
    def is_announced(self) -> bool:
        """Whether the room has no pages yet."""
        return self.request is RequestState.ANNOUNCED

    def unproved(self) -> list[PeerId]:
        """Return the ranks that may still write to its pages."""
        return [progress.peer for progress in self.ranks.values() if progress.state not in QUIET]

    def awaits_proof_of(self, peer: PeerId) -> bool:
        """Return whether a peer may still write to these pages."""
        progress = self._progress_of(peer)
        return progress is not None and progress.state not in QUIET

    def take_pages(self, given: ReceiveGranted, deadline: float) -> list[DecodeEffect]:
        """Take the pages of an announced room; the caller grants it next."""
        self.request = REQUEST[self.request, RequestSignal.PAGES]
        self.opened = replace(
            self.opened,
            ranges=given.ranges,
            pages=given.pages,
            timeout_s=given.timeout_s,
            footprint=given.footprint,
            digest=given.digest,
            is_announced=False,
        )
        self.deadline = deadline
        self.state = TransferState()
        return [self._report()]

    def connected(self, ranks: Sequence[ConnectedRank], timeout_s: float, now: float) -> list[DecodeEffect]:
        """Send a grant to every rank of the instance, or an announcement if there are no pages yet."""
        self.request = REQUEST[self.request, RequestSignal.CONNECTED]
        self.told = tuple(rank.peer for rank in ranks)
        self.num_retransmits = 0
        if self.is_announced:
            return self._announce(timeout_s)
        self.granted, self._asked_at = self.told, now
        return self._grant_all(ranks, timeout_s)

    def _announce(self, timeout_s: float) -> list[DecodeEffect]:
        return [SendMessage(peer, make_announce(self.opened, timeout_s)) for peer in self.told]

    def _grant_all(self, ranks: Sequence[ConnectedRank], timeout_s: float) -> list[DecodeEffect]:
        """Send grants; those to ranks that send nothing have no pages."""
        effects: list[DecodeEffect] = []
        for rank in ranks:
            engine_rank = rank.peer.rank.engine_rank
            if not rank.expected.keys().isdisjoint(self.opened.ranges):
                token = grant_token(self.opened.secret, engine_rank)
                self.ranks[engine_rank] = RankProgress(rank, token, self.opened.ranges, self.tally)
            effects.append(SendMessage(rank.peer, self._grant(rank.peer, timeout_s)))
        return [*effects, *self._review()]

    def retransmit(self, timeout_s: float) -> list[DecodeEffect]:
        """Retransmit to each rank what it may have missed, and probe lost ranks."""
        self.num_retransmits += 1
        if not self.granted:  # repeats the announcement, in case a Failed in reply was lost
            return self._announce(timeout_s)
        effects: list[DecodeEffect] = []
        for peer in self.granted:
            progress = self.ranks.get(peer.rank.engine_rank)
            if progress is not None and progress.state not in QUIET:
                effects += self._retransmit_to(progress, timeout_s)
            elif progress is None and self.state.is_pending:
                effects.append(SendMessage(peer, self._grant(peer, timeout_s)))
        return effects

    def remind(self, peer: PeerId) -> list[DecodeEffect]:
        """Ask a rank that is reachable again for its proof."""
        progress = self._progress_of(peer)
        if self.failure is None or progress is None or progress.state in QUIET:
            return []
        return [SendMessage(peer, self._cancel(self.failure, progress))]

    def landed(self, peer: PeerId) -> list[DecodeEffect]:
        """Note that nothing of a rank is in flight any more, and ask it for its proof."""
        progress = self._progress_of(peer)
        if progress is not None:
            progress.has_landed = True
        return self.remind(peer)

    def reconnected(self, rank: ConnectedRank) -> list[DecodeEffect]:
        """Update a rank that has reconnected, and ask it for its proof."""
        progress = self._progress_of(rank.peer)
        if progress is not None:
            progress.reconnected(rank)
        return self.remind(rank.peer)

    def _retransmit_to(self, progress: RankProgress, timeout_s: float) -> list[DecodeEffect]:
        if self.failure is None:
            return [SendMessage(progress.peer, self._grant(progress.peer, timeout_s))]
        probe = self._context.probe(progress.peer) if progress.state is RankState.LOST else []
        return [*probe, SendMessage(progress.peer, self._cancel(self.failure, progress))]

    @property
    def num_pages(self) -> int:
        """Number of destination pages."""
        return sum(map(len, self.opened.pages.values())) // PAGE_BYTES

    def send_pages(self, peer: PeerId, query: PagesQuery) -> list[DecodeEffect]:
        """Send a rank the parts of the page tables that it asks for."""
        if self._progress_of(peer) is None or self.is_inline or not self.state.is_pending:
            return []
        return [SendMessage(peer, part) for part in make_parts(self.opened, query)]

    def _grant(self, peer: PeerId, timeout_s: float) -> Grant:
        progress = self.ranks.get(peer.rank.engine_rank)
        token = None if progress is None else progress.token
        return make_grant(self.opened, token, timeout_s, self._context.progress_s, is_inline=self.is_inline)

    def _cancel(self, failure: Failure, progress: RankProgress | None = None) -> Cancel:
        has_landed = progress is not None and progress.has_landed
        return Cancel(room=self.room, generation=self.generation, failure=failure, has_landed=has_landed)

    def notice(self, notice: Notice, sender: PeerId | None, now: float, waited_s: float = 0.0) -> list[DecodeEffect]:
        """Process a notice that the transport found `waited_s` ago; `sender` is None if it arrived in band."""
        progress = self.ranks.get(notice.engine_rank)
        if progress is None or sender not in (None, progress.peer):
            return [self._anomaly("notice_from_unknown_rank", sender)]
        if notice.token != progress.token:
            return [self._anomaly("notice_with_wrong_token", progress.peer)]
        self._first_notice_at = self._first_notice_at or now
        clock = self._context.clocks.get(progress.peer)
        piece = LastPiece(notice.engine_rank, notice.stamps, self._asked_at, now - waited_s, now, clock)
        if notice.staged is not None and not progress.has(notice.seq):
            return self._stage(progress, notice, piece)
        is_late = progress.state is RankState.DRAINED
        anomaly = "notice_after_drained" if is_late else progress.count(notice, piece)
        if anomaly is not None:
            return [self._anomaly(anomaly, progress.peer)]
        again = [self._slot_released(progress.peer, notice.seq)] if notice.staged is not None else []
        return [*again, *self._judge(progress)]

    def _stage(self, progress: RankProgress, notice: Notice, piece: LastPiece) -> list[DecodeEffect]:
        """Scatter a packed piece, once, and only while the outcome is pending."""
        if not self.state.is_pending or progress.scatters(notice.seq):
            return []
        anomaly = progress.stage(notice, piece)
        if anomaly is not None:
            return [self._anomaly(anomaly, progress.peer)]
        return [ScatterStaged(self.opened, progress.rank, notice)]

    def scattered(self, notice: Notice, failure: Failure | None) -> list[DecodeEffect]:
        """Handle the end of a scatter: only now does the notice count, and its slot may be reused."""
        progress = self.ranks[notice.engine_rank]
        piece = progress.scattered(notice.seq)
        released = self._slot_released(progress.peer, notice.seq)
        if failure is not None:
            return [released, *self.stop(Signal.FAILED, failure)]
        anomaly = progress.count(notice, piece)
        if anomaly is not None:
            return [released, self._anomaly(anomaly, progress.peer), *self._review()]
        return [released, *self._judge(progress)]

    def slot_query(self, peer: PeerId, seq: int) -> list[DecodeEffect]:
        """Confirm that the slot of a notice is no longer read, if that is the case."""
        progress = self._progress_of(peer)
        if progress is None or progress.scatters(seq) or (self.state.is_pending and not progress.has(seq)):
            return []
        return [self._slot_released(peer, seq)]

    @property
    def is_scattering(self) -> bool:
        """Whether this rank is writing to the pages."""
        return self.tally.num_scattering > 0

    def scatters_from(self, peer: PeerId) -> bool:
        """Return whether slots of a rank are being read."""
        progress = self._progress_of(peer)
        return progress is not None and progress.is_scattering

    def _slot_released(self, peer: PeerId, seq: int) -> DecodeEffect:
        engine_rank = peer.rank.engine_rank
        message = SlotReleased(room=self.room, generation=self.generation, engine_rank=engine_rank, seq=seq)
        return SendMessage(peer, message)

    def _judge(self, progress: RankProgress) -> list[DecodeEffect]:
        """Fail the room if a rank has sent all notices without accounting for everything; otherwise review it."""
        if progress.state is RankState.WRITING and progress.has_all_notices:
            detail = progress.shortfall() or "nothing is missing"
            return self.stop(Signal.FAILED, self._error(FailureReason.INCOMPLETE, progress.peer, detail))
        return self._review()

    def verified(self, failure: Failure | None) -> list[DecodeEffect]:
        """Handle the result of the digest check.

        It confirms notices only while the outcome is pending: if the room has ended, the check was left unfinished. An
        unconfirmed notice is no proof, because it may have overtaken its bytes.
        """
        self.is_verifying = False
        if self.state.is_pending:
            if failure is not None:
                return self.stop(Signal.FAILED, failure)
            self._is_verified = True
            return self._review()
        return [*self._review(), *(effect for peer in self.unproved() for effect in self.remind(peer))]

    def drained(self, peer: PeerId, failure: Failure | None) -> list[DecodeEffect]:
        """Handle a rank's promise that it will write nothing more; the room fails unless the rank was complete."""
        progress = self._progress_of(peer)
        if progress is None:
            return []
        was_writing = progress.state is not RankState.COMPLETE
        progress.apply(RankSignal.DRAINED)
        if not (self.state.is_pending and was_writing):
            return self._review()
        detail = "the rank drained without being asked to"
        return self.stop(Signal.FAILED, failure or self._error(FailureReason.PROTOCOL, peer, detail), spare=peer)

    def failed(self, peer: PeerId, failure: Failure, *, is_drained: bool) -> list[DecodeEffect]:
        """End the room because a prefill rank reported a failure."""
        progress = self._progress_of(peer)
        if progress is not None and is_drained:
            progress.apply(RankSignal.DRAINED)
        return self.stop(Signal.FAILED, failure, spare=peer)

    def lost(self, peer: PeerId, failure: Failure) -> list[DecodeEffect]:
        """End the room because a rank that has not sent everything is lost."""
        if not self.granted:
            return self.stop(Signal.FAILED, failure)
        progress = self._progress_of(peer)
        if progress is None or progress.state in QUIET:
            return []
        progress.apply(RankSignal.LOST)
        return [*self.stop(Signal.FAILED, failure), *self._context.probe(peer)]

    def fenced(self, peer: PeerId, failure: Failure) -> list[DecodeEffect]:
        """Note that no write of a terminated incarnation can still land."""
        progress = self._progress_of(peer)
        if progress is None:
            return []
        was_quiet = progress.state in QUIET
        progress.apply(RankSignal.FENCED)
        if was_quiet:
            return []
        return self.stop(Signal.FAILED, failure, spare=peer)

    def apply(self, signal: Signal) -> list[DecodeEffect]:
        """Apply what no rank has told: the wait for Drained is over, or an operator releases the pages."""
        return self._review(signal)

    def stop(self, signal: Signal, failure: Failure, *, spare: PeerId | None = None) -> list[DecodeEffect]:
        """End the room without success, and cancel it at all granted ranks except `spare`, which ended it."""
        if not self.state.is_pending:
            return self._review()
        self.failure = failure
        self.state.apply(signal)
        cancels = [SendMessage(peer, self._cancel(failure)) for peer in self.granted if peer != spare]
        return [self._report(), *cancels, *self._review()]

    def _review(self, extra: Signal | None = None) -> list[DecodeEffect]:
        """Derive the transfer's state from its ranks, and report it if it has changed."""
        if self.opened.digest and self._must_verify():
            self.is_verifying = True
            return [VerifyDigests(self.opened, tuple(progress.written for progress in self.ranks.values()))]
        is_confirmed = not self.opened.digest or self._is_verified
        if self.tally.num_complete and not (is_confirmed or self.is_verifying or self.state.is_pending):
            for progress in self.ranks.values():  # their notices prove nothing
                progress.apply(RankSignal.DOUBTED)
        before = (self.state.outcome, self.state.memory)
        if not self.is_verifying and not self.tally.num_scattering:  # else this rank accesses the pages
            if self.granted and self.tally.num_complete == len(self.ranks):
                self.state.apply(Signal.COMPLETED)
            elif not self.state.is_pending and self.tally.num_quiet == len(self.ranks):
                self.state.apply(Signal.QUIET)
        if extra is not None:
            self.state.apply(extra)
        after = (self.state.outcome, self.state.memory)
        if after == before:
            return []
        is_success = self.state.outcome is Outcome.SUCCESS
        return [self._report(), *(self._acks() if is_success else [])]

    def _must_verify(self) -> bool:
        if self._is_verified or self.is_verifying or not self.state.is_pending:
            return False
        if self.is_scattering:  # the bytes must not change while they are compared
            return False
        return bool(self.ranks) and self.tally.num_complete == len(self.ranks)

    def _acks(self) -> list[DecodeEffect]:
        ack = Ack(room=self.room, generation=self.generation)
        return [SendMessage(peer, ack) for peer in self.granted]

    def _report(self) -> DecodeEffect:
        received = None
        if self.state.memory is Memory.SAFE and self.failure is None:
            received = ReceivedRoom(
                metadata={rank: progress.metadata for rank, progress in self.ranks.items() if progress.metadata},
                num_bytes=sum(progress.num_bytes for progress in self.ranks.values()),
                num_notices=self.tally.num_notices,
                first_notice_at=self._first_notice_at,
                last=self.tally.last,
            )
        return ReportReceiver(
            room=self.room,
            generation=self.generation,
            outcome=self.state.outcome,
            memory=self.state.memory,
            failure=self.failure,
            received=received,
        )

    def _progress_of(self, peer: PeerId) -> RankProgress | None:
        progress = self.ranks.get(peer.rank.engine_rank)
        return progress if progress is not None and progress.peer == peer else None

    def _anomaly(self, kind: str, peer: PeerId | None) -> DecodeEffect:
        return CountAnomaly(kind, peer, self.room)

    def _error(self, reason: FailureReason, peer: PeerId, detail: str) -> Failure:
        return Failure(reason, Stage.AGGREGATE, str(self._context.me.rank), f"{peer.rank}: {detail}")
