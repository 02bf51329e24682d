"""Ranks that drain, say goodbye, break, restart or die; and what their peers make of it."""

import pytest

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, LocalProtocolError, RankDraining, Stage
from kvflow.state import events as ev
from kvflow.state.effects import ForgetPeer, GreetInstance, ProbePeer, ReportReceiver, ReportSender
from kvflow.wire.messages import Drained, Failed, Failure, Goodbye, Grant, Ping, Received
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, debts, grant, messages, peer, reports
from tests.support.receiving import Wire, wish
from tests.support.sending import ROOM, chunk, enqueued, post, settle

OTHER = peer("prefill", 1)
LEAVING = Failure(FailureReason.PEER_CLOSED, Stage.BOOTSTRAP, "prefill/0", "prefill/0 is draining")
BROKEN = Failure(FailureReason.BROKEN, Stage.ENQUEUE, "prefill/0", "a task of this rank failed")
DRAIN = ev.DrainStarted(LEAVING)


@pytest.fixture
def prefill() -> CoreDriver:
    core = CoreDriver(PREFILL)
    core.meet_decode()
    return core


@pytest.fixture
def wire() -> Wire:
    """One room, granted to two ranks."""
    core = CoreDriver(DECODE)
    core(wish())
    return Wire(core, core.meet_prefill(PREFILL, OTHER))


def refusals(core: CoreDriver, asked: Grant) -> list[Failure]:
    said = messages(core.hear(DECODE, asked), Failed)
    assert all(isinstance(failed, Failed) and failed.drained for _, failed in said)
    return [failed.failure for _, failed in said if isinstance(failed, Failed)]


# Draining ----------------------------------------------------------------------------------------------------------


def test_a_draining_rank_finishes_what_runs(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(chunk(0, 4))
    prefill(DRAIN)
    assert enqueued(prefill(chunk(4, 8, last=True))) == [(1, (4, 8))]
    for seq in (0, 1):
        post(prefill, seq)
        settle(prefill, seq)
    assert reports(prefill.hear(DECODE, Received(room=ROOM, generation=1))) == [("success", "safe")]


def test_an_open_room_is_still_granted_while_the_rank_drains(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill(chunk(0, 8, last=True))
    prefill(DRAIN)
    assert enqueued(prefill.hear(DECODE, grant())) == [(0, (0, 8))]


def test_a_draining_rank_opens_no_room(prefill: CoreDriver) -> None:
    prefill(DRAIN)
    with pytest.raises(RankDraining):
        prefill(ev.SendOpened(ROOM))
    with pytest.raises(RankDraining):
        prefill(wish())
    assert prefill.core.is_idle


def test_who_waits_for_a_room_is_turned_away_when_the_rank_drains(prefill: CoreDriver) -> None:
    for room in (1, 2):
        prefill.hear(DECODE, grant(room=room, generation=room))
    before = len(prefill.core.deadlines)
    said = messages(prefill(DRAIN), Failed)
    assert [(to, failed.room, failed.failure) for to, failed in said if isinstance(failed, Failed)] == [
        (DECODE, 1, LEAVING),
        (DECODE, 2, LEAVING),
    ]
    assert len(prefill.core.deadlines) == before - 2
    assert refusals(prefill, grant(room=1, generation=1)) == [LEAVING], "and told again"


def test_who_asks_a_draining_rank_for_a_new_room_is_told_at_once(prefill: CoreDriver) -> None:
    prefill(DRAIN)
    assert refusals(prefill, grant()) == [LEAVING]
    assert len(prefill.core.senders.waiting) == 0


def test_a_draining_rank_that_has_done_its_part_fails_nobody(prefill: CoreDriver) -> None:
    """It owed nothing, so its room is over, but the decode rank asks it again until the others are done."""
    prefill.meet_decode(owed=())
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant(pages={}))
    assert reports(prefill(chunk(0, 8, last=True))) == [("success", "safe")]
    prefill(DRAIN)
    assert refusals(prefill, grant(pages={})) == []


def test_a_late_grant_learns_its_own_end_from_a_draining_rank(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(ev.SendAborted(ROOM, ABORTED))
    prefill(DRAIN)
    assert refusals(prefill, grant()) == [ABORTED]


def test_draining_twice_is_draining_once(prefill: CoreDriver) -> None:
    prefill.hear(DECODE, grant())
    assert len(prefill(DRAIN)) == 1
    assert prefill(DRAIN) == []


def test_a_draining_rank_can_be_closed(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(DRAIN)
    assert reports(prefill(ev.ClosingStarted(ABORTED)))[-1] == ("aborted", "safe")
    assert refusals(prefill, grant(room=8, generation=2)) == [ABORTED]
    with pytest.raises(LocalProtocolError, match="closing"):
        prefill(ev.SendOpened(8))


def test_rooms_that_wait_for_their_instance_may_finish_while_a_decode_rank_drains() -> None:
    decode = CoreDriver(DECODE)
    decode(wish())
    decode(DRAIN)
    with pytest.raises(RankDraining):
        decode(wish(2, room=8))
    wire = Wire(decode, decode.meet_prefill(PREFILL))
    assert reports(wire.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]


# Goodbye -----------------------------------------------------------------------------------------------------------


def test_goodbye_of_a_broken_rank_tells_why(wire: Wire) -> None:
    effects = wire.core.hear(PREFILL, Goodbye(peer=PREFILL, failure=BROKEN))
    failures = {effect.failure for effect in effects if isinstance(effect, ReportReceiver)}
    assert failures == {BROKEN}
    assert ProbePeer(PREFILL) in effects
    assert effects[-1] == ForgetPeer(PREFILL)


def test_goodbye_of_a_broken_decode_rank_tells_why(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    effects = prefill.hear(DECODE, Goodbye(peer=DECODE, failure=BROKEN))
    assert {effect.failure for effect in effects if isinstance(effect, ReportSender)} == {BROKEN}


def test_goodbye_without_a_reason_is_an_orderly_end(wire: Wire) -> None:
    effects = wire.core.hear(PREFILL, Goodbye(peer=PREFILL))
    (failure, *_) = [effect.failure for effect in effects if isinstance(effect, ReportReceiver)]
    assert failure is not None
    assert failure.reason is FailureReason.PEER_CLOSED


def test_a_second_goodbye_is_only_odd(wire: Wire) -> None:
    wire.core.hear(PREFILL, Goodbye(peer=PREFILL, failure=BROKEN))
    effects = wire.core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert [getattr(effect, "kind", None) for effect in effects] == ["message_from_stranger"]


def test_goodbye_forgets_grants_that_wait(prefill: CoreDriver) -> None:
    idle = len(CoreDriver(PREFILL).core.deadlines)
    prefill.hear(DECODE, grant())
    prefill.hear(DECODE, Goodbye(peer=DECODE))
    assert (len(prefill.core.senders.waiting), len(prefill.core.deadlines)) == (0, idle)
    assert prefill(ev.SendOpened(ROOM)) == []
    assert prefill(chunk(0, 8, last=True)) == []


def test_drained_with_a_reason_gives_the_reason(wire: Wire) -> None:
    """The Failed that said it before was lost."""
    effects = wire.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0, failure=BROKEN))
    assert {effect.failure for effect in effects if isinstance(effect, ReportReceiver)} == {BROKEN}


def test_drained_says_why(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(chunk(0, 8, last=True))
    post(prefill, 0)
    prefill(ev.SendAborted(ROOM, ABORTED))
    ((_, drained),) = messages(settle(prefill, 0), Drained)
    assert isinstance(drained, Drained)
    assert drained.failure == ABORTED


# Lives that are over -------------------------------------------------------------------------------------------------


def gone(wire: Wire) -> list[tuple[str, str]]:
    return reports(wire.core(ev.PeerGone(PREFILL)))


def test_the_death_of_a_rank_fences_it_and_the_others_drain(wire: Wire) -> None:
    assert gone(wire) == [("failed", "draining")]
    assert reports(wire.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))) == [("failed", "safe")]


def test_the_death_of_a_rank_that_left_long_ago_ends_the_quarantine(wire: Wire) -> None:
    wire.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1, failure=ABORTED))
    wire.core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert reports(wire.core.sleep(Timeouts().drain_s)) == [("failed", "quarantined")]
    assert gone(wire) == [("failed", "safe")]
    assert wire.core.core.is_idle


