"""Rooms that decode ranks announce before they have pages: prefill waits while those ranks live."""

import pytest

from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state.effects import PrefillEffect, ReportGranted, ReportSender
from kvflow.wire.messages import Announce, Cancel, Decline, Drained, Failed, Failure, Goodbye, PeerId, Ping
from tests.support.cores import (
    ABORTED,
    DECODE,
    OTHER_DECODE,
    PrefillDriver,
    grant,
    messages,
    of_kind,
    reports,
)
from tests.support.sending import ROOM, chunk, pieces, posted

OPEN = ev.SendOpened(ROOM)
LAST = chunk(0, 8, last=True)
FAILED = [("failed", "draining"), ("failed", "safe")]
GRANT_S = Timeouts().grant_s
OPEN_S = Timeouts().open_s


def announce(generation: int = 1, num_decode_ranks: int = 1, timeout_s: float = 600.0) -> Announce:
    return Announce(room=ROOM, generation=generation, num_decode_ranks=num_decode_ranks, timeout_s=timeout_s)


@pytest.fixture
def core() -> PrefillDriver:
    driver = PrefillDriver()
    driver.connect()
    driver.connect(OTHER_DECODE)
    return driver


@pytest.fixture
def opened(core: PrefillDriver) -> PrefillDriver:
    """An announced room, all of which has been computed."""
    core(OPEN)
    core(LAST)
    assert core.hear(DECODE, announce()) == []
    return core


def failure(effects: list[PrefillEffect]) -> Failure | None:
    found: Failure | None = of_kind(effects, ReportSender)[0].failure
    return found


def refusals(effects: list[PrefillEffect]) -> list[tuple[PeerId, int, FailureReason]]:
    """Return recipient, generation and reason of each Failed; each must report that nothing was written."""
    found = [(to, message) for to, message in messages(effects, Failed) if isinstance(message, Failed)]
    assert all(message.drained for _, message in found)
    return [(to, message.generation, message.failure.reason) for to, message in found]


def test_a_room_that_is_announced_waits_for_longer_than_grant_s(opened: PrefillDriver) -> None:
    assert reports(opened.pass_time(10 * GRANT_S)) == []
    effects = opened.hear(DECODE, grant())
    assert of_kind(effects, ReportGranted) == [ReportGranted(ROOM, {"kv": (0, 8)})]
    assert posted(effects) == [(0, (0, 8))]


@pytest.mark.parametrize("others", ["nobody", "has granted", "has announced"])
def test_a_room_waits_for_all_who_have_announced_and_not_for_who_has_not(core: PrefillDriver, others: str) -> None:
    core(OPEN)
    core(LAST)
    core.hear(DECODE, announce(num_decode_ranks=2))
    if others == "has granted":
        [piece] = pieces(core.hear(OTHER_DECODE, grant(num_decode_ranks=2)))
        core(ev.PostEnded(piece.delivery, piece.seq, None))
    elif others == "has announced":
        core.hear(OTHER_DECODE, announce(num_decode_ranks=2))
    effects = core.pass_time(GRANT_S)
    if others == "nobody":
        assert reports(effects) == FAILED
        assert refusals(effects) == [(DECODE, 1, FailureReason.NOT_GRANTED)]
        found = failure(effects)
        assert found is not None
        assert found.detail == f"1 of 2 decode ranks asked for the room within {GRANT_S} s"
    else:
        assert reports(effects) == []


def test_the_clock_of_a_room_stops_when_the_last_one_announces(core: PrefillDriver) -> None:
    core(OPEN)
    core(LAST)
    core.pass_time(GRANT_S - 2)
    core.hear(DECODE, announce())
    assert reports(core.pass_time(GRANT_S)) == []


def test_a_repeated_announcement_says_nothing_new(opened: PrefillDriver) -> None:
    assert opened.hear(DECODE, announce()) == []
    opened.hear(DECODE, grant())
    assert opened.hear(DECODE, announce()) == []
    assert opened.core.counts().announced == 0


def test_an_announcement_is_kept_until_its_room_is_opened(core: PrefillDriver) -> None:
    core.hear(DECODE, announce())
    assert core.core.counts().announced == 1
    assert refusals(core.pass_time(10 * OPEN_S)) == []
    core(OPEN)
    core(LAST)
    assert core.core.counts().announced == 1
    assert reports(core.pass_time(GRANT_S)) == []
    assert posted(core.hear(DECODE, grant())) == [(0, (0, 8))]


def test_an_announcement_is_kept_no_longer_than_it_lasts_and_a_lease(core: PrefillDriver) -> None:
    core.hear(DECODE, announce(timeout_s=100.0))
    core.pass_time(50)
    core.hear(DECODE, announce(timeout_s=100.0))
    assert refusals(core.pass_time(52)) == []
    assert refusals(core.pass_time(2)) == [(DECODE, 1, FailureReason.UNKNOWN_ROOM)]
    assert core.core.counts().announced == 0


