"""What one prefill rank sends to one decode rank for one room. Pure.

A `Delivery` takes the requested tokens from the chunks of its room, splits large chunks into pieces, numbers the
pieces, and tracks them until every write has ended.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvflow.errors import FailureReason, Stage
from kvflow.geometry.pages import read_page_tables
from kvflow.geometry.ranges import ALL_LAYERS, TokenRange
from kvflow.state.effects import AwaitData, DropPlan, Piece, PostPlan, PrefillEffect
from kvflow.state.events import Chunk, DeliveryId, PeerRoute, PlanFinished, ReadyEvent
from kvflow.state.packing import pays_off
from kvflow.state.prefill.deadlines import DeliveryDeadline, DeliveryUnanswered, PostStalled, PrefillTimer
from kvflow.state.prefill.peers import DecodePeers
from kvflow.state.prefill.pieces import ChunkPart, cost_of, resume_at, split_chunk
from kvflow.state.prefill.queue import PieceEnd, PieceQueue
from kvflow.state.prefill.slots import RemoteSlots
from kvflow.state.settings import PrefillSettings
from kvflow.state.tables import Memory, Outcome, Signal, TransferState
from kvflow.wire.messages import Cancel, Drained, Failed, Failure, Grant, Notice, PeerId, Stamps

__all__ = ["STANDING", "Delivery", "DeliveryStatus", "SendContext"]

MAX_BACKOFF: Final = 8
"""The pause between retransmissions doubles up to this multiple of the first pause."""


class SendContext(NamedTuple):
    """State that all rooms of a rank share."""

    me: PeerId
    settings: PrefillSettings
    peers: DecodePeers
    queue: PieceQueue
    slots: RemoteSlots

    def error(self, reason: FailureReason, detail: str, stage: Stage = Stage.ENQUEUE) -> Failure:
        """Return a failure that this rank was the first to detect."""
        return Failure(reason, stage, str(self.me.rank), detail)

    def drained(self, delivery: DeliveryId, failure: Failure | None, in_flight: bytes = b"") -> list[PrefillEffect]:
        """Send Drained: nothing of a delivery is written any more, and nothing can land except what is in flight."""
        message = Drained(
            room=delivery.room,
            generation=delivery.generation,
            engine_rank=self.me.rank.engine_rank,
            failure=failure,
            in_flight=in_flight,
        )
        return self.peers.send(delivery.peer, message)

    def failed(self, delivery: DeliveryId, failure: Failure, *, drained: bool) -> list[PrefillEffect]:
        """Send Failed: a delivery will not succeed."""
        message = Failed(
            room=delivery.room,
            generation=delivery.generation,
            engine_rank=self.me.rank.engine_rank,
            failure=failure,
            drained=drained,
        )
        return self.peers.send(delivery.peer, message)

    def refuse(self, delivery: DeliveryId, failure: Failure) -> list[PrefillEffect]:
        """Close a delivery that will never begin; nothing was or will be written for it."""
        self.peers.close(delivery, failure)
        return self.failed(delivery, failure, drained=True)

    def release_credit(self, delivery: DeliveryId, seq: int, now: float) -> None:
        """Return the credit of a post that may take long to end, and must not block others until then."""
        if not self.queue.is_in_doubt(delivery, seq):
            self.queue.end_piece(delivery, seq, PieceEnd.IN_DOUBT, now)
            self.slots.in_doubt(delivery, seq)


class DeliveryStatus(NamedTuple):
    """How a room counts a delivery.

    Attributes:
        is_delivered: The decode rank has everything.
        is_safe: No write reads the source pages any more.
        is_quarantined: `is_safe` could not be proved in time.
    """

    is_delivered: bool = False
    is_safe: bool = False
    is_quarantined: bool = False


STANDING: Final = {
    (outcome, memory): DeliveryStatus(outcome is Outcome.SUCCESS, memory is Memory.SAFE, memory is Memory.QUARANTINED)
    for outcome in Outcome
    for memory in Memory
}
"""How a room counts a delivery in each state."""


class _Unposted(NamedTuple):
    """A piece that waits for data, turn or credit, or an empty notice behind one; if it `goes_on`, layers follow."""

    notice: Notice
    chunk: Chunk
    goes_on: bool
    offered_at: float


class Delivery:
    """What this rank sends to one decode rank for one grant.

    Pieces leave the queue in the order of their numbers, and an empty notice is sent only after the pieces before it
    have left. So the pieces that are still waiting form a tail, which can be dropped: its numbers and tokens are used
    again.

    Args:
        grant: Its grant; not trusted.
        granted_at: When the grant arrived.
        on_change: Called with the delivery when what it waits for may have changed.

    Attributes:
        standing: How its room counts it.

    Raises:
        PlanError: The granted page tables are invalid.
    """

    def __init__(
        self,
        context: SendContext,
        peer: PeerId,
        grant: Grant,
        link: PeerRoute,
        on_change: "Callable[[Delivery], None]",
        granted_at: float = 0.0,
    ) -> None:
        self.id = DeliveryId(grant.room, peer, grant.generation)
        self.grant = grant
        self.granted_at = granted_at
        self.state = TransferState()
        self.failure: Failure | None = None
        self.num_retransmits = 0
        self.standing = STANDING[self.state.outcome, self.state.memory]
        self.deadlines: dict[PrefillTimer, float] = {}
        self._context = context
        self._link = link
        self._on_change = on_change
        self._wanted = {name: tokens for name, tokens in grant.ranges.items() if name in link.route.expected}
        self._granted = read_page_tables(grant.ranges, grant.pages, link.layout) if self._wanted else {}
        self._positions = {name: start for name, (start, _) in self._wanted.items()}
        self._next_seq = 0
        self._has_last_chunk = False
        self._is_acknowledged = False
        self._drained_is_due = False
        self._lingers = False
        self._not_ready: deque[tuple[Piece, ReadyEvent | None]] = deque()
        self._num_waits = 0
        self._num_ended = 0
        self._unposted: dict[int, _Unposted] = {}
        self._has_begun_layers = False
        self._planned: dict[int, Notice] = {}
        self._posted: dict[int, Notice] = {}
        self._written: list[Notice] = []

    def deadlines_from(self, now: float) -> dict[PrefillTimer, float]:
        """Return what it waits for, and until when if it began to wait now."""
        if not self.state.is_pending:
            return {}
        timeouts = self._context.settings.timeouts
        deadlines: dict[PrefillTimer, float] = {DeliveryDeadline(self.id): now + self.grant.timeout_s}
        if self._posted:
            progress_s = min(timeouts.progress_s, self.grant.progress_s)
            deadlines[PostStalled(self.id, self._num_ended)] = now + progress_s
        if self.state.is_safe:
            pause_s = timeouts.retransmit_s * min(2**self.num_retransmits, MAX_BACKOFF)
            deadlines[DeliveryUnanswered(self.id, self.num_retransmits)] = now + pause_s
        return deadlines

    @property
    def is_fenced(self) -> bool:
        """Whether nothing can land in the decode rank's pages any more, which is what Drained promises."""
        return not self._posted and not self._lingers

    @property
    def reads_pages(self) -> bool:
        """Whether a piece still needs the source pages. A packed piece does not once it is posted."""
        if self._unposted or self._planned:
            return True
        return any(notice.staged is None for notice in self._posted.values())

    @property
    def posted(self) -> tuple[int, ...]:
        """Numbers of the pieces whose posts are not known to have ended."""
        return tuple(self._posted)

    def missing(self, chunk: Chunk) -> str | None:
        """Return which wanted tokens could never be served if this chunk came next; None if there are none."""
        for name, (start, stop) in self._wanted.items():
            at = self._positions[name]
            first, last = chunk.ranges.get(name, (at, at))
            is_gap = at < first < last and at < stop
            if is_gap or (chunk.last and max(at, last) < stop):
                lacking = f"{at}:{min(first, stop)}" if is_gap else f"{max(at, last)}:{stop}"
                return f"decode wants tokens {start}:{stop} of component {name}, but prefill does not serve {lacking}"
        return None

    def offer(self, chunk: Chunk, now: float) -> list[PrefillEffect]:
        """Take what this decode rank wants from a chunk, split into pieces."""
        if self._has_last_chunk:  # other deliveries need it again
            return []
        effects: list[PrefillEffect] = []
        ranges: dict[str, TokenRange] = {}
        for name, (_, stop) in self._wanted.items():
            at = self._positions[name]
            end = min(chunk.ranges.get(name, (at, at))[1], stop)
            if at < end:
                ranges[name] = (at, end)
                self._positions[name] = end
        if ranges or (chunk.last and self._wanted):
            for part in split_chunk(chunk, ranges, self._wanted, self._granted, self._link):
                effects += self._send(part, chunk, now)
        self._has_last_chunk = chunk.last  # set last: an empty part above must not end the delivery
        return [*effects, *self._settle()] if chunk.last else effects

    def roll_back(self) -> int | None:
        """Drop the waiting pieces, except the remaining layers of tokens whose first layers have left.

        Return the token from which chunks must be sent again; None if nothing was dropped.
        """
        is_kept = self._has_begun_layers
        dropped: dict[int, _Unposted] = {}
        for seq, unposted in self._unposted.items():
            if not is_kept:
                dropped[seq] = unposted
            is_kept = is_kept and unposted.goes_on
        if not dropped:
            return None
        self._next_seq = min(dropped)
        self._has_last_chunk = False
        for seq, (notice, *_) in dropped.items():
            del self._unposted[seq]
            for name, (start, _) in notice.ranges.items():
                self._positions[name] = min(start, self._positions[name])
        num_not_ready = len(self._not_ready)
        self._not_ready = deque(waiting for waiting in self._not_ready if waiting[0].seq < self._next_seq)
        self._context.queue.stop_expecting(self.id.peer, num_not_ready - len(self._not_ready))
        self._context.queue.drop(self.id, self._next_seq)
        return min(resume_at(unposted.chunk, unposted.notice.ranges) for unposted in dropped.values())

    def awaits(self, wait: int) -> bool:
        """Return whether a piece still waits for the data of the `AwaitData` with this number."""
        return bool(self._not_ready) and wait == self._num_waits - 1

    def data_ready(self, now: float) -> list[PrefillEffect]:
        """Queue the piece whose data is ready, and those behind it that need not wait."""
        while self._not_ready:
            self._push(replace(self._not_ready.popleft()[0], queued_at=now), now)
            if self._not_ready and self._not_ready[0][1] is not None:
                return self._await_data(self._not_ready[0][1])
        return []

    def taken(self, piece: Piece, now: float, *, is_posted: bool) -> list[PrefillEffect]:
        """Note that a piece has left the queue, to be posted or planned, and send the empty notices behind it."""
        if is_posted:
            self._posted[piece.seq] = piece.notice
            self._on_change(self)
        else:
            self._planned[piece.seq] = piece.notice
        self._has_begun_layers = self._unposted.pop(piece.seq).goes_on
        return self._say_empty(now) if self._unposted else []

    def went_direct(self, seq: int) -> None:
        """Note that a posted piece was written directly to its pages, although it had a slot."""
        notice = self._posted.get(seq)
        if notice is not None:
            self._posted[seq] = replace(notice, staged=None)

    def plan_finished(self, plan: PlanFinished) -> list[PrefillEffect]:
        """Post a piece that was planned off the event loop, unless the delivery has ended."""
        notice = self._planned.pop(plan.seq, None)
        if notice is None:
            return [DropPlan(self.id, plan.seq)]
        notice = replace(notice, digests=dict(plan.digests), staged=plan.staged)
        self._posted[plan.seq] = notice
        self._on_change(self)
        return [PostPlan(self.id, plan.seq, notice)]

    def not_posted(self, seq: int) -> None:
        """Note that a piece could not be planned, and that nothing was posted for it."""
        self._planned.pop(seq, None)
        self._forget_post(seq)

    def post_ended(
        self, seq: int, *, is_written: bool, lingers: bool = False, stamps: Stamps | None = None
    ) -> list[PrefillEffect]:
        """Note that a post has ended; if it `lingers`, its bytes may still land at the decode rank."""
        notice = self._forget_post(seq)
        self._lingers |= lingers
        effects: list[PrefillEffect] = []
        if notice is not None and is_written:
            notice = replace(notice, stamps=stamps)
            self._written.append(notice)
            if not self._context.settings.in_band_notices:
                effects = self._context.peers.send(self.id.peer, notice)
        return [*effects, *self._settle()]

    @property
    def has_arrived(self) -> bool:
        """True if decode has everything. The ends of posts may be reported after that, or fail because it has left."""
        return self._is_acknowledged and self._has_last_chunk and not self._unposted and not self._planned

    def retransmit(self) -> list[PrefillEffect]:
        """Retransmit what the decode rank seems to have missed, over the control channel."""
        self.num_retransmits += 1
        self._on_change(self)
        if self.failure is not None:
            return self._context.failed(self.id, self.failure, drained=self.is_fenced)
        effects: list[PrefillEffect] = []
        if self.state.is_pending and self.state.is_safe:  # all is written, but not acknowledged
            for notice in self._written:
                effects += self._context.peers.send(self.id.peer, notice)
        return effects

    def acknowledged(self) -> list[PrefillEffect]:
        """Note that the decode rank has everything, which it may know before the last post has ended here."""
        self._is_acknowledged = True
        return self._settle()

    def stop(self, signal: Signal, failure: Failure) -> list[PrefillEffect]:
        """End the delivery without success, and tell the decode rank why."""
        if not self.state.is_pending:
            return []
        self._stop(signal, failure)
        self._drained_is_due = not self.is_fenced
        return self._context.failed(self.id, failure, drained=self.is_fenced)

    def cancel(self, cancel: Cancel) -> list[PrefillEffect]:
        """End the delivery because the decode rank cancelled it; send Drained once all posts have ended."""
        if self.state.is_pending:
            self._stop(Signal.FAILED, cancel.failure)
        self._drained_is_due = True
        if cancel.has_landed and not self._posted:
            self._lingers = False
        return self._settle()

    def forget_pages(self) -> None:
        """Drop the granted pages, which only writing needs."""
        self.grant, self._granted = replace(self.grant, pages={}), {}

    def apply(self, signal: Signal) -> None:
        """Apply a signal to its outcome and memory: the proof that a post has ended is in doubt, or not waited for."""
        self.state.apply(signal)
        self._on_change(self)

    def _forget_post(self, seq: int) -> Notice | None:
        notice = self._posted.pop(seq, None)
        self._num_ended += 1  # the next one gets the full time limit
        self._on_change(self)
        return notice

    def _send(self, part: ChunkPart, chunk: Chunk, now: float) -> list[PrefillEffect]:
        """Assign a part its number, and queue it or wait for its data."""
        seq = self._next_seq
        self._next_seq += 1
        cost = cost_of(part, self._link, self._context.settings.max_descriptor_bytes)
        notice = Notice(
            room=self.id.room,
            generation=self.id.generation,
            token=self.grant.token,
            engine_rank=self._context.me.rank.engine_rank,
            seq=seq,
            ranges=dict(part.ranges),
            num_bytes=cost.num_bytes,
            last=part.last,
            metadata=chunk.metadata if part.last else b"",
            layers=None if part.layers == ALL_LAYERS else part.layers,
        )
        self._unposted[seq] = _Unposted(notice, chunk, part.layers[1] is not None, now)
        if not cost.num_bytes:  # nothing is left to send, or tokens of which this rank holds none
            return self._say_empty(now)
        staging = self._context.settings.staging
        piece = Piece(
            self.id,
            seq,
            part.ranges,
            chunk.pages,
            self.grant,
            self._granted,
            self._link,
            notice,
            cost,
            part.layers,
            now,
            self.granted_at,
            must_pack=staging is not None and staging.packing == "always",
        )
        self._context.queue.expect(self.id.peer)
        if part.ready is None and not self._not_ready:
            self._push(piece, now)
            return []
        self._not_ready.append((piece, part.ready))
        return self._await_data(part.ready) if len(self._not_ready) == 1 else []

    def _await_data(self, ready: ReadyEvent | None) -> list[PrefillEffect]:
        if ready is None:
            return []
        self._num_waits += 1
        return [AwaitData(self.id, self._num_waits - 1, ready)]

    def _say_empty(self, now: float) -> list[PrefillEffect]:
        """Send the empty notices whose turn it is: every piece before them has left the queue."""
        effects: list[PrefillEffect] = []
        while self._unposted:
            seq, first = next(iter(self._unposted.items()))
            if first.notice.num_bytes:
                break
            del self._unposted[seq]
            self._has_begun_layers = first.goes_on
            notice = replace(first.notice, stamps=Stamps(self.granted_at, first.offered_at, now, now, now, now))
            self._written.append(notice)
            effects += self._context.peers.send(self.id.peer, notice)
        return effects

    def _push(self, piece: Piece, now: float) -> None:
        staging, window = self._context.settings.staging, self._link.staging
        wants_slot = (
            staging is not None
            and window is not None
            and piece.cost.num_bytes <= min(window.slot_bytes, staging.slot_bytes)
            and pays_off(*piece.cost, staging.descriptor_overhead_s, staging.packing)
        )
        self._context.queue.push(piece, now, wants_slot=wants_slot)

    def _stop(self, signal: Signal, failure: Failure) -> None:
        self.failure = failure
        self._unposted.clear()
        self._planned.clear()
        self._context.queue.stop_expecting(self.id.peer, len(self._not_ready))
        self._not_ready.clear()
        self._context.queue.drop(self.id)
        self.apply(signal)
        if not self._posted:
            self.apply(Signal.QUIET)

    def _settle(self) -> list[PrefillEffect]:
        """Update the state if the last write has ended, and send Drained if it is due."""
        if not self._posted and not self._unposted and not self._planned:
            if self.state.is_pending and self._has_last_chunk:
                is_known = self._is_acknowledged or not self._wanted
                self.apply(Signal.COMPLETED if is_known else Signal.WRITTEN)
            if not self.state.is_pending:
                self.apply(Signal.QUIET)
        in_flight = self._context.settings.domain if self._lingers else b""
        if not self._drained_is_due or self._posted or (self._lingers and not in_flight):
            return []  # safe pages here are no proof for those of the peer
        self._drained_is_due = False
        return self._context.drained(self.id, self.failure, in_flight)
