"""The receiving side of the core: it counts by engine rank."""

import pytest

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, Stage
from kvflow.state import events as ev
from kvflow.state.effects import CountOddity, Effect, ForgetPeer, GreetInstance, ProbePeer, ReportReceiver
from kvflow.wire.messages import (
    Cancel,
    Drained,
    Failed,
    Failure,
    Goodbye,
    Grant,
    PeerId,
    Ping,
    Pong,
    Received,
    Refuse,
)
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, debts, messages, peer, reports
from tests.support.receiving import ROOM, Wire, wish

OTHER = peer("prefill", 1)
FAILURE = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "it broke")


@pytest.fixture
def core() -> CoreDriver:
    return CoreDriver(DECODE)


@pytest.fixture
def wire(core: CoreDriver) -> Wire:
    """One room, granted to two ranks that owe two bytes for each token."""
    core(wish())
    return Wire(core, core.meet_prefill(PREFILL, OTHER))


def oddities(effects: list[Effect]) -> list[str]:
    return [effect.kind for effect in effects if isinstance(effect, CountOddity)]


def test_first_contact_greets_once_and_then_grants_to_all(core: CoreDriver) -> None:
    assert core(wish(1)) == [GreetInstance("prefill")]
    assert core(wish(2, room=8)) == []
    effects = core.meet_prefill(PREFILL, OTHER)
    assert [
        (receiver, granted.room) for receiver, granted in messages(effects, Grant) if isinstance(granted, Grant)
    ] == [
        (PREFILL, 7),
        (OTHER, 7),
        (PREFILL, 8),
        (OTHER, 8),
    ]
    assert len(messages(core(wish(3, room=9)), Grant)) == 2


def test_success_needs_every_rank(wire: Wire) -> None:
    assert wire.notice(PREFILL, 0, (0, 8), last=True, metadata=b"a") == []
    effects = wire.notice(OTHER, 0, (0, 8), last=True, metadata=b"b")
    assert reports(effects) == [("success", "safe")]
    report = effects[0]
    assert isinstance(report, ReportReceiver)
    assert report.handed is not None
    assert [to for to, _ in messages(effects, Received)] == [PREFILL, OTHER]
    assert (report.handed.metadata, report.handed.num_bytes, report.handed.num_notices) == ({0: b"a", 1: b"b"}, 32, 2)
    assert wire.core.core.is_idle


def test_notices_may_come_in_any_order(wire: Wire) -> None:
    wire.notice(OTHER, 0, (0, 8), last=True)
    assert wire.notice(PREFILL, 2, (6, 8), last=True) == []
    assert wire.notice(PREFILL, 0, (0, 3)) == []
    assert reports(wire.notice(PREFILL, 1, (3, 6))) == [("success", "safe")]


