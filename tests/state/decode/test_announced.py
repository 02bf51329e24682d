"""Rooms that a decode rank announces: prefill learns that pages will come, and is granted them later."""

import pytest

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, PagesInUse
from kvflow.state import events as ev
from kvflow.state.effects import DecodeEffect, LookUp, ReportReceiver, WatchNotices
from kvflow.state.quarantine import Footprint
from kvflow.wire.messages import (
    Announce,
    Cancel,
    Decline,
    Drained,
    Failed,
    Failure,
    Goodbye,
    Grant,
    Message,
    PeerId,
    Pong,
)
from tests.support.cores import ABORTED, PREFILL, DecodeDriver, messages, of_kind, peer, reports
from tests.support.receiving import ROOM, Transfer, request

OTHER = peer("prefill", 1)
NEXT = peer("prefill", 1, incarnation=2)
TIMEOUTS = Timeouts(transfer_s=60.0, handshake_s=5.0)
FAILED = Failed(room=ROOM, generation=1, engine_rank=0, failure=ABORTED, drained=True)


def announced(generation: int = 1, room: int = ROOM, timeout_s: float = 200.0) -> ev.ReceiveOpened:
    return ev.ReceiveOpened(room, generation, "prefill", {}, {}, 1, timeout_s, b"0123456789abcdef", is_announced=True)


def granted(generation: int = 1, room: int = ROOM, footprint: Footprint = Footprint(1, 4)) -> ev.ReceiveGranted:  # noqa: B008
    given = request(generation, room=room)
    return ev.ReceiveGranted(room, generation, given.ranges, given.pages, 60.0, footprint)


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver(TIMEOUTS)


@pytest.fixture
def connected(core: DecodeDriver) -> DecodeDriver:
    """One announced room, which two ranks have received."""
    core(announced())
    core.connect(PREFILL, OTHER)
    return core


def told(effects: list[DecodeEffect], kind: type[Message]) -> list[PeerId]:
    return [to for to, _ in messages(effects, kind)]


def failure(effects: list[DecodeEffect]) -> Failure | None:
    """Return the failure in the only report, which is about a room that never had pages."""
    (report,) = of_kind(effects, ReportReceiver)
    assert report.memory.value == "safe"
    found: Failure | None = report.failure
    return found


def test_it_is_looked_up_and_announced_as_soon_as_its_instance_is_connected(core: DecodeDriver) -> None:
    assert of_kind(core(announced()), LookUp)
    effects = core.connect(PREFILL, OTHER)
    assert messages(effects, Announce) == [
        (to, Announce(room=ROOM, generation=1, num_decode_ranks=1, timeout_s=200.0)) for to in (PREFILL, OTHER)
    ]
    assert (messages(effects, Grant), reports(effects)) == ([], [])


def test_it_is_granted_at_once_when_it_has_pages(connected: DecodeDriver) -> None:
    connected.pass_time(100)
    effects = connected(granted())
    assert reports(effects) == [("pending", "held")]
    assert told(effects, Grant) == [PREFILL, OTHER]
    (grant, _) = (message for _, message in messages(effects, Grant))
    assert isinstance(grant, Grant)
    assert (grant.generation, grant.ranges, grant.timeout_s) == (1, {"kv": (0, 8)}, 60.0)
    transfer = Transfer(connected, effects)
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]
    assert not connected.core.rooms.rooms


def test_it_is_granted_when_its_instance_is_connected_if_pages_come_before_that(core: DecodeDriver) -> None:
    core(announced())
    assert told(core(granted()), Grant) == []
    effects = core.connect(PREFILL, OTHER)
    assert (told(effects, Grant), told(effects, Announce)) == ([PREFILL, OTHER], [])


def test_it_has_the_time_of_a_transfer_from_the_grant_on(connected: DecodeDriver) -> None:
    connected.pass_time(199)
    connected(granted())
    assert reports(connected.pass_time(59)) == []
    assert reports(connected.pass_time(2))[0] == ("failed", "draining")


def test_its_instance_must_be_connected_in_time(core: DecodeDriver) -> None:
    core(announced())
    found = failure(core.sleep(TIMEOUTS.handshake_s))
    assert found is not None
    assert found.reason is FailureReason.UNREACHABLE


def test_it_ends_when_no_pages_come_and_prefill_is_told(connected: DecodeDriver) -> None:
    assert reports(connected.pass_time(199)) == []
    effects = connected.pass_time(2)
    found = failure(effects)
    assert found is not None
    assert found.reason is FailureReason.NOT_GRANTED
    assert "200" in found.detail
    assert set(told(effects, Decline)) == {PREFILL, OTHER}
    assert not connected.core.rooms.rooms


def test_it_is_declined_at_once_when_the_engine_gives_it_up(connected: DecodeDriver) -> None:
    effects = connected(ev.ReceiveAborted(ROOM, ABORTED))
    assert reports(effects) == [("aborted", "safe")]
    assert (told(effects, Decline), told(effects, Cancel)) == ([PREFILL, OTHER], [])
    connected.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))
    assert set(told(connected.pass_time(2), Decline)) == {OTHER}


def test_it_is_repeated_for_as_long_as_it_is_announced(connected: DecodeDriver) -> None:
    """Nothing confirms an announcement, and the answer that its room has failed may be lost as well."""
    effects = connected.pass_time(100)
    repeated = [message for to, message in messages(effects, Announce) if to == PREFILL]
    assert 5 < len(repeated) < 20
    times = [message.timeout_s for message in repeated if isinstance(message, Announce)]
    assert times == sorted(times, reverse=True)
    connected(granted())
    effects = connected.pass_time(1)
    assert (told(effects, Announce), told(effects, Grant)) == ([], [PREFILL, OTHER])


