"""Each phase of a transfer has a deadline of its own, on both sides."""

from collections.abc import Sequence

import pytest

from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state.effects import DecodeEffect, ReportReceiver, ReportSender
from kvflow.wire.messages import Failed, Failure
from tests.support.cores import (
    ABORTED,
    DECODE,
    PREFILL,
    DecodeDriver,
    Effect,
    PrefillDriver,
    grant,
    messages,
    peer,
    reports,
)
from tests.support.receiving import ROOM, Transfer, request
from tests.support.sending import chunk, end, posted

OTHER = peer("prefill", 1)
TIMEOUTS = Timeouts(progress_s=6.0, lease_s=2.0, transfer_s=600.0)


def failures(effects: Sequence[Effect]) -> list[Failure]:
    found = [item.failure for item in effects if isinstance(item, (ReportReceiver, ReportSender))]
    return [failure for failure in found if failure is not None]


# On a decode rank --------------------------------------------------------------------------------------------------


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver(TIMEOUTS)


@pytest.fixture
def transfer(core: DecodeDriver) -> Transfer:
    core(request(timeout_s=600.0))
    return Transfer(core, core.connect(PREFILL, OTHER))


def test_until_the_first_bytes_only_the_whole_transfer_has_a_deadline(transfer: Transfer) -> None:
    """Its request may wait in the queues of prefill's engine, behind others."""
    assert reports(transfer.core.pass_time(599)) == []
    effects = transfer.core.pass_time(1)
    assert reports(effects) == [("failed", "draining")]
    assert failures(effects)[0].reason is FailureReason.DEADLINE


def test_the_first_bytes_begin_the_deadline_of_progress(transfer: Transfer) -> None:
    transfer.core.pass_time(1)
    transfer.notice(PREFILL, 0, (0, 4))
    assert reports(transfer.core.pass_time(5)) == []
    effects = transfer.core.pass_time(1)
    assert failures(effects)[0].detail == "nothing arrived for 6.0 s"


def test_every_notice_that_counts_is_progress(transfer: Transfer) -> None:
    for seq in range(8):
        transfer.notice(PREFILL, seq, (seq, seq + 1), last=seq == 7)
        assert reports(transfer.core.pass_time(5)) == []
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_a_notice_that_is_repeated_is_no_progress(transfer: Transfer) -> None:
    transfer.notice(PREFILL, 0, (0, 4))
    effects: list[DecodeEffect] = []
    for _ in range(3):
        effects += transfer.core.pass_time(2)
        transfer.notice(PREFILL, 0, (0, 4))
    assert failures(effects)[0].reason is FailureReason.STALLED


@pytest.mark.parametrize("ends", ["success", "abort"])
def test_what_has_ended_does_not_stall(transfer: Transfer, ends: str) -> None:
    if ends == "success":
        for sender in (PREFILL, OTHER):
            transfer.notice(sender, 0, (0, 8), last=True)
    else:
        transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
        transfer.core.pass_time(6)
        transfer.notice(PREFILL, 0, (0, 4))
    assert [item for item in failures(transfer.core.pass_time(40)) if item.reason is FailureReason.STALLED] == []


# On a prefill rank -------------------------------------------------------------------------------------------------


@pytest.fixture
def prefill() -> PrefillDriver:
    core = PrefillDriver(TIMEOUTS)
    core.connect()
    core(ev.SendOpened(ROOM))
    return core


@pytest.mark.parametrize(("mine", "theirs", "limit"), [(6.0, 30.0, 6), (30.0, 4.0, 4)])
def test_a_write_that_does_not_end_ends_the_room_when_the_first_side_would_give_up(
    mine: float, theirs: float, limit: int
) -> None:
    core = PrefillDriver(Timeouts(progress_s=mine, lease_s=2.0))
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(progress_s=theirs))
    core(chunk(0, 8, last=True))
    assert reports(core.pass_time(limit - 1)) == []
    effects = core.pass_time(1)
    assert reports(effects) == [("failed", "draining")]
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert (failed.failure.reason, failed.drained) == (FailureReason.STALLED, False)


def test_each_write_that_ends_is_progress(prefill: PrefillDriver) -> None:
    prefill.hear(DECODE, grant())
    for seq in range(4):
        prefill(chunk(2 * seq, 2 * seq + 2, last=seq == 3))
    for seq in range(4):
        assert failures(prefill.pass_time(5)) == []
        end(prefill, seq)


def test_a_prefill_that_computes_for_long_has_not_stalled(prefill: PrefillDriver) -> None:
    prefill.hear(DECODE, grant(timeout_s=600.0))
    prefill(chunk(0, 4))
    end(prefill, 0)
    assert failures(prefill.pass_time(60)) == []
    assert posted(prefill(chunk(4, 8, last=True))) == [(1, (4, 8))]


def test_ended_rooms_leave_no_deadline(prefill: PrefillDriver) -> None:
    prefill.hear(DECODE, grant())
    prefill(chunk(0, 8, last=True))
    prefill.pass_time(7)
    end(prefill, 0)
    prefill.connect()  # a rank to which no write has ended must reconnect
    prefill.pass_time(1)
    assert not prefill.core.rooms.rooms
    fresh = PrefillDriver(TIMEOUTS)
    fresh.connect()
    assert len(prefill.core.timers) == len(fresh.core.timers)