def test_duplicates_count_once(wire: Wire) -> None:
    wire.notice(PREFILL, 0, (0, 8), last=True)
    assert wire.notice(PREFILL, 0, (0, 8), last=True) == []
    assert oddities(wire.notice(PREFILL, 0, (0, 6), last=True)) == ["notice_contradicts_itself"]
    assert reports(wire.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


@pytest.mark.parametrize(
    ("changes", "oddity"),
    [
        ({"engine_rank": 2}, "notice_from_unknown_rank"),
        ({"engine_rank": 1}, "notice_with_wrong_token"),
        ({"token": 1}, "notice_with_wrong_token"),
        ({"generation": 2}, "notice_of_unknown_transfer"),
        ({"room": 8}, "notice_of_unknown_transfer"),
    ],
)
def test_foreign_notices_count_never(wire: Wire, changes: dict[str, object], oddity: str) -> None:
    assert oddities(wire.notice(PREFILL, 0, (0, 8), last=True, **changes)) == [oddity]
    wire.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(wire.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_impossible_sequence_numbers_count_never(wire: Wire) -> None:
    assert oddities(wire.notice(PREFILL, 9, (0, 1))) == ["notice_seq_impossible"]
    wire.notice(PREFILL, 1, (4, 8), last=True)
    assert oddities(wire.notice(PREFILL, 2, (0, 1))) == ["notice_after_last"]
    wire.notice(OTHER, 3, (0, 8))
    assert oddities(wire.notice(OTHER, 1, (0, 8), last=True)) == ["notice_after_last"]


@pytest.mark.parametrize(
    "notices",
    [
        [(0, (0, 7))],
        [(0, (1, 8))],
        [(0, (0, 4)), (1, (5, 8))],
        [(0, (0, 5)), (1, (4, 8))],
    ],
)
def test_notices_that_do_not_add_up_fail_the_transfer(wire: Wire, notices: list[tuple[int, tuple[int, int]]]) -> None:
    effects: list[Effect] = []
    for seq, tokens in notices:
        effects = wire.notice(PREFILL, seq, tokens, last=seq == len(notices) - 1)
    assert reports(effects)[0] == ("failed", "draining")
    ((_, cancel), *_) = messages(effects, Cancel)
    assert isinstance(cancel, Cancel)
    assert cancel.failure.reason is FailureReason.INCOMPLETE


def test_missing_bytes_fail_the_transfer(wire: Wire) -> None:
    effects = wire.notice(PREFILL, 0, (0, 8), last=True, num_bytes=15)
    ((_, cancel), *_) = messages(effects, Cancel)
    assert isinstance(cancel, Cancel)
    assert "15 bytes" in cancel.failure.detail


def test_ranks_that_owe_nothing_are_told_but_not_waited_for(core: CoreDriver) -> None:
    core(wish())
    ranks = (ev.GreetedRank(PREFILL, debts()), ev.GreetedRank(OTHER, {}))
    wire = Wire(core, core(ev.InstanceGreeted("prefill", ranks)))
    assert (wire.grants[PREFILL].pages, wire.grants[OTHER].pages) == ({"kv": b"\1\0\0\0"}, {})
    assert reports(wire.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]


def test_a_full_prefix_hit_waits_for_the_metadata_only(core: CoreDriver) -> None:
    core(wish(tokens=(8, 8)))
    wire = Wire(core, core.meet_prefill(PREFILL))
    effects = wire.notice(PREFILL, 0, (8, 8), last=True, metadata=b"m")
    assert reports(effects) == [("success", "safe")]


def test_abort_keeps_the_pages_until_every_rank_has_drained(wire: Wire) -> None:
    effects = wire.core(ev.ReceiveAborted(ROOM, ABORTED))
    assert reports(effects) == [("aborted", "draining")]
    assert [receiver for receiver, _ in messages(effects, Cancel)] == [PREFILL, OTHER]
    drained = [Drained(room=ROOM, generation=1, engine_rank=rank) for rank in (0, 1)]
    assert reports(wire.core.hear(PREFILL, drained[0])) == []
    assert reports(wire.core.hear(OTHER, drained[1])) == [("aborted", "safe")]


def test_abort_before_anything_was_granted_is_safe_at_once(core: CoreDriver) -> None:
    core(wish())
    assert reports(core(ev.ReceiveAborted(ROOM, ABORTED))) == [("aborted", "draining"), ("aborted", "safe")]
    assert messages(core.meet_prefill(PREFILL), Grant) == []


def test_completion_during_the_drain_makes_the_pages_safe_but_not_a_success(wire: Wire) -> None:
    wire.core(ev.ReceiveAborted(ROOM, ABORTED))
    wire.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(wire.notice(OTHER, 0, (0, 8), last=True)) == [("aborted", "safe")]


@pytest.mark.parametrize("is_drained", [True, False])
def test_failure_of_one_rank_ends_it_for_all(wire: Wire, is_drained: bool) -> None:
    failed = Failed(room=ROOM, generation=1, engine_rank=0, failure=FAILURE, drained=is_drained)
    effects = wire.core.hear(PREFILL, failed)
    assert reports(effects) == [("failed", "draining")]
    assert [receiver for receiver, _ in messages(effects, Cancel)] == [OTHER]
    effects = wire.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))
    if not is_drained:
        assert reports(effects) == []
        effects = wire.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))
    assert reports(effects) == [("failed", "safe")]


def test_drained_without_a_reason_is_a_failure(wire: Wire) -> None:
    effects = wire.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))
    assert reports(effects)[0] == ("failed", "draining")


def test_drain_that_does_not_come_ends_in_quarantine_until_it_does(wire: Wire) -> None:
    wire.core(ev.ReceiveAborted(ROOM, ABORTED))
    wire.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))
    effects: list[Effect] = []
    for _ in range(5):
        wire.core.hear(PREFILL, Pong(peer=PREFILL))
        effects += wire.core.sleep(Timeouts().drain_s / 5)
    assert reports(effects) == [("aborted", "quarantined")]
    assert not wire.core.core.is_idle
    late = wire.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))
    assert reports(late) == [("aborted", "safe")]
    assert wire.core.core.is_idle


def test_room_is_free_again_while_its_old_pages_are_in_quarantine(wire: Wire) -> None:
    wire.core(ev.ReceiveAborted(ROOM, ABORTED))
    wire.core.sleep(Timeouts().drain_s)
    wire.core(wish(2))
    assert set(wire.core.core.receivers.receivers) == {1, 2}


def lose(wire: Wire, *, spare: PeerId) -> list[Effect]:
    """Let every rank but one fall silent for longer than its lease."""
    effects: list[Effect] = []
    for _ in range(4):
        wire.core.hear(spare, Pong(peer=spare))
        effects = wire.core.sleep(0.75)
    return effects


def test_lost_rank_means_quarantine_if_no_proof_comes_in_time(wire: Wire) -> None:
    wire.notice(OTHER, 0, (0, 8), last=True)
    effects = lose(wire, spare=OTHER)
    assert reports(effects) == [("failed", "draining")]
    assert ProbePeer(PREFILL) in effects
    assert reports(wire.core.sleep(5.0)) == [("failed", "quarantined")]


def test_death_of_a_lost_rank_is_a_proof(wire: Wire) -> None:
    wire.notice(OTHER, 0, (0, 8), last=True)
    lose(wire, spare=OTHER)
    assert reports(wire.core(ev.PeerGone(PREFILL))) == [("failed", "safe")]


