"""What becomes of queued pieces: which are planned, on the event loop or off it, and posted; and how they end. Pure."""

from typing import Final

from msgspec.structs import replace

from kvflow.errors import LocalProtocolError
from kvflow.geometry.pack import is_head_major
from kvflow.state import events as ev
from kvflow.state.effects import CountAnomaly, DropPlan, Piece, PlanPiece, PostPiece, PostPlan, PrefillEffect, YieldTurn
from kvflow.state.prefill.delivery import SendContext
from kvflow.state.prefill.queue import PieceEnd, Turn
from kvflow.state.prefill.rooms import Rooms
from kvflow.state.tables import Signal
from kvflow.wire.messages import Staged

__all__ = ["Posting"]

PIECES_PER_TURN: Final = 4
"""Pieces that are planned and posted before the core yields to the event loop."""

BYTES_GATHERED_INLINE: Final = 2**18
"""Host memory that may be gathered on the event loop, in bytes; larger pieces are gathered off it."""

SLOW_PLANS_AT_ONCE: Final = 1
"""Large plans that are made off the event loop at the same time."""


class Posting:
    """Takes pieces from the queue in turns, so that neither the event loop nor a small piece waits for a large plan."""

    def __init__(self, context: SendContext, rooms: Rooms) -> None:
        self._context = context
        self._settings, self._queue, self._slots = context.settings, context.queue, context.slots
        self._rooms = rooms
        self._continues = False
        self._effort_left = context.settings.limits.descriptors_planned_inline
        self._slow_plans: dict[tuple[ev.DeliveryId, int], None] = {}

    def resume(self) -> None:
        """Note that the event loop has run other tasks."""
        self._continues = False

    def take_turn(self, now: float) -> list[PrefillEffect]:
        """Send queued pieces as long as planning them is cheap, then yield to the event loop."""
        effects: list[PrefillEffect] = []
        has_candidates = self._queue.lanes.candidates or self._queue.background.candidates
        if not has_candidates or self._continues:  # nothing can be taken, or the event loop is to have its turn
            return effects
        for _ in range(PIECES_PER_TURN):
            piece = self._queue.pop(now, self._judge)
            if piece is not None:
                effects += self._send_piece(piece, now)
            elif self._effort_left < 0 or len(self._slow_plans) == SLOW_PLANS_AT_ONCE or not self._queue.resume():
                break
        else:
            self._continues = True
        if self._continues:
            effects.append(YieldTurn())
        self._effort_left = self._settings.limits.descriptors_planned_inline
        return effects

    def _judge(self, piece: Piece, is_packed: bool) -> Turn:
        """Decide whether a piece is sent in this turn, by the work for it in descriptors, and note if that is slow."""
        limit, staging = self._settings.limits.descriptors_planned_inline, self._settings.staging
        effort = piece.cost.num_descriptors
        if is_packed and staging is not None:  # gathering counts as the planning that takes as long
            effort = piece.cost.num_bytes * limit // BYTES_GATHERED_INLINE if staging.gathers_inline else limit + 1
        if effort > limit:
            if len(self._slow_plans) == SLOW_PLANS_AT_ONCE:
                return Turn.DEFERRED
            self._slow_plans[piece.delivery, piece.seq] = None
            return Turn.TAKEN
        self._effort_left -= effort
        self._continues = self._effort_left < 0
        return Turn.OVER if self._continues else Turn.TAKEN

    def _send_piece(self, piece: Piece, now: float) -> list[PrefillEffect]:
        """Post a piece from the queue at once, or plan it off the event loop first."""
        room, delivery = self._rooms.find_delivery(piece.delivery)
        if room is None or delivery is None:
            raise LocalProtocolError("piece of an unknown delivery", delivery=piece.delivery)
        is_posted = not piece.grant.digest and (piece.delivery, piece.seq) not in self._slow_plans
        if piece.slots is not None:
            staged = Staged(piece.slots.remote, is_head_major(piece.link.route))
            piece = replace(piece, notice=replace(piece.notice, staged=staged))
            if is_posted:
                self._slots.posted(piece.delivery, piece.seq, piece.notice)
        effect = PostPiece(piece) if is_posted else PlanPiece(piece)
        return [effect, *self._rooms.follow(room, delivery.taken(piece, now, is_posted=is_posted), now)]

    # Reports from the stages -----------------------------------------------------------------------------------------

    def data_ready(self, event: ev.DataReady, now: float) -> list[PrefillEffect]:
        """Queue pieces whose data is ready; fail the room if the device has failed."""
        room, delivery = self._rooms.find_delivery(event.delivery)
        if room is None or delivery is None or not delivery.awaits(event.wait):
            return []
        if event.failure is not None:
            return self._rooms.fail(room, event.failure, now)
        return delivery.data_ready(now)

    def plan_finished(self, plan: ev.PlanFinished, now: float) -> list[PrefillEffect]:
        """Post a finished plan, unless its delivery has ended."""
        self._end_slow_plan(plan.delivery, plan.seq)
        room, delivery = self._rooms.find_delivery(plan.delivery)
        effects: list[PrefillEffect] = [DropPlan(plan.delivery, plan.seq)]
        if delivery is not None:
            effects = delivery.plan_finished(plan)
        for effect in effects:
            match effect:
                case DropPlan():
                    self._queue.end_piece(plan.delivery, plan.seq, PieceEnd.DROPPED, now)
                case PostPlan(notice=notice) if notice.staged is not None:
                    self._slots.posted(plan.delivery, plan.seq, notice)
                case PostPlan():
                    self._queue.release_slots(plan.delivery, plan.seq)
        return effects if room is None else self._rooms.follow(room, effects, now)

    def piece_went_direct(self, event: ev.PieceWentDirect) -> list[PrefillEffect]:
        """Take back the slots of a piece that was written directly."""
        self._slots.not_posted(event.delivery, event.seq)
        self._queue.release_slots(event.delivery, event.seq)
        delivery = self._rooms.find_delivery(event.delivery)[1]
        if delivery is not None:
            delivery.went_direct(event.seq)
        return []

    def plan_failed(self, event: ev.PlanFailed, now: float) -> list[PrefillEffect]:
        """Fail the room of a piece that cannot be planned."""
        self._end_slow_plan(event.delivery, event.seq)
        self._slots.not_posted(event.delivery, event.seq)
        self._queue.end_piece(event.delivery, event.seq, PieceEnd.DROPPED, now)
        room, delivery = self._rooms.find_delivery(event.delivery)
        if room is None or delivery is None:
            unfenced = self._rooms.unfenced.find(event.delivery)
            if unfenced is None:
                return []
            unfenced.not_posted(event.seq)
            return self._rooms.unfenced.settle(unfenced, unfenced.post_ended(event.seq, is_written=False))
        delivery.not_posted(event.seq)
        stopped = room.stop(Signal.FAILED, event.failure)
        settled = delivery.post_ended(event.seq, is_written=False)
        return self._rooms.follow(room, [*stopped, *settled], now)

    def post_ended(self, event: ev.PostEnded, now: float) -> list[PrefillEffect]:
        """Note that a post has ended."""
        self._queue.end_piece(event.delivery, event.seq, PieceEnd.ENDED, now)
        self._slots.ended(event, now)
        room, delivery = self._rooms.find_delivery(event.delivery)
        if room is None or delivery is None:
            unfenced = self._rooms.unfenced.find(event.delivery)
            if unfenced is not None:
                effects = unfenced.post_ended(event.seq, is_written=False, lingers=event.lingers)
                return self._rooms.unfenced.settle(unfenced, effects)
            return [CountAnomaly("end_of_unknown_post", event.delivery.peer, event.delivery.room)]
        return self._rooms.follow(room, room.post_ended(delivery, event), now)

    def post_in_doubt(self, event: ev.PostInDoubt, now: float) -> list[PrefillEffect]:
        """Note that the transport cannot tell whether a post has ended."""
        self._context.release_credit(event.delivery, event.seq, now)  # it must not block others until it ends
        room, delivery = self._rooms.find_delivery(event.delivery)
        if room is None or delivery is None:
            return [CountAnomaly("doubt_of_unknown_post", event.delivery.peer, event.delivery.room)]
        return self._rooms.follow(room, room.post_in_doubt(delivery, event.failure), now)

    def _end_slow_plan(self, delivery: ev.DeliveryId, seq: int) -> None:
        """Note that a plan was made or has failed; another one may be made off the event loop."""
        if (delivery, seq) in self._slow_plans:
            del self._slow_plans[delivery, seq]
            self._queue.resume()
