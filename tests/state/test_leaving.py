"""Ranks that drain, say goodbye, break, restart or die, and how their peers react."""

import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, LocalProtocolError, RankDraining, Stage
from kvflow.state import events as ev
from kvflow.state.effects import (
    Disconnect,
    DisconnectTransport,
    LookUp,
    ProbePeer,
    ReportReceiver,
    ReportSender,
)
from kvflow.wire.messages import Ack, Drained, Failed, Failure, Goodbye, Grant
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
    records,
    reports,
)
from tests.support.receiving import Transfer, request
from tests.support.sending import ROOM, chunk, end, posted

OTHER = peer("prefill", 1)
LEAVING = Failure(FailureReason.PEER_CLOSED, Stage.BOOTSTRAP, "prefill/0", "prefill/0 is draining")
BROKEN = Failure(FailureReason.BROKEN, Stage.ENQUEUE, "prefill/0", "a task of this rank failed")
DRAIN = ev.DrainStarted(LEAVING)


@pytest.fixture
def prefill() -> PrefillDriver:
    core = PrefillDriver()
    core.connect()
    return core


@pytest.fixture
def transfer() -> Transfer:
    """One room, granted to two ranks."""
    core = DecodeDriver()
    core(request())
    return Transfer(core, core.connect(PREFILL, OTHER))


def refusals(core: PrefillDriver, asked: Grant) -> list[Failure]:
    said = messages(core.hear(DECODE, asked), Failed)
    assert all(isinstance(failed, Failed) and failed.drained for _, failed in said)
    return [failed.failure for _, failed in said if isinstance(failed, Failed)]


# Draining ----------------------------------------------------------------------------------------------------------


def test_a_draining_rank_finishes_what_runs(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(chunk(0, 4))
    prefill(DRAIN)
    assert posted(prefill(chunk(4, 8, last=True))) == [(1, (4, 8))]
    for seq in (0, 1):
        end(prefill, seq)
    assert reports(prefill.hear(DECODE, Ack(room=ROOM, generation=1))) == [("success", "safe")]


def test_an_open_room_is_still_granted_while_the_rank_drains(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill(chunk(0, 8, last=True))
    prefill(DRAIN)
    assert posted(prefill.hear(DECODE, grant())) == [(0, (0, 8))]


def test_a_draining_rank_opens_no_room(prefill: PrefillDriver) -> None:
    prefill(DRAIN)
    with pytest.raises(RankDraining):
        prefill(ev.SendOpened(ROOM))
    assert not prefill.core.rooms.rooms


def test_who_waits_for_a_room_is_turned_away_when_the_rank_drains(prefill: PrefillDriver) -> None:
    for room in (1, 2):
        prefill.hear(DECODE, grant(room=room, generation=room))
    before = len(prefill.core.timers)
    said = messages(prefill(DRAIN), Failed)
    assert [(to, failed.room, failed.failure) for to, failed in said if isinstance(failed, Failed)] == [
        (DECODE, 1, LEAVING),
        (DECODE, 2, LEAVING),
    ]
    assert len(prefill.core.timers) == before - 2
    assert refusals(prefill, grant(room=1, generation=1)) == [LEAVING], "and told again"


def test_who_asks_a_draining_rank_for_a_new_room_is_told_at_once(prefill: PrefillDriver) -> None:
    prefill(DRAIN)
    assert refusals(prefill, grant()) == [LEAVING]
    assert len(prefill.core.requests.waiting) == 0


def test_a_draining_rank_that_has_done_its_part_fails_nobody() -> None:
    """It sends nothing, so its room is over, but the decode rank repeats its grant until the other ranks are done."""
    prefill = PrefillDriver()
    prefill.connect(wants=False)
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant(pages={}))
    assert reports(prefill(chunk(0, 8, last=True))) == [("success", "safe")]
    prefill(DRAIN)
    assert refusals(prefill, grant(pages={})) == []


def test_a_late_grant_learns_its_own_end_from_a_draining_rank(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(ev.SendAborted(ROOM, ABORTED))
    prefill(DRAIN)
    assert refusals(prefill, grant()) == [ABORTED]


def test_draining_twice_is_draining_once(prefill: PrefillDriver) -> None:
    prefill.hear(DECODE, grant())
    assert len(prefill(DRAIN)) == 1
    assert prefill(DRAIN) == []


def test_a_draining_rank_can_be_closed(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(DRAIN)
    assert reports(prefill(ev.CloseStarted(ABORTED)))[-1] == ("aborted", "safe")
    assert refusals(prefill, grant(room=8, generation=2)) == [ABORTED]
    with pytest.raises(LocalProtocolError, match="closing"):
        prefill(ev.SendOpened(8))


def test_rooms_that_wait_for_their_instance_may_finish_while_a_decode_rank_drains() -> None:
    decode = DecodeDriver()
    decode(request())
    decode(DRAIN)
    with pytest.raises(RankDraining):
        decode(request(2, room=8))
    transfer = Transfer(decode, decode.connect(PREFILL))
    assert reports(transfer.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]


# Goodbye -----------------------------------------------------------------------------------------------------------


def test_goodbye_of_a_broken_rank_tells_why(transfer: Transfer) -> None:
    effects = transfer.core.hear(PREFILL, Goodbye(peer=PREFILL, failure=BROKEN))
    failures = {effect.failure for effect in effects if isinstance(effect, ReportReceiver)}
    assert failures == {BROKEN}
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) in effects
    assert Disconnect(PREFILL) in effects


def test_goodbye_of_a_broken_decode_rank_tells_why(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    effects = prefill.hear(DECODE, Goodbye(peer=DECODE, failure=BROKEN))
    assert {effect.failure for effect in effects if isinstance(effect, ReportSender)} == {BROKEN}


def test_goodbye_without_a_reason_is_an_orderly_end(transfer: Transfer) -> None:
    effects = transfer.core.hear(PREFILL, Goodbye(peer=PREFILL))
    (failure, *_) = [effect.failure for effect in effects if isinstance(effect, ReportReceiver)]
    assert failure is not None
    assert failure.reason is FailureReason.PEER_CLOSED


def test_a_second_goodbye_changes_nothing(transfer: Transfer) -> None:
    transfer.core.hear(PREFILL, Goodbye(peer=PREFILL, failure=BROKEN))
    assert transfer.core.hear(PREFILL, Goodbye(peer=PREFILL)) == []


def test_goodbye_fails_rooms_whose_grants_wait_when_they_are_opened(prefill: PrefillDriver) -> None:
    """No decode rank would ask for those rooms, and the engine would hold their pages for `grant_s`."""
    prefill.hear(DECODE, grant())
    prefill.hear(DECODE, Goodbye(peer=DECODE))
    assert len(prefill.core.requests.waiting) == 0
    assert reports(prefill(ev.SendOpened(ROOM))) == [("failed", "draining"), ("failed", "safe")]
    assert len(prefill.core.timers) == len(PrefillDriver().core.timers)


def test_goodbye_leaves_nothing_of_a_room_that_is_never_opened(prefill: PrefillDriver) -> None:
    prefill.hear(DECODE, grant())
    prefill.hear(DECODE, Goodbye(peer=DECODE))
    prefill.sleep(30.0)
    assert len(prefill.core.timers) == len(PrefillDriver().core.timers)
    assert prefill(ev.SendOpened(ROOM)) == []
    assert prefill(chunk(0, 8, last=True)) == []


def test_drained_with_a_reason_gives_the_reason(transfer: Transfer) -> None:
    """The Failed that gave the reason before was lost."""
    effects = transfer.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0, failure=BROKEN))
    assert {effect.failure for effect in effects if isinstance(effect, ReportReceiver)} == {BROKEN}


def test_drained_says_why(prefill: PrefillDriver) -> None:
    prefill(ev.SendOpened(ROOM))
    prefill.hear(DECODE, grant())
    prefill(chunk(0, 8, last=True))
    prefill(ev.SendAborted(ROOM, ABORTED))
    ((_, drained),) = messages(end(prefill, 0), Drained)
    assert isinstance(drained, Drained)
    assert drained.failure == ABORTED


# Ended processes -----------------------------------------------------------------------------------------------------


def gone(transfer: Transfer) -> list[tuple[str, str]]:
    return reports(transfer.core(ev.ProbeFinished(PREFILL, is_gone=True)))


def test_the_death_of_a_rank_fences_it_and_the_others_drain(transfer: Transfer) -> None:
    assert gone(transfer) == [("failed", "draining")]
    assert reports(transfer.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))) == [("failed", "safe")]


