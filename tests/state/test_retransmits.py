"""Messages that may have been lost are retransmitted at growing intervals until they are answered."""

import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.state import events as ev
from kvflow.state.decode import rooms
from kvflow.state.effects import DecodeEffect, LookUp, PrefillEffect, ProbePeer
from kvflow.wire.messages import (
    Ack,
    Cancel,
    Drained,
    Failed,
    Grant,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
    Refuse,
)
from tests.support.cores import (
    ABORTED,
    DECODE,
    PREFILL,
    DecodeDriver,
    PrefillDriver,
    endpoint_of,
    grant,
    messages,
    peer,
    reports,
)
from tests.support.receiving import ROOM, Transfer, request
from tests.support.sending import chunk, end

OTHER = peer("prefill", 1)
TIMEOUTS = Timeouts(lease_s=3.0, drain_s=5.0)
STEP_S = 0.5
"""Less than the shortest retransmission interval, and less than the lease."""


def said_at(
    core: DecodeDriver, others: list[PeerId], kind: type[Message], seconds: float
) -> list[tuple[float, PeerId]]:
    """Return when and to whom a core sends messages of a kind, while its peers keep answering."""
    begin, said = core.now, []
    while core.now < begin + seconds:
        for other in others:
            core.hear(other, Pong(peer=other))
        effects = core.sleep(STEP_S)
        said += [(core.now - begin, to) for to, _ in messages(effects, kind)]
    return said


def times(said: list[tuple[float, PeerId]], to: PeerId) -> list[float]:
    return [at for at, receiver in said if receiver == to]


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver(TIMEOUTS)


@pytest.fixture
def transfer(core: DecodeDriver) -> Transfer:
    core(request(timeout_s=500.0))
    return Transfer(core, core.connect(PREFILL, OTHER))


# Grants ----------------------------------------------------------------------------------------------------------


def test_a_grant_is_retransmitted_less_and_less_often(transfer: Transfer) -> None:
    said = said_at(transfer.core, [PREFILL, OTHER], Grant, 32.0)
    assert times(said, PREFILL) == times(said, OTHER) == [1.0, 3.0, 7.0, 15.0, 23.0, 31.0]


def test_where_many_rooms_wait_each_retransmits_its_grant_later_and_its_cancel_does_not_wait(
    core: DecodeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "GRANTS_PER_PAUSE", 3)
    crowd = 30
    for number in range(1, crowd + 1):
        core(request(room=number, generation=number, timeout_s=500.0))
    Transfer(core, core.connect(PREFILL))
    said = said_at(core, [PREFILL], Grant, 12.0)
    assert set(times(said, PREFILL)) == {10.0}
    assert len(said) == crowd
    core(ev.ReceiveAborted(1, ABORTED))
    assert times(said_at(core, [PREFILL], Cancel, 4.0), PREFILL) == [1.0, 3.0]


def test_a_grant_is_not_said_again_to_a_rank_that_is_complete(transfer: Transfer) -> None:
    transfer.notice(OTHER, 0, (0, 8), last=True)
    said = said_at(transfer.core, [PREFILL, OTHER], Grant, 4.0)
    assert (times(said, PREFILL), times(said, OTHER)) == ([1.0, 3.0], [])


def test_a_repeated_grant_is_the_same_but_for_the_time_that_is_left(transfer: Transfer) -> None:
    first = transfer.grants[PREFILL]
    ((_, again), _) = messages(transfer.core.sleep(1.0), Grant)
    assert isinstance(again, Grant)
    assert again.timeout_s == pytest.approx(499.0)
    assert again == replace(first, timeout_s=again.timeout_s)


def test_ranks_that_send_nothing_are_asked_again_while_others_have_not_sent_everything(core: DecodeDriver) -> None:
    """A prefill room waits for the grants of all decode ranks, even of those to which it sends nothing."""
    core(request())
    core.connect(PREFILL, OTHER, silent=[OTHER])
    ((_, first), (_, second)) = messages(core.sleep(1.0), Grant)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert (first.pages, second.pages, second.token) == ({"kv": b"\1\0\0\0"}, {}, 0)


def test_a_lost_grant_costs_a_pause_and_not_the_transfer(core: DecodeDriver) -> None:
    core.connect(PREFILL)
    core(request())
    transfer = Transfer(core, core.sleep(1.0))
    assert reports(transfer.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]
    assert messages(core.sleep(60.0), Grant) == []


