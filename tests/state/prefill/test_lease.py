"""When the lease of a room starts, what does not age it, and pages that the engine needs for another room."""

import pytest

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.effects import PrefillEffect, ReportSender
from kvflow.wire.messages import Announce, Failed, Failure
from tests.support.cores import DECODE, PrefillDriver, grant, messages, of_kind, reports
from tests.support.sending import ROOM, chunk

GRANT_S = Timeouts().grant_s
FAILED = [("failed", "draining"), ("failed", "safe")]
SHORT = Failure(FailureReason.CAPACITY, Stage.ENQUEUE, "p/0", "needed")


def computed(*, has_lease: bool) -> PrefillDriver:
    """Return a rank with a room of which everything was offered."""
    driver = PrefillDriver()
    driver.connect()
    driver(ev.SendOpened(ROOM, has_lease))
    driver(chunk(0, 8, last=True))
    return driver


def test_lease_starts_when_the_ticket_has_left() -> None:
    core = computed(has_lease=False)
    assert reports(core.pass_time(3 * GRANT_S)) == []
    core(ev.LeaseStarted(ROOM))
    assert reports(core.pass_time(GRANT_S - 1)) == []
    assert reports(core.pass_time(2)) == FAILED
    assert core(ev.LeaseStarted(ROOM)) == []  # the room is gone


def test_process_that_stood_still_hears_decode_ranks_first() -> None:
    core = computed(has_lease=True)
    core.now += GRANT_S + 20  # suspended
    assert reports(core(ev.TimePassed())) == []
    core.hear(DECODE, Announce(room=ROOM, generation=1, num_decode_ranks=1, timeout_s=600.0))
    assert reports(core.pass_time(GRANT_S)) == []


def test_room_ends_although_the_process_stood_still_once() -> None:
    core = computed(has_lease=True)
    core.now += GRANT_S + 20
    core(ev.TimePassed())
    assert reports(core.pass_time(21)) == FAILED


@pytest.mark.parametrize(
    ("asked", "with_announced", "is_ended"),
    [("", False, True), ("announced", False, False), ("announced", True, True), ("granted", True, False)],
)
def test_pages_are_reclaimed_unless_decode_needs_them(asked: str, *, with_announced: bool, is_ended: bool) -> None:
    core = computed(has_lease=False)
    if asked == "announced":
        core.hear(DECODE, Announce(room=ROOM, generation=1, num_decode_ranks=1, timeout_s=600.0))
    elif asked:
        core.hear(DECODE, grant())
    effects: list[PrefillEffect] = core(ev.ReclaimAsked(ROOM, with_announced, SHORT))
    assert (reports(effects) == FAILED) is is_ended
    told = [message.failure.reason for _, message in messages(effects, Failed) if isinstance(message, Failed)]
    assert told == ([FailureReason.CAPACITY] if asked and is_ended else [])
    assert bool(of_kind(effects, ReportSender)) is is_ended
