"""One room on one prefill rank. Pure.

A `Room` holds the chunks that the engine offered, and waits for decode ranks that have announced a grant as long as
they live. Each decode rank that grants its pages gets a `Delivery`. A delivery that fails ends the whole room, because
the decode ranks of one request are of no use without each other.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import FailureReason, LocalProtocolError
from kvflow.geometry.pages import WIRE_PAGES
from kvflow.geometry.ranges import TokenRange, hull
from kvflow.state.effects import PrefillEffect, ReportGranted, ReportQuiesced, ReportSender
from kvflow.state.events import Chunk, DeliveryId, PeerRoute, PostEnded, SendOpened
from kvflow.state.prefill.deadlines import GrantOverdue, PrefillTimer, RoomUndrained, RoomUngranted, RoomUnquiesced
from kvflow.state.prefill.delivery import STANDING, Delivery, SendContext
from kvflow.state.prefill.waiting import Announcement, Asked
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.state.tables import FEED, FeedSignal, FeedState, Memory, Signal, TransferState
from kvflow.wire.messages import Cancel, Failure, Grant, PeerId, RankId

__all__ = ["Room"]

QUIESCING: Final = (FeedState.QUIESCING, FeedState.SETTLING)


class Room:
    """One room, from its opening until its last write has ended.

    The room keeps counts of its deliveries, so that the cost of an event does not grow with the number of decode ranks.

    Attributes:
        deliveries: Deliveries by decode rank; other incarnations of these ranks are refused.
        num_delivered: Deliveries whose decode rank has everything.
        num_safe: Deliveries whose writes no longer read the source pages.
        num_quarantined: Deliveries for which this could not be proved in time.
        told: Decode ranks without a delivery that know that the room has failed.
        has_lease: Decode ranks could know of it, and must ask for it in time.
    """

    def __init__(self, context: SendContext, opened: SendOpened) -> None:
        self.room = opened.room
        self.has_lease = opened.has_lease
        self.state = TransferState()
        self.failure: Failure | None = None
        self.deliveries: dict[RankId, Delivery] = {}
        self.announced: dict[PeerId, Announcement] = {}
        self.footprint = NO_MEMORY
        self.deadlines: dict[PrefillTimer, float] = {}
        self.changed: dict[RankId, Delivery] = {}
        self.told: dict[RankId, None] = {}
        self.num_delivered = 0
        self.num_safe = 0
        self.num_quarantined = 0
        self.has_changed = False
        self._is_background = opened.is_background
        self._context = context
        self._error = context.error
        self.feed = FeedState.OPEN
        self.is_finished = False
        self._chunks: list[Chunk] = []
        self._resume_at: int | None = None
        self._num_decode_ranks: int | None = None

    @property
    def has_all_grants(self) -> bool:
        """Whether every decode rank has granted."""
        return len(self.deliveries) == self._num_decode_ranks

    @property
    def num_asked(self) -> int:
        """Number of decode ranks that have granted or announced."""
        return len(self.deliveries) + len(self.announced)

    def told_asked(self) -> str:
        """Return how many decode ranks have asked, in words, such as "1 of 2 decode ranks"."""
        return f"{self.num_asked} of {self._num_decode_ranks} decode ranks" if self.num_asked else "no decode rank"

    def pages(self) -> dict[str, bytes]:
        """Return the distinct pages of its chunks by component, encoded as `WIRE_PAGES`."""
        tables: dict[str, list[NDArray[np.uint32]]] = {}
        for chunk in self._chunks:
            for name, table in chunk.pages.items():
                tables.setdefault(name, []).append(table.pages)
        return {name: np.unique(np.concatenate(lists)).astype(WIRE_PAGES).tobytes() for name, lists in tables.items()}

    def is_of_other_instance(self, rank: RankId) -> bool:
        """Return whether decode ranks of another instance have asked for it."""
        first = next(iter((*self.deliveries, *(peer.rank for peer in self.announced))), rank)
        return first.instance != rank.instance

    def delivery_to(self, peer: PeerId) -> Delivery | None:
        """Find the delivery to this incarnation of a decode rank."""
        delivery = self.deliveries.get(peer.rank)
        return delivery if delivery is not None and delivery.id.peer == peer else None

    def deadlines_from(self, now: float) -> dict[PrefillTimer, float]:
        """Return what it waits for, and until when if it began to wait now."""
        timeouts = self._context.settings.timeouts
        deadlines: dict[PrefillTimer, float] = {
            GrantOverdue(self.room, peer, one.generation): one.deadline for peer, one in self.announced.items()
        }
        if self.state.memory is Memory.DRAINING:
            deadlines[RoomUndrained(self.room)] = now + timeouts.drain_s
        if not self.state.is_pending:
            return deadlines
        if self.is_finished and self.has_lease and self.num_asked != self._num_decode_ranks:
            deadlines[RoomUngranted(self.room)] = now + timeouts.grant_s
        if self.feed in QUIESCING:
            deadlines[RoomUnquiesced(self.room)] = now + timeouts.drain_s
        return deadlines

    def start_lease(self) -> None:
        """Note that decode ranks can know of it from now on."""
        self.has_lease = True
        self.has_changed = True

    def offer(self, chunk: Chunk, footprint: Footprint, now: float) -> list[PrefillEffect]:
        """Take a chunk from the engine.

        Raises:
            LocalProtocolError: The chunk does not continue the one before, the last chunk was already offered, or the
                room is being quiesced.
        """
        if not self.state.is_pending:
            return []
        self._check_continues(chunk)
        self._chunks.append(chunk)
        if chunk.last:
            self._feed_on(FeedSignal.LAST_CHUNK)
        self.footprint = self.footprint.plus(footprint)
        effects: list[PrefillEffect] = []
        for delivery in list(self.deliveries.values()):
            effects += self._feed(delivery, [chunk], now)
        return effects

    def quiesce(self) -> None:
        """Drop pieces that wait in the queue, and chunks that are kept for later grants, once nothing reads them."""
        if not self.state.is_pending or self.feed in QUIESCING:
            return
        forgotten = [at for delivery in self.deliveries.values() if (at := delivery.roll_back()) is not None]
        if self.is_finished and self.has_all_grants and not forgotten:
            self._feed_on(FeedSignal.KEPT)
            return
        if self._chunks:
            first, last = self._chunks[0].tokens[0], self._chunks[-1].tokens[1]
            self._resume_at = min(forgotten, default=last) if self.has_all_grants else first
        self._feed_on(FeedSignal.ROLLED_BACK)

    def _report_quiesced(self) -> list[PrefillEffect]:
        """Report that no post reads the pages any more, if so; the room must be quiescing."""
        if any(delivery.reads_pages for delivery in self.deliveries.values()):
            return []
        self._feed_on(FeedSignal.QUIET)
        if self.is_finished:
            return [ReportQuiesced(self.room, None)]
        self.footprint = NO_MEMORY
        self._chunks.clear()
        return [ReportQuiesced(self.room, self._resume_at or 0)]

    def announce(self, peer: PeerId, announcement: Announcement) -> None:
        """Record an announcement, which must not be refused by `refusal`."""
        self._num_decode_ranks = announcement.num_decode_ranks
        self.announced[peer] = announcement
        self.has_changed = True

    def withdraw(self, peer: PeerId) -> None:
        """Drop the announcement of a decode rank."""
        del self.announced[peer]
        self.has_changed = True

    def grant(self, peer: PeerId, grant: Grant, link: PeerRoute, now: float, granted_at: float) -> list[PrefillEffect]:
        """Start a delivery, which must not be refused by `refusal`, and feed it all chunks so far.

        The grant arrived at `granted_at`.

        Raises:
            PlanError: The granted page tables are invalid; nothing has changed.
        """
        if self._is_background:
            link = link.send_in_background(self._context.settings.limits.bytes_per_background_post)
        delivery = Delivery(self._context, peer, grant, link, self._on_change, granted_at)
        self._on_change(delivery)
        self._num_decode_ranks = grant.num_decode_ranks
        self.deliveries[peer.rank] = delivery
        granted: list[PrefillEffect] = []
        if self.has_all_grants:
            granted = [ReportGranted(self.room, self._wanted())]
        kept = self._chunks if self.feed is not FeedState.QUIESCING else ()
        return [*granted, *self._feed(delivery, kept, now)]

    def post_ended(self, delivery: Delivery, ended: PostEnded) -> list[PrefillEffect]:
        """Note that a post has ended; a failed one ends the room, unless decode has everything all the same."""
        failure = ended.failure
        stopped = self.stop(Signal.FAILED, failure) if failure and not delivery.has_arrived else []
        written = delivery.post_ended(ended.seq, is_written=failure is None, lingers=ended.lingers, stamps=ended.stamps)
        return [*stopped, *written]

    def post_in_doubt(self, delivery: Delivery, failure: Failure) -> list[PrefillEffect]:
        """Note that the transport cannot tell whether a post has ended, which ends the room."""
        stopped = self.stop(Signal.FAILED, failure)
        delivery.apply(Signal.IN_DOUBT)
        return stopped

    def cancel(self, delivery: Delivery, cancel: Cancel) -> list[PrefillEffect]:
        """End the room because one decode rank cancelled it."""
        effects = delivery.cancel(cancel)
        return [*effects, *self.stop(Signal.FAILED, cancel.failure)]

    def stop(self, signal: Signal, failure: Failure) -> list[PrefillEffect]:
        """End the room without success, and send every decode rank the same reason."""
        if not self.state.is_pending:
            return []
        self.failure = failure
        self.state.apply(signal)
        self.has_changed = True
        effects: list[PrefillEffect] = [self._report()]
        for delivery in self.deliveries.values():
            effects += delivery.stop(signal, failure)
        for peer, announcement in self.announced.items():
            effects += self._context.refuse(DeliveryId(self.room, peer, announcement.generation), failure)
            self.told[peer.rank] = None
        self.announced.clear()
        return effects

    def in_doubt(self) -> None:
        """Stop waiting for posts that do not end."""
        for delivery in self.deliveries.values():
            if delivery.posted:
                delivery.apply(Signal.IN_DOUBT)

    def release(self) -> list[PrefillEffect]:
        """Release the pages without a proof, at an operator's request."""
        self.in_doubt()
        for delivery in self.deliveries.values():
            delivery.apply(Signal.RELEASED)
        self.state.apply(Signal.RELEASED)
        return [self._report()]

    def refusal(self, peer: PeerId, asked: Asked) -> Failure | None:
        """Return why a grant or an announcement cannot be served although the room is open; None if it can."""
        if self.failure is not None:
            return self.failure
        if peer.rank in self.deliveries:  # even by an earlier incarnation
            return self._error(FailureReason.ROOM_IN_USE, "this rank already has an open grant for this room")
        if peer in self.announced:
            return self._error(FailureReason.ROOM_IN_USE, "this rank has already announced a later grant for this room")
        num_asked = self.num_asked
        if num_asked and self._num_decode_ranks != asked.num_decode_ranks:
            detail = f"decode ranks disagree on their number: {self._num_decode_ranks} and {asked.num_decode_ranks}"
            return self._error(FailureReason.PROTOCOL, detail)
        if num_asked and num_asked == self._num_decode_ranks:
            detail = f"all {self._num_decode_ranks} decode ranks have already asked"
            return self._error(FailureReason.PROTOCOL, detail)
        return None

    def review(self) -> list[PrefillEffect]:
        """Derive the room's state from its deliveries, and report it if it has changed."""
        before = (self.state.outcome, self.state.memory)
        num_deliveries = len(self.deliveries)
        has_all = self.is_finished and num_deliveries == self._num_decode_ranks
        is_safe = self.num_safe == num_deliveries
        if has_all and self.num_delivered == num_deliveries:
            self.state.apply(Signal.COMPLETED)
        elif has_all and is_safe:
            self.state.apply(Signal.WRITTEN)
        if is_safe and not self.state.is_pending:
            self.state.apply(Signal.QUIET)
        if self.num_quarantined:
            self.state.apply(Signal.IN_DOUBT)
        after = (self.state.outcome, self.state.memory)
        effects: list[PrefillEffect] = [self._report()] if after != before else []
        if self.state.is_pending and self.feed in QUIESCING:
            effects += self._report_quiesced()
        return effects

    def _wanted(self) -> dict[str, TokenRange]:
        """Return the tokens that any decode rank wants, by component."""
        wanted: dict[str, TokenRange] = {}
        for delivery in self.deliveries.values():
            for name, tokens in delivery.grant.ranges.items():
                wanted[name] = hull(wanted[name], tokens) if name in wanted else tokens
        return wanted

    def _feed_on(self, signal: FeedSignal) -> None:
        self.feed = FEED[self.feed, signal]
        self.is_finished = self.feed in (FeedState.FINISHED, FeedState.SETTLING)
        self.has_changed = True

    def _on_change(self, delivery: Delivery) -> None:
        self.changed[delivery.id.peer.rank] = delivery
        self.has_changed = True
        state, before = delivery.state, delivery.standing
        now = STANDING[state.outcome, state.memory]
        if now is not before:
            delivery.standing = now
            self.num_delivered += now.is_delivered - before.is_delivered
            self.num_safe += now.is_safe - before.is_safe
            self.num_quarantined += now.is_quarantined - before.is_quarantined

    def _feed(self, delivery: Delivery, chunks: Iterable[Chunk], now: float) -> list[PrefillEffect]:
        effects: list[PrefillEffect] = []
        for chunk in chunks:
            if not delivery.state.is_pending:  # another delivery has ended the room just now
                break
            missing = delivery.missing(chunk)
            if missing is not None:
                return [*effects, *self.stop(Signal.FAILED, self._error(FailureReason.TOKENS_NOT_SERVED, missing))]
            effects += delivery.offer(chunk, now)
        return effects

    def _report(self) -> PrefillEffect:
        return ReportSender(self.room, self.state.outcome, self.state.memory, self.failure)

    def _check_continues(self, chunk: Chunk) -> None:
        start, stop = chunk.tokens
        if self.is_finished:
            raise LocalProtocolError("cannot send chunks after the last one", room=self.room, tokens=chunk.tokens)
        if self.feed in QUIESCING:
            raise LocalProtocolError("room is being quiesced", room=self.room, tokens=chunk.tokens)
        if not 0 <= start <= stop or (start == stop and not chunk.last):
            raise LocalProtocolError("chunk has no tokens", room=self.room, tokens=chunk.tokens)
        if self._chunks and start != self._chunks[-1].tokens[1]:
            raise LocalProtocolError(
                "chunk must start where the previous one stopped",
                room=self.room,
                tokens=chunk.tokens,
                before=self._chunks[-1].tokens,
            )
        if not self._chunks and self._resume_at is not None and start > self._resume_at:
            raise LocalProtocolError(
                "chunk must not start after `resume_at`",
                room=self.room,
                tokens=chunk.tokens,
                resume_at=self._resume_at,
            )