# Cancels ---------------------------------------------------------------------------------------------------------


def test_a_cancel_is_retransmitted_until_it_is_answered(transfer: Transfer) -> None:
    transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
    transfer.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))
    said = said_at(transfer.core, [PREFILL, OTHER], Cancel, 8.0)
    assert (times(said, PREFILL), times(said, OTHER)) == ([1.0, 3.0, 7.0], [])
    assert reports(transfer.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))) == [
        ("aborted", "safe")
    ]
    assert said_at(transfer.core, [PREFILL, OTHER], Cancel, 20.0) == []


def test_the_first_cancel_is_retransmitted_soon_however_long_the_transfer_has_waited(transfer: Transfer) -> None:
    """The interval between grants exceeds the drain time by then; a lost Cancel must not lead to quarantine."""
    said_at(transfer.core, [PREFILL, OTHER], Grant, 30.0)
    transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
    assert times(said_at(transfer.core, [PREFILL, OTHER], Cancel, 4.0), PREFILL) == [1.0, 3.0]


def test_cancels_go_on_in_quarantine(transfer: Transfer) -> None:
    transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
    said_at(transfer.core, [PREFILL, OTHER], Cancel, TIMEOUTS.drain_s + 1.0)
    assert transfer.core.core.quarantine.total == (0, 0)
    assert len(transfer.core.core.quarantine) == 1
    assert times(said_at(transfer.core, [PREFILL, OTHER], Cancel, 24.0), PREFILL) == [1.0, 9.0, 17.0]


def test_a_rank_that_said_failed_but_not_drained_is_asked_again(transfer: Transfer) -> None:
    transfer.core.hear(PREFILL, Failed(room=ROOM, generation=1, engine_rank=0, failure=ABORTED, drained=False))
    effects = transfer.core.sleep(1.0)
    assert {to for to, _ in messages(effects, Cancel)} == {PREFILL, OTHER}


# Lost peers ------------------------------------------------------------------------------------------------------


def lose(transfer: Transfer, *, spare: PeerId) -> list[DecodeEffect]:
    """Let every rank but one fall silent for longer than its lease."""
    effects = transfer.core(ev.ConnectionLost(PREFILL))
    for _ in range(4):
        transfer.core.hear(spare, Pong(peer=spare))
        effects += transfer.core.sleep(0.75)
    return effects


def test_the_process_of_a_lost_rank_is_asked_after_again_and_again(transfer: Transfer) -> None:
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) in lose(transfer, spare=OTHER)
    effects: list[DecodeEffect] = []
    for _ in range(40):
        transfer.core(ev.ProbeFinished(PREFILL, is_gone=False))
        transfer.core.hear(OTHER, Pong(peer=OTHER))
        effects += transfer.core.sleep(STEP_S)
    assert effects.count(ProbePeer(PREFILL, endpoint_of(PREFILL))) >= 3
    assert ProbePeer(OTHER, endpoint_of(OTHER)) not in effects


def test_a_lost_rank_that_is_heard_again_is_asked_for_its_proof_at_once(transfer: Transfer) -> None:
    lose(transfer, spare=OTHER)
    effects = transfer.core.hear(PREFILL, Pong(peer=PREFILL))
    assert [to for to, _ in messages(effects, Cancel)] == [PREFILL], "nobody else was away"
    assert reports(effects) == []


def test_a_rank_that_connects_again_is_asked_for_its_proofs_at_once(transfer: Transfer) -> None:
    transfer.core.hear(PREFILL, Refuse(peer=PREFILL, to=None, detail="handshake required"))
    effects = transfer.core.connect(PREFILL, OTHER)
    assert {to for to, _ in messages(effects, Cancel)} == {PREFILL, OTHER}


def test_a_reconnection_asks_for_nothing_that_is_proved_or_may_still_succeed(transfer: Transfer) -> None:
    transfer.core(request(2, room=8))
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    lose(transfer, spare=OTHER)
    effects = transfer.core.hear(PREFILL, Pong(peer=PREFILL))
    cancels = messages(effects, Cancel)
    assert [cancel.room for _, cancel in cancels if isinstance(cancel, Cancel)] == [8]


