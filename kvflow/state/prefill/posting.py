"""Decides which queued pieces are planned and posted now, and which plans are made off the event loop. Pure."""

from typing import Final

from msgspec.structs import replace

from kvflow.geometry.pack import is_head_major
from kvflow.state import events as ev
from kvflow.state.effects import Piece, PlanPiece, PostPiece, PrefillEffect, YieldTurn
from kvflow.state.prefill.queue import PieceQueue, Turn
from kvflow.state.prefill.rooms import Rooms
from kvflow.state.prefill.slots import RemoteSlots
from kvflow.state.settings import PrefillSettings
from kvflow.wire.messages import Staged

__all__ = ["Posting"]

PIECES_PER_TURN: Final = 4
"""Pieces that are planned and posted before the core yields to the event loop."""

BYTES_GATHERED_INLINE: Final = 2**18
"""Host memory that may be gathered on the event loop, in bytes; larger pieces are gathered off it."""

SLOW_PLANS_AT_ONCE: Final = 1
"""Large plans that are made off the event loop at the same time."""


class Posting:
    """Takes pieces from the queue in turns, so that neither the event loop nor a small piece waits for a large plan.

    Args:
        settings: Settings of this rank.
        queue: The pieces that wait.
        rooms: Rooms of the pieces.
        slots: Staging slots of decode ranks.
    """

    def __init__(self, settings: PrefillSettings, queue: PieceQueue, rooms: Rooms, slots: RemoteSlots) -> None:
        self._settings = settings
        self._queue = queue
        self._rooms = rooms
        self._slots = slots
        self._continues = False
        self._effort_left = settings.limits.descriptors_planned_inline
        self._slow_plans: dict[tuple[ev.DeliveryId, int], None] = {}

    def resume(self) -> None:
        """Note that the event loop has run other tasks."""
        self._continues = False

    def take_turn(self, now: float) -> list[PrefillEffect]:
        """Send queued pieces as long as planning them is cheap, then yield to the event loop."""
        effects: list[PrefillEffect] = []
        if not self._queue.candidates or self._continues:  # nothing can be taken, or the event loop is to have its turn
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

    def end_slow_plan(self, delivery: ev.DeliveryId, seq: int) -> None:
        """Note that the plan of a piece was made or has failed; another one may be made off the event loop."""
        if (delivery, seq) in self._slow_plans:
            del self._slow_plans[delivery, seq]
            self._queue.resume()

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
        """Post a piece at once, or plan it off the event loop first."""
        if piece.slots is not None:
            staged = Staged(piece.slots.remote, is_head_major(piece.link.route))
            piece = replace(piece, notice=replace(piece.notice, staged=staged))
        if piece.grant.digest or (piece.delivery, piece.seq) in self._slow_plans:
            return [PlanPiece(piece), *self._rooms.taken(piece, now, is_posted=False)]
        if piece.slots is not None:
            self._slots.posted(piece.delivery, piece.seq, piece.notice)
        return [PostPiece(piece), *self._rooms.taken(piece, now, is_posted=True)]
