"""The sending machine: one room on one prefill rank.

A `Sender` holds the chunks that the engine offered. Each decode rank that grants its pages gets a `Delivery`, which
cuts the chunks down to the tokens that were asked for, and large ones into pieces, numbers these, and follows them
until every write has ended.
Whatever ends one delivery badly ends the whole room: decode ranks of one request are of no use without each other.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvflow.errors import FailureReason, LocalProtocolError, Stage
from kvflow.geometry.cutting import Cutting
from kvflow.geometry.layers import ALL_LAYERS
from kvflow.geometry.tokens import TokenRange
from kvflow.state.effects import DropChunks, DropPlan, Effect, EnqueueChunk, PostPlan, ReportSender, SendMessage
from kvflow.state.events import Chunk, DeliveryId, PlanFinished
from kvflow.state.overdue import Pending, RoomPending
from kvflow.state.pieces import Piece, pieces_of, runs_of_part
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.state.tables import Memory, Outcome, Signal, TransferState
from kvflow.state.words import drained, failed
from kvflow.wire.messages import Failure, Grant, Notice, PeerId

__all__ = ["Delivery", "Sender"]


class Delivery:
    """What one prefill rank sends to one decode rank for one grant."""

    def __init__(self, me: PeerId, peer: PeerId, grant: Grant, *, owed: Sequence[str], cutting: Cutting | None) -> None:
        self.id = DeliveryId(grant.room, peer, grant.generation)
        self.grant = grant
        self._wanted = {name: tokens for name, tokens in grant.ranges.items() if name in owed}
        self._positions = {name: start for name, (start, _) in self._wanted.items()}
        self._cutting = cutting
        self.state = TransferState()
        self.failure: Failure | None = None
        self.num_repeats = 0
        self._me = me
        self._next_seq = 0
        self._ended = False
        self._is_received = False
        self._drained_is_due = False
        self._planned: dict[int, Notice] = {}
        self._posted: dict[int, Notice] = {}
        self._lingers = False
        self._noticed: list[Notice] = []
        self.watched = Pending()

    @property
    def pending(self) -> Pending:
        """What has not come yet."""
        is_pending = self.state.is_pending
        return Pending(is_pending, is_pending and bool(self._posted), self.is_unanswered)

    @property
    def is_unanswered(self) -> bool:
        """Everything is written, and the decode rank has not said that it knows."""
        return self.state.is_pending and self.state.is_safe

    @property
    def is_proved(self) -> bool:
        """Nothing can land in the decode rank's pages any more: what Drained says."""
        return not self._posted and not self._lingers

    @property
    def has_posts(self) -> bool:
        """A write is posted and not known to have ended."""
        return bool(self._posted)

    def offer(self, chunk: Chunk) -> list[Effect]:
        """Take the part of a chunk that this decode rank wants, in as many pieces as it takes."""
        self._ended = chunk.last
        if not self._wanted:
            return self._settle()
        ranges = self._share(chunk)
        if not ranges and not chunk.last:
            return []
        self._positions.update({name: stop for name, (_, stop) in ranges.items()})
        cutting = self._cutting and self._cutting.suiting(ranges, self._wanted, lambda: self._num_runs(chunk, ranges))
        effects: list[Effect] = []
        for piece in pieces_of(chunk, ranges, self._wanted, cutting):
            effects += self._send(piece)
        return effects

    def _num_runs(self, chunk: Chunk, ranges: Mapping[str, TokenRange]) -> float:
        """About how many runs the pages of a part of a chunk lie in, both sides taken together."""
        return sum(runs_of_part(chunk, name, tokens, self.grant) for name, tokens in ranges.items())

    def _send(self, piece: Piece) -> list[Effect]:
        """Number a piece and put it on its way."""
        ranges, chunk, layers = piece
        seq = self._next_seq
        self._next_seq += 1
        notice = Notice(
            room=self.id.room,
            generation=self.id.generation,
            token=self.grant.token,
            engine_rank=self._me.rank.engine_rank,
            seq=seq,
            ranges=dict(ranges),
            num_bytes=0,
            last=chunk.last,
            metadata=chunk.metadata,
            layers=None if layers == ALL_LAYERS else layers,
        )
        if not ranges:
            return self._tell(notice)
        self._planned[seq] = notice
        return [EnqueueChunk(self.id, seq, ranges, chunk, self.grant, layers)]

    def missing(self, chunk: Chunk) -> str | None:
        """Say which wanted tokens can never be served any more if this chunk comes next."""
        for name, (start, stop) in self._wanted.items():
            at = self._positions[name]
            first, last = chunk.ranges.get(name, (at, at))
            is_gap = at < first < last and at < stop
            if is_gap or (chunk.last and max(at, last) < stop):
                lacking = f"{at}:{min(first, stop)}" if is_gap else f"{max(at, last)}:{stop}"
                return f"decode wants tokens {start}:{stop} of component {name}, prefill does not serve {lacking}"
        return None

    def _share(self, chunk: Chunk) -> dict[str, TokenRange]:
        """What of a chunk this decode rank wants and has not been sent."""
        shares = {}
        for name, (_, stop) in self._wanted.items():
            at = self._positions[name]
            end = min(chunk.ranges.get(name, (at, at))[1], stop)
            if at < end:
                shares[name] = (at, end)
        return shares

    def plan_finished(self, plan: PlanFinished) -> list[Effect]:
        """Post what was planned, unless the delivery has ended."""
        seq = plan.seq
        notice = self._planned.pop(seq, None)
        if notice is None:
            return [DropPlan(self.id, seq)]
        brought = {"num_bytes": plan.num_bytes, "digests": dict(plan.digests), "staged": plan.staged}
        notice = msgspec.structs.replace(notice, **brought)
        if not plan.num_bytes:  # tokens of which this rank holds none
            return [DropPlan(self.id, seq), *self._tell(notice)]
        self._posted[seq] = notice
        return [PostPlan(self.id, seq, notice)]

    def post_settled(self, seq: int, *, is_written: bool, lingers: bool = False) -> list[Effect]:
        """Note that a post has ended here; if it `lingers`, its bytes may still land there."""
        notice = self._posted.pop(seq, None)
        self._lingers |= lingers
        if notice is not None and is_written:
            self._noticed.append(notice)
        return self._settle()

    def repeat(self) -> list[Effect]:
        """Say again what the decode rank seems to have missed, over the control channel."""
        self.num_repeats += 1
        if self.failure is not None:
            return [SendMessage(self.id.peer, failed(self.id, self._me, self.failure, drained=self.is_proved))]
        if self.is_unanswered:
            return [SendMessage(self.id.peer, notice) for notice in self._noticed]
        return []

    def received(self) -> list[Effect]:
        """Note that the decode rank has everything, which it can know before the last post is seen to have ended."""
        self._is_received = True
        return self._settle()

    def doubt(self) -> None:
        """Give up waiting for the proof that a post has ended."""
        self.state.apply(Signal.DOUBTED)

    def stop(self, signal: Signal, failure: Failure) -> list[Effect]:
        """End it without success and tell the decode rank why."""
        if not self.state.is_pending:
            return []
        effects = self._stop(signal, failure)
        self._drained_is_due = not self.is_proved
        word = failed(self.id, self._me, failure, drained=self.is_proved)
        return [*effects, SendMessage(self.id.peer, word)]

    def cancel(self, failure: Failure) -> list[Effect]:
        """End it because the decode rank said so: it only wants to hear Drained."""
        effects = self._stop(Signal.FAILED, failure) if self.state.is_pending else []
        self._drained_is_due = True
        return [*effects, *self._settle()]

    def forget_pages(self) -> None:
        """Drop what only writing needs."""
        self.grant = msgspec.structs.replace(self.grant, pages={})

    def release(self) -> None:
        """Take the pages back unproved, as an operator says."""
        self.state.apply(Signal.RELEASED)

    def _tell(self, notice: Notice) -> list[Effect]:
        """Send a notice that comes with no bytes."""
        self._noticed.append(notice)
        return [SendMessage(self.id.peer, notice), *self._settle()]

    def _stop(self, signal: Signal, failure: Failure) -> list[Effect]:
        self.failure = failure
        self._planned.clear()
        self.state.apply(signal)
        if not self._posted:
            self.state.apply(Signal.QUIET)
        return [DropChunks(self.id)]

    def _settle(self) -> list[Effect]:
        """See whether the last write has ended."""
        if not self._posted and not self._planned:
            if self.state.is_pending and self._ended:
                is_known = self._is_received or not self._wanted
                self.state.apply(Signal.COMPLETED if is_known else Signal.WRITTEN)
            if not self.state.is_pending:
                self.state.apply(Signal.QUIET)
        if not self._drained_is_due or not self.is_proved:  # safe pages here are no proof for those of the peer
            return []
        self._drained_is_due = False
        return [SendMessage(self.id.peer, drained(self.id, self._me, self.failure))]


