"""Breakdowns of transfers: their parts are those that were measured, whatever the clocks show."""

import math
from typing import Final

import pytest

from kvflow.observe.breakdown import Breakdown, Timeline
from kvflow.state.effects import ClockOffset, LastPiece
from kvflow.wire.messages import Stamps

HOUR: Final = 3_600.0

PARTS: Final = (0.010, 0.200, 0.003, 0.0005, 0.00005, 0.040, 0.002, 0.001, 0.004)
"""As they were, from the wait for the grant to the engine."""


def timeline(
    apart_s: float,
    *,
    in_band: bool = True,
    round_trip_s: float | None = 0.0004,
    skew: float = 0.5,
    asked_after_s: float = 0.002,
) -> Timeline:
    """Return the timeline of a transfer with `PARTS`, if prefill's clock is ahead of decode's.

    Of the round trip that compares the clocks, the way there takes a share of `skew`.
    """
    opened_at = 100.0
    at = [opened_at]
    for part in PARTS:
        at.append(at[-1] + part)
    granted, ready, taken, planned, posted, landed, arrived, complete, noticed = at[1:]
    before = (granted + apart_s, ready + apart_s, taken + apart_s)
    stamps = Stamps(*before, planned + apart_s, posted + apart_s, None if in_band else landed + apart_s)
    clock = None
    if round_trip_s is not None:
        low = -apart_s - skew * round_trip_s
        clock = ClockOffset(low, low + round_trip_s, arrived)
    found_at = landed if in_band else arrived
    piece = LastPiece(3, stamps, opened_at + asked_after_s, found_at, arrived, clock)
    return Timeline(opened_at, piece, complete, noticed)


def broken_down(timeline: Timeline) -> Breakdown:
    found = timeline.break_down()
    assert found is not None
    assert found.total_s == pytest.approx(sum(PARTS), abs=1e-9)
    assert min(found.parts.values()) >= 0
    return found


@pytest.mark.parametrize("apart_s", [0.0, HOUR, -HOUR])
@pytest.mark.parametrize("in_band", [True, False])
def test_parts_are_those_that_were_measured(apart_s: float, in_band: bool) -> None:
    found = broken_down(timeline(apart_s, in_band=in_band))
    assert list(found.parts.values()) == pytest.approx(PARTS, abs=1e-9)
    assert list(found.parts)[:2] == ["wait_for_grant", "wait_for_data"]
    assert found.slowest == "wait_for_data"
    assert found.clock_error_s == pytest.approx(0.0002)
    assert found.engine_rank == 3


@pytest.mark.parametrize("skew", [0.0, 0.2, 0.8, 1.0])
@pytest.mark.parametrize("round_trip_s", [0.0004, 0.05, None])
def test_error_of_the_clocks_is_within_what_is_stated(skew: float, round_trip_s: float | None) -> None:
    """Only the two parts where the clocks meet are off, each by the same amount."""
    found = broken_down(timeline(HOUR, round_trip_s=round_trip_s, skew=skew))
    there = list(zip(found.parts.values(), PARTS, strict=True))
    off = [abs(found_s - part_s) for found_s, part_s in there]
    assert max(off[0], off[5]) <= found.clock_error_s + 1e-9
    assert off[1:5] + off[6:] == pytest.approx([0.0] * 7, abs=1e-9)
    assert off[0] == pytest.approx(off[5], abs=1e-9)


def test_a_transfer_bounds_the_clocks_itself() -> None:
    """Nothing arrives before it leaves: a grant took at most 8 ms, so the wire took at least 32 ms of 48."""
    found = broken_down(timeline(HOUR, round_trip_s=None))
    assert found.clock_error_s == pytest.approx((0.008 + 0.040) / 2)
    assert broken_down(timeline(HOUR, round_trip_s=10.0)).clock_error_s == pytest.approx(found.clock_error_s)


@pytest.mark.parametrize("stamps", [[0.0] * 5, [5e9] * 5, [9.0, 7.0, 5.0, 3.0, 1.0], [-1e9, 1e9, -1e9, 1e9, 0.0]])
def test_stamps_that_cannot_be_true_change_only_the_parts(stamps: list[float]) -> None:
    one = timeline(HOUR)
    broken_down(one._replace(piece=LastPiece(3, Stamps(*stamps), 100.0, 100.25, 100.2555, one.piece.clock)))


def test_bounds_widen_as_clocks_drift() -> None:
    fresh = ClockOffset(-0.001, 0.001, 50.0)
    later = fresh.widened(150.0)
    assert (later.low, later.high) == pytest.approx((-0.021, 0.021))
    assert later.widened(150.0) == later
    assert math.isclose(later.high - later.low, 0.042)


def test_an_older_peer_tells_nothing() -> None:
    one = timeline(0.0)
    assert one._replace(piece=LastPiece(3, None, 100.0, 100.2, 100.3, None)).break_down() is None


def test_an_engine_that_has_not_looked_has_not_noticed() -> None:
    found = timeline(0.0)._replace(noticed_at=None).break_down()
    assert found is not None
    assert found.engine_noticed_s == 0.0
    assert found.total_s == pytest.approx(sum(PARTS[:-1]))
