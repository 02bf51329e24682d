"""What may have been missed is said again, less and less often, until it is answered."""

import pytest

from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state import receivers
from kvflow.state.effects import Effect, GreetInstance, ProbePeer
from kvflow.wire.messages import (
    Cancel,
    Drained,
    Failed,
    Failure,
    Goodbye,
    Grant,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
    Received,
)
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, debts, grant, messages, peer, reports
from tests.support.receiving import Wire, wish
from tests.support.sending import ROOM, chunk, post, settle

OTHER = peer("prefill", 1)
TIMEOUTS = Timeouts(lease_s=3.0, drain_s=5.0)
STEP_S = 0.5
"""Less than the pause between two words, and less than the lease."""


def said_at(core: CoreDriver, others: list[PeerId], kind: type[Message], seconds: float) -> list[tuple[float, PeerId]]:
    """When and to whom a core says something, while its peers show that they live."""
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
def core() -> CoreDriver:
    return CoreDriver(DECODE, TIMEOUTS)


@pytest.fixture
def wire(core: CoreDriver) -> Wire:
    core(wish(timeout_s=500.0))
    return Wire(core, core.meet_prefill(PREFILL, OTHER))


# Grants ----------------------------------------------------------------------------------------------------------


def test_a_grant_is_said_again_less_and_less_often(wire: Wire) -> None:
    said = said_at(wire.core, [PREFILL, OTHER], Grant, 32.0)
    assert times(said, PREFILL) == times(said, OTHER) == [1.0, 3.0, 7.0, 15.0, 23.0, 31.0]


def test_where_many_rooms_wait_each_says_its_grant_again_later_and_its_cancel_does_not_wait(
    core: CoreDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "GRANTS_PER_PAUSE", 3)
    crowd = 30
    for number in range(1, crowd + 1):
        core(wish(room=number, generation=number, timeout_s=500.0))
    Wire(core, core.meet_prefill(PREFILL))
    said = said_at(core, [PREFILL], Grant, 12.0)
    assert set(times(said, PREFILL)) == {10.0}
    assert len(said) == crowd
    core(ev.ReceiveAborted(1, ABORTED))
    assert times(said_at(core, [PREFILL], Cancel, 4.0), PREFILL) == [1.0, 3.0]


def test_a_grant_is_not_said_again_to_a_rank_that_is_complete(wire: Wire) -> None:
    wire.notice(OTHER, 0, (0, 8), last=True)
    said = said_at(wire.core, [PREFILL, OTHER], Grant, 4.0)
    assert (times(said, PREFILL), times(said, OTHER)) == ([1.0, 3.0], [])


def test_a_repeated_grant_is_the_same_but_for_the_time_that_is_left(wire: Wire) -> None:
    first = wire.grants[PREFILL]
    ((_, again), _) = messages(wire.core.sleep(1.0), Grant)
    assert isinstance(again, Grant)
    assert again.timeout_s == pytest.approx(499.0)
    assert again == grant_with(first, timeout_s=again.timeout_s)


def grant_with(original: Grant, *, timeout_s: float) -> Grant:
    return Grant(**{name: getattr(original, name) for name in original.__struct_fields__} | {"timeout_s": timeout_s})


def test_ranks_that_owe_nothing_are_asked_again_while_others_owe(core: CoreDriver) -> None:
    """A prefill room waits for the grant of every decode rank, also of those that it owes nothing."""
    core(wish())
    core(ev.InstanceGreeted("prefill", (ev.GreetedRank(PREFILL, debts()), ev.GreetedRank(OTHER, {}))))
    ((_, first), (_, second)) = messages(core.sleep(1.0), Grant)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert (first.pages, second.pages, second.token) == ({"kv": b"\1\0\0\0"}, {}, 0)


def test_a_lost_grant_costs_a_pause_and_not_the_transfer(core: CoreDriver) -> None:
    core.meet_prefill(PREFILL)
    core(wish())
    wire = Wire(core, core.sleep(1.0))
    assert reports(wire.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]
    assert messages(core.sleep(60.0), Grant) == []


# Cancels ---------------------------------------------------------------------------------------------------------


def test_a_cancel_is_said_again_until_it_is_answered(wire: Wire) -> None:
    wire.core(ev.ReceiveAborted(ROOM, ABORTED))
    wire.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))
    said = said_at(wire.core, [PREFILL, OTHER], Cancel, 8.0)
    assert (times(said, PREFILL), times(said, OTHER)) == ([1.0, 3.0, 7.0], [])
    assert reports(wire.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))) == [("aborted", "safe")]
    assert said_at(wire.core, [PREFILL, OTHER], Cancel, 20.0) == []