class Sender:
    """One room, from the engine's first word to the last ended write."""

    def __init__(self, me: PeerId, room: int) -> None:
        self.room = room
        self.state = TransferState()
        self.failure: Failure | None = None
        self.deliveries: dict[PeerId, Delivery] = {}
        self.footprint = NO_MEMORY
        self._me = me
        self._chunks: list[Chunk] = []
        self._num_decode_ranks: int | None = None
        self.watched = RoomPending()

    @property
    def is_finished(self) -> bool:
        """The engine has offered the last chunk."""
        return bool(self._chunks) and self._chunks[-1].last

    @property
    def pending(self) -> RoomPending:
        """What has not come yet."""
        return RoomPending(self.state.is_pending and self._lacks_grants, self.state.memory is Memory.DRAINING)

    @property
    def _lacks_grants(self) -> bool:
        """Everything is offered, but not every decode rank has asked for it."""
        return len(self.deliveries) != self._num_decode_ranks and self.is_finished

    def offer(self, chunk: Chunk, footprint: Footprint) -> list[Effect]:
        """Take a chunk from the engine.

        Raises:
            LocalProtocolError: It does not continue the one before, or the last chunk was offered already.
        """
        self._check_continues(chunk)
        if not self.state.is_pending:
            return []
        self._chunks.append(chunk)
        self.footprint = self.footprint.plus(footprint)
        effects: list[Effect] = []
        for delivery in list(self.deliveries.values()):
            effects += self._feed(delivery, [chunk])
        return [*effects, *self._review()]

    def grant(self, peer: PeerId, grant: Grant, *, owed: Sequence[str], cutting: Cutting | None) -> list[Effect]:
        """Start a delivery, which nothing speaks against, and give it every chunk there is so far."""
        delivery = Delivery(self._me, peer, grant, owed=owed, cutting=cutting)
        self._num_decode_ranks = grant.num_decode_ranks
        self.deliveries[peer] = delivery
        return [*self._feed(delivery, self._chunks), *self._review()]

    def plan_finished(self, delivery: Delivery, plan: PlanFinished) -> list[Effect]:
        """Post what was planned, unless its delivery has ended."""
        return [*delivery.plan_finished(plan), *self._review()]

    def post_settled(
        self, delivery: Delivery, seq: int, failure: Failure | None, *, lingers: bool = False
    ) -> list[Effect]:
        """Note that a post has ended; one that failed ends the room."""
        stopped = self.stop(Signal.FAILED, failure) if failure else []
        return [*stopped, *delivery.post_settled(seq, is_written=failure is None, lingers=lingers), *self._review()]

    def post_doubted(self, delivery: Delivery, failure: Failure) -> list[Effect]:
        """Note that it cannot be told whether a post has ended; that ends the room."""
        stopped = self.stop(Signal.FAILED, failure)
        delivery.doubt()
        return [*stopped, *self._review()]

    def received(self, delivery: Delivery) -> list[Effect]:
        """Note that one decode rank has everything."""
        return [*delivery.received(), *self._review()]

    def cancel(self, delivery: Delivery, failure: Failure) -> list[Effect]:
        """End the room because one decode rank gave it up."""
        effects = delivery.cancel(failure)
        return [*effects, *self.stop(Signal.FAILED, failure)]

    def stop(self, signal: Signal, failure: Failure) -> list[Effect]:
        """End the room without success; every decode rank is told the same reason."""
        if not self.state.is_pending:
            return self._review()
        self.failure = failure
        self.state.apply(signal)
        effects: list[Effect] = [self._report()]
        for delivery in self.deliveries.values():
            effects += delivery.stop(signal, failure)
        return [*effects, *self._review()]

    def doubt(self) -> list[Effect]:
        """Give up waiting for posts that do not end."""
        for delivery in self.deliveries.values():
            if delivery.has_posts:
                delivery.doubt()
        return self._review()

    def release(self) -> list[Effect]:
        """Take the pages back unproved, as an operator says."""
        for delivery in self.deliveries.values():
            if delivery.has_posts:
                delivery.doubt()
            delivery.release()
        self.state.apply(Signal.RELEASED)
        return [self._report()]

    def refusal(self, peer: PeerId, grant: Grant) -> Failure | None:
        """Why a grant cannot be served, although the room is open."""
        if self.failure is not None:
            return self.failure
        if any(other.rank == peer.rank for other in self.deliveries):  # also of an earlier life of it
            return self._error(FailureReason.ROOM_IN_USE, "an earlier grant of this rank for this room is open")
        if self._num_decode_ranks not in (None, grant.num_decode_ranks):
            detail = f"decode ranks disagree on their number: {self._num_decode_ranks} and {grant.num_decode_ranks}"
            return self._error(FailureReason.PROTOCOL, detail)
        if len(self.deliveries) == self._num_decode_ranks:
            detail = f"all {self._num_decode_ranks} decode ranks have granted already"
            return self._error(FailureReason.PROTOCOL, detail)
        return None

    def _feed(self, delivery: Delivery, chunks: Iterable[Chunk]) -> list[Effect]:
        effects: list[Effect] = []
        for chunk in chunks:
            if not delivery.state.is_pending:  # another delivery has ended the room just now
                break
            missing = delivery.missing(chunk)
            if missing is not None:
                return [*effects, *self.stop(Signal.FAILED, self._error(FailureReason.TOKENS_NOT_SERVED, missing))]
            effects += delivery.offer(chunk)
        return effects

    def _review(self) -> list[Effect]:
        """Draw the room's conclusion from its deliveries; report when a fact has changed."""
        states = [delivery.state for delivery in self.deliveries.values()]
        if self.state.is_going_on and all(state.is_going_on for state in states):
            return []
        before = (self.state.outcome, self.state.memory)
        has_all = self.is_finished and len(states) == self._num_decode_ranks
        is_safe = all(state.is_safe for state in states)
        if has_all and all(state.outcome is Outcome.SUCCESS for state in states):
            self.state.apply(Signal.COMPLETED)
        elif has_all and is_safe:
            self.state.apply(Signal.WRITTEN)
        if is_safe and not self.state.is_pending:
            self.state.apply(Signal.QUIET)
        if any(state.memory is Memory.QUARANTINED for state in states):
            self.state.apply(Signal.DOUBTED)
        after = (self.state.outcome, self.state.memory)
        return [self._report()] if after != before else []

    def _report(self) -> Effect:
        return ReportSender(self.room, self.state.outcome, self.state.memory, self.failure)

    def _check_continues(self, chunk: Chunk) -> None:
        start, stop = chunk.tokens
        if self.is_finished:
            raise LocalProtocolError("chunk after the last one", room=self.room, tokens=chunk.tokens)
        if not 0 <= start <= stop or (start == stop and not chunk.last):
            raise LocalProtocolError("chunk has no tokens", room=self.room, tokens=chunk.tokens)
        if self._chunks and start != self._chunks[-1].tokens[1]:
            raise LocalProtocolError(
                "chunk does not continue the one before",
                room=self.room,
                tokens=chunk.tokens,
                before=self._chunks[-1].tokens,
            )

    def _error(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.ENQUEUE, str(self._me.rank), detail)