def test_a_room_waits_no_longer_than_its_announcement_lasts_and_a_lease(core: PrefillDriver) -> None:
    """A live decode rank's last message may be in flight for that long."""
    core.hear(DECODE, announce(timeout_s=100.0))
    core.pass_time(50)
    core(OPEN)
    core(LAST)
    assert reports(core.pass_time(52)) == []
    effects = core.pass_time(2)
    assert reports(effects) == FAILED
    assert refusals(effects) == [(DECODE, 1, FailureReason.DEADLINE)]


def test_a_grant_takes_the_place_of_its_announcement_before_the_room_is_opened(core: PrefillDriver) -> None:
    core.hear(DECODE, announce())
    assert core.hear(DECODE, grant()) == []
    assert (core.core.counts().announced, core.core.counts().waiting_grants) == (0, 1)
    assert core.hear(DECODE, announce()) == [], "it comes late"
    assert core.core.counts().waiting_grants == 1
    assert refusals(core.pass_time(OPEN_S)) == [(DECODE, 1, FailureReason.UNKNOWN_ROOM)]


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("later", [announce(2), grant(generation=2)], ids=["announced", "granted"])
def test_a_later_generation_takes_the_place_of_an_announcement(
    core: PrefillDriver, later: Announce, is_open: bool
) -> None:
    if is_open:
        core(OPEN)
    core.hear(DECODE, announce())
    core.hear(DECODE, later)
    assert refusals(core.hear(DECODE, announce())) == [(DECODE, 1, FailureReason.ABORTED)]
    if not is_open:
        core(OPEN)
    assert refusals(core.hear(DECODE, grant())) == [(DECODE, 1, FailureReason.ABORTED)]
    core.hear(DECODE, grant(generation=2))
    assert posted(core(LAST)) == [(0, (0, 8))]


def test_an_earlier_generation_that_comes_late_is_refused(core: PrefillDriver) -> None:
    core(OPEN)
    core.hear(DECODE, announce(2))
    assert refusals(core.hear(DECODE, grant())) == [(DECODE, 1, FailureReason.ROOM_IN_USE)]
    assert refusals(core.hear(DECODE, announce(1))) == [(DECODE, 1, FailureReason.ROOM_IN_USE)]
    assert core.core.counts().announced == 1


def test_an_open_room_fails_when_its_announcement_is_declined(opened: PrefillDriver) -> None:
    effects = opened.hear(DECODE, Decline(room=ROOM, generation=1, failure=ABORTED))
    assert (reports(effects), failure(effects)) == (FAILED, ABORTED)
    assert (len(messages(effects, Drained)), refusals(effects)) == (1, [])
    assert refusals(opened.hear(DECODE, announce())) == [(DECODE, 1, FailureReason.ABORTED)]


@pytest.mark.parametrize("kind", [Decline, Cancel])
@pytest.mark.parametrize("has_failed_before", [True, False])
def test_a_room_that_was_announced_and_given_up_fails_when_it_is_opened(
    core: PrefillDriver, kind: type[Decline] | type[Cancel], has_failed_before: bool
) -> None:
    if has_failed_before:
        core(OPEN)
        core.hear(DECODE, announce(1))
        core(ev.SendAborted(ROOM, ABORTED))
    core.hear(DECODE, announce(2))
    assert len(messages(core.hear(DECODE, kind(room=ROOM, generation=2, failure=ABORTED)), Drained)) == 1
    assert core.core.counts().announced == 0
    effects = core(OPEN)
    assert (reports(effects), failure(effects)) == (FAILED, ABORTED)


def test_a_cancel_that_overtakes_its_grant_fails_the_room(opened: PrefillDriver) -> None:
    effects = opened.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    assert reports(effects) == FAILED
    assert len(messages(effects, Drained)) == 1


def test_a_decline_of_an_earlier_try_ends_nothing(opened: PrefillDriver) -> None:
    opened.hear(DECODE, announce(2))
    assert reports(opened.hear(DECODE, Decline(room=ROOM, generation=1, failure=ABORTED))) == []
    assert opened.core.counts().announced == 1


def test_a_decline_fails_the_room_for_all_who_have_announced_it(core: PrefillDriver) -> None:
    core(OPEN)
    for to in (DECODE, OTHER_DECODE):
        core.hear(to, announce(num_decode_ranks=2))
    effects = core.hear(DECODE, Decline(room=ROOM, generation=1, failure=ABORTED))
    assert refusals(effects) == [(OTHER_DECODE, 1, FailureReason.ABORTED)]
    for to in (DECODE, OTHER_DECODE):
        assert core.hear(to, announce(2, num_decode_ranks=2)) == [], "both know, so that this is another try"


