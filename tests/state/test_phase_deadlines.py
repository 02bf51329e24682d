"""Each phase of a transfer has its own deadline, on both sides."""

import pytest

from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state.effects import Effect, ReportReceiver, ReportSender
from kvflow.wire.messages import Failed, Failure
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, grant, messages, pass_time, peer, reports
from tests.support.receiving import ROOM, Wire, wish
from tests.support.sending import chunk, post, settle

OTHER = peer("prefill", 1)
TIMEOUTS = Timeouts(first_bytes_s=20.0, progress_s=6.0, lease_s=2.0, transfer_s=600.0)


def failures(effects: list[Effect]) -> list[Failure]:
    found = [item.failure for item in effects if isinstance(item, (ReportReceiver, ReportSender))]
    return [failure for failure in found if failure is not None]


# On a decode rank --------------------------------------------------------------------------------------------------


@pytest.fixture
def core() -> CoreDriver:
    return CoreDriver(DECODE, TIMEOUTS)


@pytest.fixture
def wire(core: CoreDriver) -> Wire:
    core(wish(timeout_s=600.0))
    return Wire(core, core.meet_prefill(PREFILL, OTHER))


def test_a_transfer_of_which_nothing_ever_arrives_has_stalled(wire: Wire) -> None:
    assert reports(pass_time(wire.core, 19)) == []
    effects = pass_time(wire.core, 1)
    assert reports(effects) == [("failed", "draining")]
    assert (failures(effects)[0].reason, failures(effects)[0].detail) == (
        FailureReason.STALLED,
        "nothing arrived within 20.0 s",
    )


def test_the_first_bytes_begin_the_deadline_of_progress(wire: Wire) -> None:
    pass_time(wire.core, 1)
    wire.notice(PREFILL, 0, (0, 4))
    assert reports(pass_time(wire.core, 5)) == []
    effects = pass_time(wire.core, 1)
    assert failures(effects)[0].detail == "nothing arrived for 6.0 s"


def test_every_notice_that_counts_is_progress(wire: Wire) -> None:
    for seq in range(8):
        wire.notice(PREFILL, seq, (seq, seq + 1), last=seq == 7)
        assert reports(pass_time(wire.core, 5)) == []
    assert reports(wire.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_a_notice_that_is_repeated_is_no_progress(wire: Wire) -> None:
    wire.notice(PREFILL, 0, (0, 4))
    effects: list[Effect] = []
    for _ in range(3):
        effects += pass_time(wire.core, 2)
        wire.notice(PREFILL, 0, (0, 4))
    assert failures(effects)[0].reason is FailureReason.STALLED


def test_waiting_for_the_instance_is_not_waiting_for_bytes(core: CoreDriver) -> None:
    """The handshake has a deadline of its own, in the shell."""
    core(wish(timeout_s=600.0))
    assert reports(core.sleep(25.0)) == []
    core.meet_prefill(PREFILL)
    assert reports(pass_time(core, 19)) == []


@pytest.mark.parametrize("ends", ["success", "abort"])
def test_what_has_ended_does_not_stall(wire: Wire, ends: str) -> None:
    if ends == "success":
        for sender in (PREFILL, OTHER):
            wire.notice(sender, 0, (0, 8), last=True)
    else:
        wire.core(ev.ReceiveAborted(ROOM, ABORTED))
        pass_time(wire.core, 6)
        wire.notice(PREFILL, 0, (0, 4))
    assert [item for item in failures(pass_time(wire.core, 40)) if item.reason is FailureReason.STALLED] == []


# On a prefill rank -------------------------------------------------------------------------------------------------


@pytest.fixture
def prefill() -> CoreDriver:
    core = CoreDriver(PREFILL, TIMEOUTS)
    core.meet_decode()
    core(ev.SendOpened(ROOM))
    return core


@pytest.mark.parametrize(("mine", "theirs", "limit"), [(6.0, 30.0, 6), (30.0, 4.0, 4)])
def test_a_write_that_does_not_end_ends_the_room_when_the_first_side_would_give_up(
    mine: float, theirs: float, limit: int
) -> None:
    core = CoreDriver(PREFILL, Timeouts(progress_s=mine, lease_s=2.0))
    core.meet_decode()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(progress_s=theirs))
    core(chunk(0, 8, last=True))
    post(core, 0)
    assert reports(pass_time(core, limit - 1)) == []
    effects = pass_time(core, 1)
    assert reports(effects) == [("failed", "draining")]
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert (failed.failure.reason, failed.drained) == (FailureReason.STALLED, False)


def test_each_write_that_ends_is_progress(prefill: CoreDriver) -> None:
    prefill.hear(DECODE, grant())
    for seq in range(4):
        prefill(chunk(2 * seq, 2 * seq + 2, last=seq == 3))
        post(prefill, seq)
    for seq in range(4):
        assert failures(pass_time(prefill, 5)) == []
        settle(prefill, seq)


def test_a_prefill_that_computes_for_long_has_not_stalled(prefill: CoreDriver) -> None:
    prefill.hear(DECODE, grant(timeout_s=600.0))
    prefill(chunk(0, 4))
    post(prefill, 0)
    settle(prefill, 0)
    assert failures(pass_time(prefill, 60)) == []
    assert len(prefill(chunk(4, 8, last=True))) == 1


def test_ended_rooms_leave_no_deadline(prefill: CoreDriver) -> None:
    prefill.hear(DECODE, grant())
    prefill(chunk(0, 8, last=True))
    post(prefill, 0)
    pass_time(prefill, 7)
    settle(prefill, 0)
    pass_time(prefill, 1)
    assert prefill.core.is_idle
    fresh = CoreDriver(PREFILL, TIMEOUTS)
    fresh.meet_decode()
    assert len(prefill.core.deadlines) == len(fresh.core.deadlines)