def test_the_first_cancel_is_said_again_soon_however_long_the_transfer_has_waited(wire: Wire) -> None:
    """The pause between grants has grown beyond the time to drain: a lost Cancel must not mean quarantine."""
    said_at(wire.core, [PREFILL, OTHER], Grant, 30.0)
    wire.core(ev.ReceiveAborted(ROOM, ABORTED))
    assert times(said_at(wire.core, [PREFILL, OTHER], Cancel, 4.0), PREFILL) == [1.0, 3.0]


def test_cancels_go_on_in_quarantine(wire: Wire) -> None:
    wire.core(ev.ReceiveAborted(ROOM, ABORTED))
    said_at(wire.core, [PREFILL, OTHER], Cancel, TIMEOUTS.drain_s + 1.0)
    assert wire.core.core.quarantine.total == (0, 0)
    assert len(wire.core.core.quarantine) == 1
    assert times(said_at(wire.core, [PREFILL, OTHER], Cancel, 24.0), PREFILL) == [1.0, 9.0, 17.0]


def test_a_rank_that_said_failed_but_not_drained_is_asked_again(wire: Wire) -> None:
    wire.core.hear(PREFILL, Failed(room=ROOM, generation=1, engine_rank=0, failure=ABORTED, drained=False))
    effects = wire.core.sleep(1.0)
    assert {to for to, _ in messages(effects, Cancel)} == {PREFILL, OTHER}


# Lost peers ------------------------------------------------------------------------------------------------------


def lose(wire: Wire, *, spare: PeerId) -> list[Effect]:
    """Let every rank but one fall silent for longer than its lease."""
    effects: list[Effect] = []
    for _ in range(4):
        wire.core.hear(spare, Pong(peer=spare))
        effects = wire.core.sleep(0.75)
    return effects


def test_the_process_of_a_lost_rank_is_asked_after_again_and_again(wire: Wire) -> None:
    assert ProbePeer(PREFILL) in lose(wire, spare=OTHER)
    effects: list[Effect] = []
    for _ in range(40):
        wire.core.hear(OTHER, Pong(peer=OTHER))
        effects += wire.core.sleep(STEP_S)
    assert effects.count(ProbePeer(PREFILL)) >= 3
    assert ProbePeer(OTHER) not in effects


def test_a_lost_rank_that_is_heard_again_is_asked_for_its_proof_at_once(wire: Wire) -> None:
    lose(wire, spare=OTHER)
    effects = wire.core.hear(PREFILL, Pong(peer=PREFILL))
    assert [to for to, _ in messages(effects, Cancel)] == [PREFILL], "nobody else was away"
    assert reports(effects) == []


def test_a_rank_that_is_greeted_again_is_asked_for_its_proofs_at_once(wire: Wire) -> None:
    wire.core.hear(PREFILL, Goodbye(peer=PREFILL))
    effects = wire.core.meet_prefill(PREFILL, OTHER)
    assert [to for to, _ in messages(effects, Cancel)] == [PREFILL, OTHER]


def test_a_reconnection_asks_for_nothing_that_is_proved_or_still_hoped_for(wire: Wire) -> None:
    wire.core(wish(2, room=8))
    wire.notice(PREFILL, 0, (0, 8), last=True)
    lose(wire, spare=OTHER)
    effects = wire.core.hear(PREFILL, Pong(peer=PREFILL))
    cancels = messages(effects, Cancel)
    assert [cancel.room for _, cancel in cancels if isinstance(cancel, Cancel)] == [8]


def test_an_instance_that_owes_proofs_is_greeted_again_though_nobody_opens_a_room(wire: Wire) -> None:
    """It has forgotten this rank, or been restarted. A full quarantine admits no room that would greet it."""
    failure = Failure(FailureReason.PEER_LOST, ABORTED.stage, "decode/0", "it does not know this rank any more")
    wire.core(ev.PeerLeft(PREFILL, failure))
    effects = wire.core.sleep(60.0)
    assert effects.count(GreetInstance("prefill")) == 1, "one greeting at a time"
    wire.core(ev.InstanceUnreachable("prefill", failure))
    assert GreetInstance("prefill") in wire.core.sleep(10.0)
    effects = wire.core.meet_prefill(PREFILL, OTHER)
    assert {to for to, _ in messages(effects, Cancel)} == {PREFILL, OTHER}
    assert GreetInstance("prefill") not in wire.core.sleep(0.5)