def test_decode_is_told_at_once_when_prefill_gives_an_announced_room_up(opened: PrefillDriver) -> None:
    effects = opened(ev.SendAborted(ROOM, ABORTED))
    assert reports(effects) == [("aborted", "draining"), ("aborted", "safe")]
    assert refusals(effects) == [(DECODE, 1, FailureReason.ABORTED)]
    assert refusals(opened.hear(DECODE, announce())) == [(DECODE, 1, FailureReason.ABORTED)], "if that was lost"
    assert refusals(opened.hear(DECODE, grant())) == [(DECODE, 1, FailureReason.ABORTED)], "if it was on its way"


def test_a_room_fails_at_once_when_a_rank_that_has_announced_is_lost(opened: PrefillDriver) -> None:
    effects = opened.sleep(3.0)
    assert reports(effects) == FAILED
    found = failure(effects)
    assert found is not None
    assert found.reason is FailureReason.PEER_LOST


def test_a_room_fails_at_once_when_a_rank_that_has_announced_leaves(opened: PrefillDriver) -> None:
    assert reports(opened.hear(DECODE, Goodbye(peer=DECODE))) == FAILED


def test_a_room_fails_when_it_is_opened_after_a_rank_that_has_announced_is_lost(core: PrefillDriver) -> None:
    core.hear(DECODE, announce())
    core.hear(DECODE, Goodbye(peer=DECODE))
    assert core.core.counts().announced == 0
    assert reports(core(OPEN)) == FAILED


def test_a_rank_that_connects_again_in_time_has_still_announced(opened: PrefillDriver) -> None:
    opened(ev.ReplyLost(b"decode/0/1/0"))
    opened.connect(DECODE, connection=b"decode/0/1/1")
    assert reports(opened.pass_time(GRANT_S)) == []
    assert posted(opened.hear(DECODE, grant())) == [(0, (0, 8))]


def test_announcements_and_grants_that_wait_are_bounded_together() -> None:
    core = PrefillDriver(limits=Bounds(pending_grants=1))
    core.connect()
    core.hear(DECODE, announce())
    other = Announce(room=8, generation=2, num_decode_ranks=1, timeout_s=60.0)
    assert refusals(core.hear(DECODE, other)) == [(DECODE, 2, FailureReason.CAPACITY)]
    assert core.hear(DECODE, grant()) == [], "it has its place already"
    assert refusals(core.hear(DECODE, grant(8, 3))) == [(DECODE, 3, FailureReason.CAPACITY)]


@pytest.mark.parametrize("is_closing", [True, False])
def test_a_rank_that_leaves_refuses_announcements_of_rooms_that_are_not_open(
    core: PrefillDriver, is_closing: bool
) -> None:
    core.hear(DECODE, announce())
    leaving = ev.CloseStarted(ABORTED) if is_closing else ev.DrainStarted(ABORTED)
    assert refusals(core(leaving)) == [(DECODE, 1, FailureReason.ABORTED)]
    assert refusals(core.hear(DECODE, announce(2))) == [(DECODE, 2, FailureReason.ABORTED)]


def test_a_rank_that_drains_waits_for_what_is_announced(opened: PrefillDriver) -> None:
    opened(ev.DrainStarted(ABORTED))
    opened.hear(OTHER_DECODE, Ping(peer=OTHER_DECODE))
    assert posted(opened.hear(DECODE, grant())) == [(0, (0, 8))]


def test_a_rank_too_many_is_refused(opened: PrefillDriver) -> None:
    assert refusals(opened.hear(OTHER_DECODE, announce())) == [(OTHER_DECODE, 1, FailureReason.PROTOCOL)]
    assert refusals(opened.hear(OTHER_DECODE, grant(generation=2))) == [(OTHER_DECODE, 2, FailureReason.PROTOCOL)]
    assert refusals(opened.hear(OTHER_DECODE, announce(3, num_decode_ranks=2))) == [
        (OTHER_DECODE, 3, FailureReason.PROTOCOL)
    ]


def test_an_announcement_outlives_the_memory_of_later_generations(
    core: PrefillDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.core.peers[DECODE].closed._limit = 2
    core(OPEN)
    core(LAST)
    core.hear(DECODE, announce())
    for generation in (2, 3, 4, 5):
        core.hear(DECODE, Cancel(room=8, generation=generation, failure=ABORTED))
    assert 1 in core.core.peers[DECODE].closed
    assert core.hear(DECODE, announce()) == []
    assert posted(core.hear(DECODE, grant())) == [(0, (0, 8))]


def test_a_quiesced_room_waits_for_what_is_announced(opened: PrefillDriver) -> None:
    opened(ev.QuiesceAsked(ROOM))
    assert reports(opened.pass_time(GRANT_S)) == []
    opened.hear(DECODE, grant())
    assert posted(opened(LAST)) == [(0, (0, 8))]
