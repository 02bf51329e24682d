"""Rooms that a decode rank gives up before prefill serves them: they fail as soon as the engine opens them."""

import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state.effects import PrefillEffect, Reply, ReportGranted, ReportSender
from kvflow.state.prefill import waiting
from kvflow.wire.messages import Cancel, Decline, Drained, Failed, Failure, Message, PeerId, Ping
from tests.support.cores import (
    DECODE,
    OTHER_DECODE,
    PREFILL,
    PrefillDriver,
    abort_failure,
    connection_of,
    grant,
    messages,
    of_kind,
    peer,
    reports,
)
from tests.support.sending import ROOM, chunk, pieces, posted

FIRST, SECOND = abort_failure("the first gave up"), abort_failure("the second gave up")
FAILED = [("failed", "draining"), ("failed", "safe")]
OPEN = ev.SendOpened(ROOM)
GRANTED = [ReportGranted(ROOM, {"kv": (0, 8)})]


@pytest.fixture
def core() -> PrefillDriver:
    driver = PrefillDriver()
    driver.connect()
    driver.connect(OTHER_DECODE)
    return driver


def decline(failure: Failure = FIRST, room: int = ROOM, generation: int = 0) -> Decline:
    """Return a decline; grants have later generations."""
    return Decline(room=room, generation=generation, failure=failure)


def answer(generation: int = 0) -> Drained:
    return Drained(room=ROOM, generation=generation, engine_rank=0, failure=FIRST)


def failures(effects: list[PrefillEffect]) -> set[Failure | None]:
    return {report.failure for report in of_kind(effects, ReportSender)}


def test_a_declined_room_fails_when_it_is_opened(core: PrefillDriver) -> None:
    assert messages(core.hear(DECODE, decline()), Drained) == [(DECODE, answer())]
    effects = core(OPEN)
    assert reports(effects) == FAILED
    assert failures(effects) == {FIRST}
    assert not core.core.rooms.rooms


def test_a_decline_that_is_retransmitted_is_answered_and_does_not_fail_the_next_try(core: PrefillDriver) -> None:
    core(OPEN)
    for _ in range(2):
        assert messages(core.hear(DECODE, decline()), Drained) == [(DECODE, answer())]
    core(OPEN)
    assert core.hear(DECODE, decline()) == core.hear(DECODE, decline())
    assert core.core.rooms.rooms
    assert failures(core.hear(DECODE, decline(generation=1))) == {FIRST}


def test_an_open_room_fails_at_once_when_it_is_declined(core: PrefillDriver) -> None:
    core(OPEN)
    core.hear(OTHER_DECODE, grant(num_decode_ranks=2))
    core(chunk(0, 4))
    effects = core.hear(DECODE, decline())
    assert failures(effects) == {FIRST}
    assert [to for to, _ in messages(effects, Failed)] == [OTHER_DECODE]
    assert reports(effects) == [("failed", "draining")], "a write is under way"


def test_a_room_that_is_declined_does_not_wait_for_the_grant_of_that_decode_rank(core: PrefillDriver) -> None:
    core(OPEN)
    core(chunk(0, 8, last=True))
    assert reports(core.hear(DECODE, decline())) == FAILED


def test_a_cancel_before_the_room_is_opened_fails_it_when_it_is(core: PrefillDriver) -> None:
    core.hear(DECODE, grant())
    effects = core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=FIRST))
    assert len(messages(effects, Drained)) == 1
    effects = core(OPEN)
    assert reports(effects) == FAILED
    assert failures(effects) == {FIRST}


def test_a_cancel_of_what_was_never_granted_fails_nothing(core: PrefillDriver) -> None:
    """The Cancel may belong to a former transfer of the same room."""
    core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=FIRST))
    assert core(OPEN) == []


@pytest.mark.parametrize("given_up", ["decline", "cancel"])
def test_a_new_grant_forgets_that_the_room_was_given_up(core: PrefillDriver, given_up: str) -> None:
    if given_up == "decline":
        core.hear(DECODE, decline())
    else:
        core.hear(DECODE, grant())
        core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=FIRST))
    core.hear(DECODE, grant(generation=2))
    assert core(OPEN) == GRANTED
    assert posted(core(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_a_retransmitted_grant_that_was_cancelled_forgets_nothing(core: PrefillDriver) -> None:
    core.hear(DECODE, grant())
    core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=FIRST))
    assert len(messages(core.hear(DECODE, grant()), Failed)) == 1
    assert reports(core(OPEN)) == FAILED


def test_a_grant_of_another_decode_rank_forgets_nothing(core: PrefillDriver) -> None:
    core.hear(DECODE, decline())
    core.hear(OTHER_DECODE, grant(num_decode_ranks=2))
    effects = core(OPEN)
    assert reports(effects) == FAILED
    assert [to for to, _ in messages(effects, Failed)] == [OTHER_DECODE]