def test_a_room_that_is_opened_during_such_a_greeting_waits_for_it(wire: Wire) -> None:
    wire.core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert GreetInstance("prefill") in wire.core.sleep(1.0)
    assert wire.core(wish(2, room=8)) == []
    granted = messages(wire.core.meet_prefill(PREFILL, OTHER), Grant)
    assert [message.room for _, message in granted if isinstance(message, Grant)] == [8, 8]


# Notices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def written() -> CoreDriver:
    """Everything is written in two chunks, and the decode rank says nothing."""
    core = CoreDriver(PREFILL, TIMEOUTS)
    core.meet_decode()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(timeout_s=500.0))
    core(chunk(0, 4))
    core(chunk(4, 8, last=True, metadata=b"m"))
    for seq in range(2):
        post(core, seq)
        settle(core, seq)
    return core


def test_notices_of_an_unanswered_delivery_are_said_again(written: CoreDriver) -> None:
    begin, said = written.now, []
    for _ in range(32):
        written.hear(DECODE, Ping(peer=DECODE))
        notices = [message for _, message in messages(written.sleep(STEP_S), Notice)]
        said += [(written.now - begin, notice.seq, notice.metadata) for notice in notices if isinstance(notice, Notice)]
    expected = [(at, seq, metadata) for at in (1.0, 3.0, 7.0, 15.0) for seq, metadata in ((0, b""), (1, b"m"))]
    assert said == expected


def test_nothing_is_said_again_once_the_decode_rank_knows(written: CoreDriver) -> None:
    assert reports(written.hear(DECODE, Received(room=ROOM, generation=1))) == [("success", "safe")]
    assert messages(written.sleep(2.0), Notice) == []


def test_a_repeated_grant_of_an_unanswered_delivery_is_answered_with_its_notices(written: CoreDriver) -> None:
    """The decode rank asks again because it has missed them."""
    assert len(messages(written.hear(DECODE, grant()), Notice)) == 2


def test_notices_of_an_unfinished_delivery_are_not_repeated() -> None:
    core = CoreDriver(PREFILL, TIMEOUTS)
    core.meet_decode()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 4))
    post(core, 0)
    settle(core, 0)
    assert core.hear(DECODE, grant()) == []
    assert messages(core.sleep(2.0), Notice) == []


def test_a_notice_that_carries_nothing_is_repeated_as_well() -> None:
    core = CoreDriver(PREFILL, TIMEOUTS)
    core.meet_decode()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(8, 8)))
    first = messages(core(chunk(0, 8, last=True, metadata=b"m")), Notice)
    assert messages(core.sleep(1.0), Notice) == first != []


def test_repeating_ends_with_the_deadline_of_the_transfer(written: CoreDriver) -> None:
    effects: list[Effect] = []
    for _ in range(1_010):
        written.hear(DECODE, Ping(peer=DECODE))
        effects += written.sleep(STEP_S)
    assert reports(effects) == [("failed", "safe")]
    assert written.core.is_idle
    assert messages(written.sleep(2.0), Notice) == []


def test_lost_notices_cost_a_pause_and_not_the_transfer(wire: Wire, written: CoreDriver) -> None:
    """Both sides together: the repeated notices are what the decode rank would have counted the first time."""
    wire.notice(OTHER, 0, (0, 8), last=True)
    token = wire.grants[PREFILL].token
    effects: list[Effect] = []
    for _, notice in messages(written.sleep(1.0), Notice):
        assert isinstance(notice, Notice)
        fields = {name: getattr(notice, name) for name in notice.__struct_fields__} | {"token": token, "num_bytes": 8}
        effects += wire.core.hear(PREFILL, Notice(**fields))
    assert reports(effects) == [("success", "safe")]


def test_an_answered_delivery_leaves_no_deadline() -> None:
    core = CoreDriver(PREFILL, TIMEOUTS)
    core.meet_decode()
    idle = len(core.core.deadlines)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    post(core, 0)
    settle(core, 0)
    assert len(core.core.deadlines) > idle
    core.hear(DECODE, Received(room=ROOM, generation=1))
    assert len(core.core.deadlines) == idle
