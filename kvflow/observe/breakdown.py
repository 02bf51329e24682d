"""Where the time of a transfer went, on both sides. Pure."""

from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import astuple

from kvflow.state.effects import ClockOffset, LastPiece

__all__ = ["PARTS", "Breakdown", "Timeline"]


class Breakdown(msgspec.Struct, frozen=True):
    """Where the time of a received transfer went, in seconds. The parts follow each other, and add up to `total_s`.

    They are those of one piece, the last one to arrive, because nothing else held up the transfer at its end. The parts
    on prefill are measured by its clock; where they meet those on decode, they are off by up to `clock_error_s`.

    Attributes:
        wait_for_grant_s: From the start of the receive (from the grant, if the room was announced) until prefill had
            the grant: the instance was looked up and connected, if it was not, and the message was on its way.
        wait_for_data_s: Until the prefill engine had opened the room and offered the piece, and its data was ready.
        queue_s: Until the piece had its turn, credit and, if it is packed, staging slots.
        plan_s: Until it was planned and, if it is packed, gathered.
        post_s: Until the transport was given the write.
        wire_s: Until it had landed: until decode's transport found its notice if notices go in band, else until
            prefill's transport reported the end of the write.
        notice_s: Until the event loop of the decode rank handled the notice.
        aggregate_s: Until the transfer was complete: a packed piece was scattered, digests were compared.
        engine_noticed_s: Until the engine had the result from `done()` or `result()`; 0 before that, or if it only
            looks at `handover`.
        clock_error_s: The difference between the clocks of the two ranks is known to within this time. It is half of
            the shortest round trip, of heartbeats or of the transfer itself.
        engine_rank: Engine rank of the prefill rank that sent the piece.
    """

    wait_for_grant_s: float
    wait_for_data_s: float
    queue_s: float
    plan_s: float
    post_s: float
    wire_s: float
    notice_s: float
    aggregate_s: float
    engine_noticed_s: float
    clock_error_s: float
    engine_rank: int

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, in order, in seconds."""
        return dict(zip(PARTS, astuple(self), strict=False))

    @property
    def total_s(self) -> float:
        """Seconds from the start of the receive until the engine had the result."""
        return sum(self.parts.values())

    @property
    def slowest(self) -> str:
        """Name of the longest part, such as "wire"."""
        parts = self.parts
        return max(parts, key=parts.__getitem__)


PARTS: Final = tuple(name.removesuffix("_s") for name in Breakdown.__struct_fields__[:-2])
"""Names of the parts, in order."""


class Timeline(NamedTuple):
    """When a transfer went through its stages on decode, by the clock of its rank, with what prefill has told.

    Attributes:
        opened_at: The receive started.
        piece: The piece that arrived last.
        complete_at: The transfer was complete.
        noticed_at: The engine had the result; None if it has not yet.
    """

    opened_at: float
    piece: LastPiece
    complete_at: float
    noticed_at: float | None = None

    def break_down(self) -> Breakdown | None:
        """Return the parts; None if prefill has not told its times."""
        piece, stamps = self.piece, self.piece.stamps
        if stamps is None:
            return None
        bounds = _offset(piece)
        offset_s = (bounds.low + bounds.high) / 2
        there = [stamps.granted_at, stamps.ready_at, stamps.taken_at, stamps.planned_at, stamps.posted_at]
        there += [] if stamps.written_at is None else [stamps.written_at]
        here = [self.opened_at, *(min(at + offset_s, piece.landed_at) for at in there)]
        here += [piece.landed_at] if stamps.written_at is None else []
        here += [piece.arrived_at, self.complete_at]
        here.append(self.complete_at if self.noticed_at is None else self.noticed_at)
        grant, data, queue, plan, post, wire, notice, aggregate, noticed = (
            after - before for before, after in pairwise(accumulate(here, max))
        )
        error_s = abs(bounds.high - bounds.low) / 2
        return Breakdown(grant, data, queue, plan, post, wire, notice, aggregate, noticed, error_s, piece.engine_rank)


def _offset(piece: LastPiece) -> ClockOffset:
    """Return by how much decode's clock is ahead of prefill's, at least and at most.

    A transfer is a round trip as well: its grant left before it arrived, and its notice arrived after it left.
    """
    stamps, at = piece.stamps, piece.arrived_at
    if stamps is None:
        return ClockOffset(0.0, 0.0, at)
    left_at = stamps.posted_at if stamps.written_at is None else stamps.written_at
    low, high = piece.asked_at - stamps.granted_at, piece.landed_at - left_at
    if piece.clock is not None:
        known = piece.clock.widened(at)
        both = max(low, known.low), min(high, known.high)
        low, high = both if both[0] <= both[1] else (known.low, known.high)
    return ClockOffset(low, high, at)