def test_it_fails_when_prefill_fails_the_room_and_the_other_rank_is_told(connected: DecodeDriver) -> None:
    effects = connected.hear(PREFILL, FAILED)
    assert failure(effects) == ABORTED
    assert OTHER in told(effects, Decline)
    with pytest.raises(LocalProtocolError, match="transfer is not waiting for pages"):
        connected(granted())


def test_a_rank_that_does_not_know_of_it_cannot_fail_it(connected: DecodeDriver) -> None:
    assert reports(connected.hear(NEXT, FAILED)) == []


def test_it_fails_with_a_rank_that_is_lost_and_the_other_is_told_at_once(connected: DecodeDriver) -> None:
    """The instance is incomplete at that moment, but every rank that can be reached must release its pages."""
    for _ in range(40):
        connected.hear(PREFILL, Pong(peer=PREFILL))
        effects = connected.sleep(1.0)
        if reports(effects):
            break
    found = failure(effects)
    assert found is not None
    assert found.reason is FailureReason.PEER_LOST
    assert told(effects, Decline) == [PREFILL]
    assert set(told(connected.connect(PREFILL, NEXT), Decline)) == {PREFILL, NEXT}


def test_it_fails_with_a_rank_that_leaves(connected: DecodeDriver) -> None:
    found = failure(connected.hear(OTHER, Goodbye(peer=OTHER)))
    assert found is not None
    assert found.reason is FailureReason.PEER_CLOSED


def test_it_fails_with_a_rank_that_is_replaced(connected: DecodeDriver) -> None:
    connected(ev.ConnectionLost(OTHER))
    found = failure(connected(ev.ProbeFinished(OTHER, is_gone=True)))
    assert found is not None
    assert found.reason is FailureReason.PEER_LOST


def test_pages_wait_until_a_rank_is_heard_whose_connection_broke(connected: DecodeDriver) -> None:
    connected(ev.ConnectionLost(OTHER))
    effects = connected(granted())
    assert (reports(effects), told(effects, Grant)) == ([("pending", "held")], [])
    assert told(connected.hear(OTHER, Pong(peer=OTHER)), Grant) == [PREFILL, OTHER]


def test_pages_that_wait_for_a_rank_are_free_when_that_is_lost(connected: DecodeDriver) -> None:
    connected(ev.ConnectionLost(OTHER))
    connected(granted())
    effects = connected(ev.ProbeFinished(OTHER, is_gone=True))
    assert reports(effects) == [("failed", "draining"), ("failed", "safe")]
    assert connected.core.rooms.held.count() == {"kv": 0}


def test_pages_are_given_once(connected: DecodeDriver) -> None:
    connected(granted())
    with pytest.raises(LocalProtocolError, match="transfer is not waiting for pages"):
        connected(granted())


def test_pages_of_another_transfer_are_refused_and_it_stays_announced(connected: DecodeDriver) -> None:
    connected(request(2, room=8))
    given = granted()
    with pytest.raises(PagesInUse):
        connected(ev.ReceiveGranted(ROOM, 1, given.ranges, {"kv": request(2).pages["kv"]}, 60.0))
    assert told(connected(given), Grant) == [PREFILL, OTHER]


def test_it_gets_no_pages_while_too_many_are_in_quarantine() -> None:
    core = DecodeDriver(Timeouts(drain_s=1.0), Limits(quarantined_bytes=8), ends_with_process=False)
    core(request(1, room=8, footprint=Footprint(2, 8)))
    core.connect(PREFILL, OTHER)
    core(ev.ReceiveOpened(ROOM, 2, "elsewhere", {}, {}, 1, 60.0, b"secret", is_announced=True))
    core.hear(PREFILL, Goodbye(peer=PREFILL))
    core.sleep(1.0)
    assert core.core.counts().quarantined == 1
    for _ in range(2):
        with pytest.raises(CapacityExceeded):
            core(granted(2))
    core(ev.QuarantineReleased(1))
    assert reports(core(granted(2))) == [("pending", "held")]


def test_the_transport_is_not_watched_for_what_has_no_pages(core: DecodeDriver) -> None:
    assert of_kind(core(announced()), WatchNotices) == []
    core.connect(PREFILL, OTHER)
    assert of_kind(core(granted()), WatchNotices) == [WatchNotices(active=True)]
    assert of_kind(core(announced(2, room=8)), WatchNotices) == []
    assert WatchNotices(active=False) in core.hear(PREFILL, FAILED) + core.hear(
        PREFILL, Drained(room=ROOM, generation=1, engine_rank=0)
    ) + core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))


def test_a_room_that_was_announced_and_given_up_can_be_announced_again(connected: DecodeDriver) -> None:
    with pytest.raises(LocalProtocolError, match="being received"):
        connected(announced(2))
    connected(ev.ReceiveAborted(ROOM, ABORTED))
    assert told(connected(announced(2)), Announce) == [PREFILL, OTHER]
    assert told(connected.pass_time(5), Decline) == [], "the later announcement says it"


def test_prefill_is_told_what_became_of_what_it_fails_late(connected: DecodeDriver) -> None:
    connected(ev.ReceiveAborted(ROOM, ABORTED))
    assert told(connected.hear(PREFILL, FAILED), Cancel) == [PREFILL]
