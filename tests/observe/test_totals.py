"""Totals of receives: what is counted later is complete, and only one in a hundred is slow."""

import math

from kvflow.observe.totals import SLOWEST, Received, TransferTotals


def received(elapsed_s: float) -> Received:
    return Received(elapsed_s, elapsed_s / 2, 100, None)


def test_nothing_is_slow_before_there_were_a_hundred() -> None:
    totals = TransferTotals()
    totals.received += [received(0.001)] * (SLOWEST - 1)
    assert totals.copied().slow_s == math.inf
    totals.received.append(received(0.001))
    assert totals.copied().slow_s == 0.001


def test_at_most_one_in_a_hundred_is_slower() -> None:
    totals = TransferTotals()
    times_s = [0.0001 * (number + 1) for number in range(1_000)]
    totals.received += map(received, times_s)
    totals.count_received()
    assert 0 < sum(time_s > totals.slow_s for time_s in times_s) <= 10 or totals.slow_s >= max(times_s)
    totals.received += [received(50.0)] * 11
    totals.count_received()
    assert totals.slow_s == 50.0
    assert totals.handover_s.count == 1_011
    assert totals.received == []


def test_copy_has_what_was_noted_and_does_not_change() -> None:
    totals = TransferTotals()
    totals.noticed_s += [0.1, 0.2]
    copy = totals.copied()
    totals.noticed_s.append(0.3)
    totals.count_received()
    assert copy.parts_s["engine_noticed"].count == 2
    assert totals.parts_s["engine_noticed"].count == 3
    assert copy.parts_s["wire"].count == 0