def test_an_instance_of_which_proofs_are_awaited_is_looked_up_though_nobody_opens_a_room(transfer: Transfer) -> None:
    """The instance may have forgotten this rank, and a full quarantine admits no room that would look it up."""
    core = transfer.core
    core.hear(PREFILL, Refuse(peer=PREFILL, to=None, detail="handshake required"))
    effects = core.sleep(60.0)
    assert LookUp("prefill") in effects
    assert ("failed", "quarantined") in reports(effects)
    assert LookUp("prefill") in core.sleep(300.0), "for as long as it takes"
    effects = core.connect(PREFILL, OTHER)
    assert {to for to, _ in messages(effects, Cancel)} == {PREFILL, OTHER}
    assert LookUp("prefill") not in core.sleep(0.5)


def test_a_room_that_is_opened_meanwhile_waits_for_the_handshake(transfer: Transfer) -> None:
    transfer.core.hear(PREFILL, Refuse(peer=PREFILL, to=None, detail="handshake required"))
    assert LookUp("prefill") in transfer.core.sleep(1.0)
    assert messages(transfer.core(request(2, room=8)), Grant) == []
    granted = messages(transfer.core.connect(PREFILL, OTHER), Grant)
    assert [message.room for _, message in granted if isinstance(message, Grant)] == [8, 8]


# Notices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def written() -> PrefillDriver:
    """Everything is written in two chunks, and the decode rank does not answer."""
    core = PrefillDriver(TIMEOUTS)
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(timeout_s=500.0))
    core(chunk(0, 4))
    core(chunk(4, 8, last=True, metadata=b"m"))
    for seq in range(2):
        end(core, seq)
    return core


def test_notices_of_an_unanswered_delivery_are_retransmitted(written: PrefillDriver) -> None:
    begin, said = written.now, []
    for _ in range(32):
        written.hear(DECODE, Ping(peer=DECODE))
        notices = [message for _, message in messages(written.sleep(STEP_S), Notice)]
        said += [(written.now - begin, notice.seq, notice.metadata) for notice in notices if isinstance(notice, Notice)]
    expected = [(at, seq, metadata) for at in (1.0, 3.0, 7.0, 15.0) for seq, metadata in ((0, b""), (1, b"m"))]
    assert said == expected


def test_nothing_is_retransmitted_once_the_decode_rank_knows(written: PrefillDriver) -> None:
    assert reports(written.hear(DECODE, Ack(room=ROOM, generation=1))) == [("success", "safe")]
    assert messages(written.sleep(2.0), Notice) == []


def test_a_repeated_grant_of_an_unanswered_delivery_is_answered_with_its_notices(written: PrefillDriver) -> None:
    """The decode rank repeats its grant because it missed the notices."""
    assert len(messages(written.hear(DECODE, grant()), Notice)) == 2


def test_notices_of_an_unfinished_delivery_are_not_repeated() -> None:
    core = PrefillDriver(TIMEOUTS)
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 4))
    end(core, 0)
    assert core.hear(DECODE, grant()) == []
    assert messages(core.sleep(2.0), Notice) == []


def test_a_notice_that_carries_nothing_is_repeated_as_well() -> None:
    core = PrefillDriver(TIMEOUTS)
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(8, 8)))
    first = messages(core(chunk(0, 8, last=True, metadata=b"m")), Notice)
    assert messages(core.sleep(1.0), Notice) == first != []


def test_retransmitting_ends_with_the_deadline_of_the_transfer(written: PrefillDriver) -> None:
    effects: list[PrefillEffect] = []
    for _ in range(1_010):
        written.hear(DECODE, Ping(peer=DECODE))
        effects += written.sleep(STEP_S)
    assert reports(effects) == [("failed", "safe")]
    assert not written.core.rooms.rooms
    assert messages(written.sleep(2.0), Notice) == []


def test_lost_notices_cost_a_pause_and_not_the_transfer(transfer: Transfer, written: PrefillDriver) -> None:
    """Both sides together: the decode rank counts the repeated notices as if they were the first."""
    transfer.notice(OTHER, 0, (0, 8), last=True)
    token = transfer.grants[PREFILL].token
    effects: list[DecodeEffect] = []
    for _, notice in messages(written.sleep(1.0), Notice):
        assert isinstance(notice, Notice)
        effects += transfer.core.hear(PREFILL, replace(notice, token=token))
    assert reports(effects) == [("success", "safe")]


def test_an_answered_delivery_leaves_no_deadline() -> None:
    core = PrefillDriver(TIMEOUTS)
    core.connect()
    idle = len(core.core.timers)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    end(core, 0)
    assert len(core.core.timers) > idle
    core.hear(DECODE, Ack(room=ROOM, generation=1))
    assert len(core.core.timers) == idle