def test_death_proves_nothing_if_bytes_can_outlive_it() -> None:
    core = CoreDriver(DECODE, ends_with_process=False)
    core.meet_prefill(PREFILL)
    core(wish())
    assert reports(core(ev.PeerGone(PREFILL))) == [("failed", "draining")]
    assert reports(core.sleep(5.0)) == [("failed", "quarantined")]


def test_death_is_a_proof_once_the_transport_has_seen_the_last_bytes_land() -> None:
    core = CoreDriver(DECODE, ends_with_process=False)
    core.meet_prefill(PREFILL)
    core(wish())
    assert reports(core(ev.PeerGone(PREFILL))) == [("failed", "draining")]
    assert reports(core(ev.PeerGone(PREFILL, is_quiet=True))) == [("failed", "safe")]
    assert core(ev.PeerGone(PREFILL, is_quiet=True)) == []


def test_rank_that_has_done_its_part_may_leave(wire: Wire) -> None:
    wire.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(wire.core.hear(PREFILL, Goodbye(peer=PREFILL))) == []
    assert reports(wire.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_instance_is_greeted_anew_after_one_of_its_ranks_was_lost(wire: Wire) -> None:
    wire.core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert GreetInstance("prefill") in wire.core(wish(2, room=8))


def test_unreachable_instance_fails_every_room_that_waits_for_it(core: CoreDriver) -> None:
    core(wish(1))
    core(wish(2, room=8))
    effects = core(ev.InstanceUnreachable("prefill", FAILURE))
    assert reports(effects) == [("failed", "draining"), ("failed", "safe")] * 2
    assert core(wish(3)) == [GreetInstance("prefill")]


def test_deadline_ends_a_transfer_that_never_completes(core: CoreDriver) -> None:
    core(wish(timeout_s=2.0))
    core.meet_prefill(PREFILL)
    core.hear(PREFILL, Pong(peer=PREFILL))
    effects = core.sleep(2.0)
    assert reports(effects) == [("failed", "draining")]
    assert len(messages(effects, Cancel)) == 1


def test_second_receive_of_a_room_is_refused_and_changes_nothing(wire: Wire) -> None:
    with pytest.raises(LocalProtocolError) as error:
        wire.core(wish(2))
    assert error.value.values == {"room": ROOM, "generation": 1}
    wire.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(wire.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_generations_are_never_reused(core: CoreDriver) -> None:
    core(wish(5))
    with pytest.raises(LocalProtocolError, match="generation"):
        core(wish(5, room=8))


def test_rooms_are_bounded() -> None:
    core = CoreDriver(DECODE, limits=Limits(transfers=1))
    core(wish())
    with pytest.raises(CapacityExceeded):
        core(wish(2, room=8))


def test_tokens_of_grants_differ_by_rank_and_transfer(core: CoreDriver) -> None:
    core.meet_prefill(PREFILL, OTHER)
    grants = [granted for _, granted in messages(core(wish()), Grant)]
    assert len({granted.token for granted in grants if isinstance(granted, Grant)}) == 2


def test_peers_are_pinged_within_their_lease(core: CoreDriver) -> None:
    core.meet_prefill(PREFILL)
    assert len(messages(core.sleep(2.9), Ping)) == 2


def test_message_that_a_peer_may_not_send_is_counted(wire: Wire) -> None:
    effects = wire.core.hear(PREFILL, Refuse(peer=PREFILL, to=None, detail=""))
    assert oddities(effects) == ["unexpected_refuse"]


def test_a_prefill_rank_that_stays_silent_is_forgotten(core: CoreDriver) -> None:
    core.meet_prefill(PREFILL, OTHER)
    effects = core.sleep(3.0 * 13)
    assert [effect for effect in effects if isinstance(effect, ForgetPeer)] == [ForgetPeer(PREFILL), ForgetPeer(OTHER)]
    assert (core.core.peers, len(core.core.deadlines)) == ({}, 0)


def test_a_transfer_to_which_nobody_owes_anything_is_complete(core: CoreDriver) -> None:
    """Only optional layers are wanted, and no prefill rank has them."""
    core(wish())
    effects = core(ev.InstanceGreeted("prefill", (ev.GreetedRank(PREFILL, {}),)))
    assert reports(effects) == [("success", "safe")]
    assert [to for to, _ in messages(effects, Received)] == [PREFILL]
    assert core.core.is_idle


def test_an_instance_that_was_parted_with_is_greeted_for_its_proofs(wire: Wire) -> None:
    """Otherwise pages in quarantine would wait for the next request to the same instance."""
    wire.core.hear(PREFILL, Goodbye(peer=PREFILL))
    assert GreetInstance("prefill") in wire.core.sleep(1.0)
    assert GreetInstance("prefill") not in wire.core.sleep(60.0)
    assert {receiver for receiver, _ in messages(wire.core.meet_prefill(PREFILL, OTHER), Cancel)} == {PREFILL, OTHER}