def test_one_of_two_decode_ranks_that_gave_a_room_up_may_ask_anew_and_the_other_still_fails_it(
    core: PrefillDriver,
) -> None:
    core.hear(DECODE, decline(FIRST))
    core.hear(OTHER_DECODE, decline(SECOND))
    core.hear(DECODE, grant(num_decode_ranks=2))
    effects = core(OPEN)
    assert failures(effects) == {SECOND}
    assert [to for to, _ in messages(effects, Failed)] == [DECODE]


def test_two_decode_ranks_that_gave_a_room_up_and_ask_anew_are_both_served(core: PrefillDriver) -> None:
    core.hear(DECODE, decline(FIRST))
    core.hear(OTHER_DECODE, decline(SECOND))
    for to in (DECODE, OTHER_DECODE):
        core.hear(to, grant(num_decode_ranks=2))
    assert core(OPEN) == GRANTED
    assert len(posted(core(chunk(0, 8, last=True)))) == 2


@pytest.mark.parametrize("is_open", [True, False])
def test_who_has_given_a_room_up_and_asks_after_its_end_begins_another_try(core: PrefillDriver, is_open: bool) -> None:
    """Other ranks, which did not know, receive the failure of the room."""
    if is_open:
        core(OPEN)
    core.hear(DECODE, decline())
    if not is_open:
        core(OPEN)
    assert core.hear(DECODE, grant(num_decode_ranks=2)) == []
    ((to, failed),) = messages(core.hear(OTHER_DECODE, grant(num_decode_ranks=2)), Failed)
    assert isinstance(failed, Failed)
    assert (to, failed.failure, failed.drained) == (OTHER_DECODE, FIRST, True)


def test_both_decode_ranks_that_gave_a_room_up_know_that_it_has_failed(core: PrefillDriver) -> None:
    core.hear(DECODE, decline(FIRST))
    core.hear(OTHER_DECODE, decline(SECOND))
    assert reports(core(OPEN)) == FAILED
    for to in (DECODE, OTHER_DECODE):
        assert core.hear(to, grant(num_decode_ranks=2)) == []
    assert core(OPEN) == GRANTED


def test_a_decline_of_a_room_that_this_rank_was_granted_meanwhile_is_too_late(core: PrefillDriver) -> None:
    core.hear(DECODE, grant())
    assert not reports(core.hear(DECODE, decline()))
    assert core(OPEN) == GRANTED
    assert not reports(core.hear(DECODE, decline()))
    assert posted(core(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_a_decline_of_a_room_that_has_failed_does_not_fail_the_next_try(core: PrefillDriver) -> None:
    core(OPEN)
    core(ev.SendAborted(ROOM, FIRST))
    core.hear(DECODE, decline())
    assert core(OPEN) == []


@pytest.mark.parametrize("is_drained", [True, False])
def test_a_rank_that_gave_a_try_up_and_declines_the_next_fails_that_one(core: PrefillDriver, is_drained: bool) -> None:
    """It still holds the pages of the first, and so cannot receive the room again yet."""
    core(OPEN)
    core.hear(DECODE, grant())
    [piece] = pieces(core(chunk(0, 4)))
    core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=FIRST))
    if is_drained:
        core(ev.PostEnded(piece.delivery, piece.seq, None))
    core.hear(DECODE, decline(SECOND, generation=2))
    if not is_drained:
        core(ev.PostEnded(piece.delivery, piece.seq, None))
    assert failures(core(OPEN)) == {SECOND}


def test_a_room_that_is_not_opened_for_long_may_be_another_request_by_then(core: PrefillDriver) -> None:
    core.hear(DECODE, decline())
    core.pass_time(Timeouts().open_s)
    assert core(OPEN) == []