def test_the_death_of_a_rank_that_left_long_ago_ends_the_quarantine(transfer: Transfer) -> None:
    transfer.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1, failure=ABORTED))
    transfer.core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert reports(transfer.core.sleep(Timeouts().drain_s)) == [("failed", "quarantined")]
    assert gone(transfer) == [("failed", "safe")]
    assert not transfer.core.core.rooms.rooms


def test_the_death_of_a_rank_that_has_done_its_part_is_no_failure(transfer: Transfer) -> None:
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert gone(transfer) == []
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_the_death_of_an_unknown_rank_is_nothing(transfer: Transfer) -> None:
    for unknown in (peer("elsewhere"), peer("prefill", 0, incarnation=2)):
        effects = transfer.core(ev.ProbeFinished(unknown, is_gone=True))
        assert reports(effects) == []
        assert LookUp("prefill") not in effects


def test_a_restart_of_a_rank_fails_what_the_former_incarnation_was_granted(transfer: Transfer) -> None:
    again = peer("prefill", 0, incarnation=2)
    transfer.core(ev.ConnectionLost(PREFILL))
    effects = transfer.core.connect(again, OTHER)
    assert reports(effects) == [("failed", "draining")]
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) not in effects, "that is under way already"
    assert len(messages(transfer.core(request(2, room=8)), Grant)) == 2


def test_whoever_has_taken_the_port_of_another_proves_that_it_has_ended() -> None:
    """A host gives a port to one process at a time."""
    core = DecodeDriver()
    core(request())
    core.connect(PREFILL)
    core(ev.ConnectionLost(PREFILL))
    (old,) = records(PREFILL)
    moved = replace(old, peer=peer("prefill", 0, incarnation=2))
    effects = core.welcome(core.compiled(core(ev.InstanceFound("prefill", (moved,)))))
    assert reports(effects) == [("failed", "draining"), ("failed", "safe")]


def test_a_peer_with_no_lease_to_speak_of_does_not_stop_the_clock() -> None:
    """Its deadlines must lie in the future, however short a lease it asks for."""
    core = PrefillDriver()
    core.connect(lease_s=1e-300)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    assert DisconnectTransport(DECODE) in core.sleep(0.1)
    assert len(core.core.peers) == 0


def test_a_rank_that_sends_nothing_may_die_without_harm() -> None:
    core = DecodeDriver()
    core(request())
    transfer = Transfer(core, core.connect(PREFILL, OTHER, silent=[OTHER]))
    assert reports(core(ev.ProbeFinished(OTHER, is_gone=True))) == []
    assert reports(transfer.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]
