"""Puts the clocks of several ranks on one time line.

Monotonic clocks of different hosts have nothing in common, but nothing arrives before it is sent. Each message from one
side to the other bounds the offset of their clocks from one direction; messages in both directions enclose it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvflow.cli.incident.sides import Pair, Side
from kvflow.wire.messages import PeerId

__all__ = ["Offset", "align_clocks", "describe_offsets"]


class Offset(NamedTuple):
    """What has to be subtracted from the times of a side, in seconds, and how wrong that may be.

    An infinite error means that messages were seen in one direction at most.
    """

    shift_s: float
    error_s: float


def align_clocks(sides: Sequence[Side], pairs: Sequence[Pair]) -> dict[PeerId, Offset]:
    """Return the offset of each side against the first; the errors of sides that are compared over others add up."""
    offsets = {sides[0].me: Offset(0.0, 0.0)} if sides else {}
    while True:
        best = min(
            (
                (side.me, Offset(offsets[known].shift_s + found.shift_s, offsets[known].error_s + found.error_s))
                for side in sides
                if side.me not in offsets
                for known in offsets
                if (found := _compare(known, side.me, pairs)) is not None
            ),
            key=lambda item: item[1].error_s,
            default=None,
        )
        if best is None:
            return {side.me: offsets.get(side.me, Offset(0.0, math.inf)) for side in sides}
        offsets[best[0]] = best[1]


def _compare(known: PeerId, other: PeerId, pairs: Sequence[Pair]) -> Offset | None:
    """Return by how much the clock of `other` is ahead; None if no message between the two was seen on both sides."""
    low, high = -math.inf, math.inf
    for pair in pairs:
        if pair.heard_at is None:
            continue
        if (pair.sender.me, pair.receiver.me) == (known, other):
            high = min(high, pair.heard_at - pair.sent_at)
        elif (pair.sender.me, pair.receiver.me) == (other, known):
            low = max(low, pair.sent_at - pair.heard_at)
    if math.isinf(low) and math.isinf(high):
        return None
    if math.isinf(low) or math.isinf(high):
        return Offset(low if math.isinf(high) else high, math.inf)
    return Offset((low + high) / 2, abs(high - low) / 2)


def describe_offsets(sides: Sequence[Side], offsets: Mapping[PeerId, Offset]) -> list[str]:
    """Return a line for each side but the first."""
    lines = []
    for side in sides[1:]:
        shift_s, error_s = offsets[side.me]
        if math.isinf(error_s):
            lines.append(f"clock of {side.name}: too few messages to compare it; its times may be off by any amount")
        else:
            ahead = f"{abs(shift_s):.6f} s {'ahead of' if shift_s >= 0 else 'behind'} {sides[0].name}"
            lines.append(f"clock of {side.name}: {ahead}, give or take {error_s * 1e3:.3f} ms")
    return lines
