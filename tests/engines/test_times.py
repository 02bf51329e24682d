"""What adapters tell about a request: when it went through the engine, and the trace that it belongs to."""

import itertools
import logging

import pytest

from kvflow.engines.times import MAX_REQUESTS, RequestTimes
from kvflow.engines.vllm.dialect import TICKET, add_trace_context

LOGGER = logging.getLogger("vllm.kvflow")


def times() -> RequestTimes:
    """Return times by a clock that is one second later at each look."""
    return RequestTimes(LOGGER, map(float, itertools.count()).__next__)


def test_a_request_of_decode_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "vllm.kvflow")
    noted = times()
    noted.arrived("a")
    noted.note(["a", "other"], "scheduled")
    noted.note(["a"], "received")
    noted.note(["a"], "received")
    for _ in range(4):
        noted.step(["a", "other"])
    noted.ended("a")
    noted.ended("a")
    noted.ended("other")
    (line,) = caplog.messages
    assert line == (
        "kvflow: a arrived; scheduled after 1000.0 ms, received after 2000.0 ms, first step began after 4000.0 ms, "
        "second step began after 5000.0 ms, last step began after 7000.0 ms, "
        "ended after 8000.0 ms"
    )


def test_nothing_is_kept_unless_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kvflow")
    noted = times()
    noted.arrived("a")
    noted.step(["a"])
    caplog.set_level(logging.DEBUG, "vllm.kvflow")
    noted.ended("a")
    assert not caplog.messages


def test_requests_whose_end_is_not_told_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "vllm.kvflow")
    noted = times()
    for room in range(MAX_REQUESTS + 1):
        noted.arrived(room)
    noted.ended(0)
    assert not caplog.messages
    noted.ended(1)
    assert len(caplog.messages) == 1


def test_ticket_gets_the_context_of_the_request() -> None:
    params = {TICKET: {"room": "1"}}
    for headers in (None, {}, {"tracestate": "x"}):
        add_trace_context(params, headers)
    assert params == {TICKET: {"room": "1"}}
    add_trace_context(params, {"traceparent": f"00-{7:032x}-{8:016x}-01"})
    assert params[TICKET]["traceparent"] == f"00-{7:032x}-{8:016x}-01"
    add_trace_context(None, {"traceparent": "x"})
    add_trace_context({}, {"traceparent": "x"})