def test_the_death_of_a_rank_that_has_done_its_part_is_no_failure(wire: Wire) -> None:
    wire.notice(PREFILL, 0, (0, 8), last=True)
    assert gone(wire) == []
    assert reports(wire.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_the_death_of_a_stranger_is_nothing(wire: Wire) -> None:
    assert wire.core(ev.PeerGone(peer("elsewhere"))) == []
    assert wire.core(ev.PeerGone(peer("prefill", 0, incarnation=2))) == []


@pytest.mark.parametrize("event", [ev.PeerGone(DECODE), ev.PeerLeft(DECODE, BROKEN)])
def test_a_prefill_rank_takes_the_end_of_a_life_too(prefill: CoreDriver, event: ev.Event) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    assert reports(prefill(event))[-1] == ("failed", "safe")
    assert prefill(event) == []


def test_a_restart_of_a_rank_fails_what_the_former_life_owed(wire: Wire) -> None:
    again = peer("prefill", 0, incarnation=2)
    effects = wire.core.meet_prefill(again, OTHER)
    assert reports(effects) == [("failed", "draining")]
    assert ForgetPeer(PREFILL) in effects
    assert len(messages(wire.core(wish(2, room=8)), Grant)) == 2


def test_death_during_the_greeting_of_another_instance_changes_nothing_there() -> None:
    core = CoreDriver(DECODE)
    core(wish())
    core(ev.PeerGone(PREFILL))
    assert GreetInstance("prefill") not in core(wish(2, room=8)), "it is being greeted already"
    assert len(messages(core.meet_prefill(PREFILL), Grant)) == 2


def test_a_peer_with_no_lease_to_speak_of_does_not_stop_the_clock() -> None:
    """Its deadlines must lie in the future however short the lease that it asks for."""
    core = CoreDriver(PREFILL)
    core(ev.PeerGreeted(DECODE, 1e-300, ("kv",)))
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    post(core, 0)
    assert ForgetPeer(DECODE) in core.sleep(0.1)
    assert core.core.peers == {}


@pytest.mark.parametrize("message", [Ping(peer=DECODE), grant(), Received(room=ROOM, generation=1)])
def test_a_decode_rank_obeys_nothing_that_only_a_prefill_rank_should_hear(wire: Wire, message: Grant) -> None:
    effects = wire.core.hear(PREFILL, message)
    assert reports(effects) == []
    assert wire.core.core.senders.rooms == {}
    assert len(wire.core.core.senders.waiting) == 0


def test_a_rank_that_owes_nothing_may_die_without_harm() -> None:
    core = CoreDriver(DECODE)
    core(wish())
    wire = Wire(
        core, core(ev.InstanceGreeted("prefill", (ev.GreetedRank(PREFILL, debts()), ev.GreetedRank(OTHER, {}))))
    )
    assert reports(core(ev.PeerGone(OTHER))) == []
    assert reports(wire.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]