def test_declines_are_remembered_for_so_many_rooms(core: PrefillDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_DECLINED", 2)
    timers = len(core.core.timers)
    for room in (1, 2, 3):
        core.hear(DECODE, decline(room=room, generation=room))
    assert len(core.core.timers) == timers + 2
    assert core(ev.SendOpened(1)) == []
    for room in (2, 3):
        assert reports(core(ev.SendOpened(room))) == FAILED
    assert len(core.core.timers) == timers


# Lost decode ranks ---------------------------------------------------------------------------------------------------


def test_a_room_that_was_asked_for_by_a_decode_rank_that_is_lost_fails_when_it_is_opened(core: PrefillDriver) -> None:
    """Otherwise a backlog of such rooms would hold prefill's pages for `grant_s` each, long after a partition."""
    core.hear(DECODE, grant())
    core.sleep(3.0)
    assert DECODE not in core.core.peers
    effects = core(OPEN)
    assert reports(effects) == FAILED
    assert {failure and failure.reason for failure in failures(effects)} == {FailureReason.PEER_LOST}
    assert not core.core.rooms.rooms


@pytest.mark.parametrize("incarnation", [None, 77], ids=["back", "restarted"])
def test_a_decode_rank_that_was_lost_and_asks_anew_is_served(core: PrefillDriver, incarnation: int | None) -> None:
    core.hear(DECODE, grant())
    core.sleep(3.0)
    decode = DECODE if incarnation is None else DECODE._replace(incarnation=incarnation)
    core.connect(decode)
    core.hear(decode, grant(generation=2))
    assert core(OPEN) == GRANTED
    assert posted(core(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_a_request_that_goes_to_another_instance_is_served(core: PrefillDriver) -> None:
    core.hear(DECODE, decline())
    elsewhere = peer("elsewhere")
    core.connect(elsewhere)
    core.hear(elsewhere, grant())
    assert core(OPEN) == GRANTED
    assert posted(core(chunk(0, 8, last=True)))


def test_every_rank_that_declines_a_failed_room_may_ask_anew(core: PrefillDriver) -> None:
    """Each of them gave up the first try itself, so it knows that it is over."""
    core(OPEN)
    core.hear(OTHER_DECODE, decline())
    core.hear(DECODE, decline())
    assert messages(core.hear(DECODE, grant(generation=2, num_decode_ranks=2)), Failed) == []


@pytest.mark.parametrize("is_aborted", [True, False], ids=["before the decline", "by the decline"])
def test_a_rank_that_declines_a_room_whose_write_has_not_ended_may_ask_anew(
    core: PrefillDriver, is_aborted: bool
) -> None:
    core(OPEN)
    core.hear(OTHER_DECODE, grant(num_decode_ranks=2))
    [piece] = pieces(core(chunk(0, 4)))
    if is_aborted:
        core(ev.SendAborted(ROOM, FIRST))
    core.hear(DECODE, decline())
    core(ev.PostEnded(piece.delivery, piece.seq, None))
    assert not core.core.rooms.rooms
    assert messages(core.hear(DECODE, grant(generation=2, num_decode_ranks=2)), Failed) == []


def test_a_decline_that_is_retransmitted_after_a_new_handshake_does_not_fail_the_next_try(core: PrefillDriver) -> None:
    core(OPEN)
    core.hear(DECODE, decline(generation=1))  # its answer is lost
    for _ in range(4):  # the rank is cut off until its lease ends; the other one lives
        core.hear(OTHER_DECODE, Ping(peer=OTHER_DECODE))
        core.sleep(1.0)
    core(OPEN)
    core.connect(DECODE, connection=connection_of(DECODE, 1))
    assert reports(core.hear(DECODE, decline(generation=1))) == []


# Without a handshake -------------------------------------------------------------------------------------------------

STRANGER = peer("refused")


def unasked(sender: PeerId = STRANGER, *, to: PeerId = PREFILL, denied: str = "") -> ev.MessageArrived:
    message = replace(decline(), peer=sender, to=to)
    return ev.MessageArrived(connection_of(sender), message, denied)


def replies(effects: list[PrefillEffect]) -> list[Message]:
    return [reply.message for reply in of_kind(effects, Reply)]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_decode_rank_that_is_refused_declines_its_rooms(core: PrefillDriver, is_open: bool) -> None:
    effects = [*(core(OPEN) if is_open else []), *core(unasked()), *([] if is_open else core(OPEN))]
    assert failures(effects) == {FIRST}
    assert replies(effects) == [answer()]
    assert not core.core.rooms.rooms


def test_a_repeated_decline_without_a_handshake_does_not_fail_the_next_try(core: PrefillDriver) -> None:
    core(OPEN)
    core(unasked())
    core(OPEN)
    assert replies(core(unasked())) == [answer()]
    assert core.core.rooms.rooms


@pytest.mark.parametrize("event", [unasked(denied="its key"), unasked(to=peer("prefill", incarnation=9))])
def test_a_decline_that_is_denied_or_meant_for_another_process_fails_nothing(
    core: PrefillDriver, event: ev.MessageArrived
) -> None:
    core(OPEN)
    core(event)
    assert core.core.rooms.rooms


def test_a_room_that_another_instance_has_asked_for_is_not_declined(core: PrefillDriver) -> None:
    core(OPEN)
    core.hear(DECODE, grant(num_decode_ranks=2))
    core(unasked())
    assert failures(core(chunk(0, 4))) == set()
    assert core.core.rooms.rooms


def test_declines_of_many_ranks_are_bounded(core: PrefillDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_DECLINED", 3)
    for engine_rank in range(4):
        core(unasked(peer("refused", engine_rank)))
    assert reports(core(OPEN)) == [], "the room's declines were forgotten together"
    assert len(core.core.timers) == 2, "the leases of the two connected ranks"
