"""Counts of anomalies, rate-limited logging of them, and sums of durations."""

import logging

import pytest

from kvflow.errors import MAX_TEXT, Stage
from kvflow.observe.histograms import Histogram
from kvflow.observe.logs import get_logger
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import MAX_LINES, MAX_SOURCES, AnomalyLog
from kvflow.wire.messages import PeerId, RankId
from tests.observe.lines import printed

DECODE = PeerId(RankId("decode", 0), 7)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_one_line_for_each_kind_and_interval() -> None:
    clock = FakeClock()
    with printed() as lines:
        log = AnomalyLog(get_logger(), clock, interval_s=1.0)
        for _ in range(50):
            log.count("late")
        log.count("odd")
        clock.now += 0.5
        log.count("late")
        clock.now += 0.5
        log.count("late")
        log.count("late")
    assert [(line["event"], line["count"]) for line in lines.objects()] == [("late", 1), ("odd", 1), ("late", 52)]
    assert log.counts == {"late": 53, "odd": 1}


def test_flood_costs_one_line_an_interval() -> None:
    clock = FakeClock()
    with printed() as lines:
        log = AnomalyLog(get_logger(), clock, interval_s=2.0)
        for _ in range(1_000):
            clock.now += 0.01
            log.count("late")
    assert len(lines.texts()) == 5
    assert log.counts == {"late": 1_000}


def test_peers_that_are_made_up_cost_no_more_lines_than_others() -> None:
    clock = FakeClock()
    with printed() as lines:
        log = AnomalyLog(get_logger(), clock, interval_s=1.0)
        for number in range(5_000):
            log.count("hello_refused", DECODE._replace(incarnation=number))
        log.count("odd")
        clock.now += 1.0
        log.count("hello_refused", DECODE)
    assert len(lines.texts()) == MAX_LINES + 2


def test_lines_that_peers_cause_are_bounded_and_the_others_counted() -> None:
    clock = FakeClock()
    with printed() as lines:
        log = AnomalyLog(get_logger(), clock, interval_s=1.0)
        for number in range(1_000):
            log.log(logging.INFO, "peer_connected", {"peer": number, "detail": "x" * 1_000})
        log.log(logging.INFO, "peer_disconnected", {})
        clock.now += 1.0
        log.log(logging.INFO, "peer_connected", {"peer": 1_000})
    events = [line["event"] for line in lines.objects()]
    assert events == ["peer_connected"] * MAX_LINES + ["log_lines_omitted", "peer_disconnected", "peer_connected"]
    assert len(str(lines.objects()[0]["detail"])) < 2 * MAX_TEXT
    assert log.counts == {"log_lines_omitted": 1_000 - MAX_LINES}


def test_line_says_who_and_what() -> None:
    with printed() as lines:
        log = AnomalyLog(get_logger(engine_rank=3), FakeClock())
        log.count("late", DECODE, room=7)
        log.count("odd")
    first, second = lines.objects()
    assert (first["peer"], first["room"], first["engine_rank"], first["level"]) == (str(DECODE), 7, 3, "warning")
    assert "peer" not in second


def test_text_of_a_peer_is_cut() -> None:
    with printed() as lines:
        AnomalyLog(get_logger(), FakeClock()).count("hello_refused", detail="x" * 1_000_000, room=7)
    (line,) = lines.objects()
    assert line["detail"] == "x" * MAX_TEXT + "... (1000000 characters)"
    assert line["room"] == 7


def test_peers_without_end_do_not_fill_the_memory() -> None:
    log = AnomalyLog(get_logger(), FakeClock())
    for number in range(3 * MAX_SOURCES):
        log.count("late", PeerId(RankId("decode", 0), number))
    assert len(log._logged_at) <= MAX_SOURCES
    assert log.counts == {"late": 3 * MAX_SOURCES}


def test_counts_go_on_while_nothing_is_printed() -> None:
    log = AnomalyLog(get_logger(), FakeClock())
    log.count("late")
    assert log.counts == {"late": 1}


def test_values_are_counted_in_the_first_bucket_whose_bound_they_do_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.add(value)
    assert (histogram.counts, histogram.count, histogram.total, histogram.maximum) == ([2, 1, 1], 4, 6.0, 3.0)


def test_copy_of_a_histogram_does_not_change() -> None:
    histogram = Histogram()
    copy = histogram.copied()
    histogram.add(1.0)
    assert (copy.count, histogram.count) == (0, 1)


@pytest.mark.parametrize("stage", Stage)
def test_stages_are_timed_apart(stage: Stage) -> None:
    times = StageTimes()
    times.stages[stage].add(0.5)
    assert times.stages.keys() == set(Stage)
    assert [name for name, duration in times.stages.items() if duration.count] == [stage]
    assert times.stages[stage].total == 0.5


def test_two_ranks_do_not_share_times() -> None:
    first, second = StageTimes(), StageTimes()
    first.stages[Stage.SUBMIT].add(1.0)
    assert second.stages[Stage.SUBMIT].count == 0
