"""Rooms of a decode rank: notices are counted by engine rank, and pages are released once every rank proved quiet."""

import statistics
from functools import partial

import msgspec
import numpy as np
import pytest

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, Stage
from kvflow.geometry.pages import WIRE_PAGES
from kvflow.state import events as ev
from kvflow.state.decode import rooms
from kvflow.state.effects import (
    DecodeEffect,
    Disconnect,
    LookUp,
    ProbePeer,
    ReportReceiver,
    WaitForFence,
    WatchNotices,
)
from kvflow.state.peers import BUSY_LEASES
from kvflow.wire.messages import (
    PARTS_PER_QUERY,
    Ack,
    Cancel,
    Drained,
    Failed,
    Failure,
    Goodbye,
    Grant,
    GrantedPages,
    PagesQuery,
    PeerId,
    Ping,
    Pong,
    Refuse,
)
from tests.support.cores import (
    ABORTED,
    PREFILL,
    DecodeDriver,
    anomalies,
    endpoint_of,
    messages,
    peer,
    reports,
)
from tests.support.receiving import ROOM, Transfer, request
from tests.support.steps import num_steps

OTHER = peer("prefill", 1)
GONE = ev.ProbeFinished(PREFILL, is_gone=True)
FAILURE = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "it broke")


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver()


@pytest.fixture
def transfer(core: DecodeDriver) -> Transfer:
    """One room, granted to two ranks, each of which must send two bytes per token."""
    core(request())
    return Transfer(core, core.connect(PREFILL, OTHER))


def test_every_rank_of_the_instance_is_granted(core: DecodeDriver) -> None:
    core(request(1))
    core(request(2, room=8))
    effects = core.connect(PREFILL, OTHER)
    grants = [(to, granted.room) for to, granted in messages(effects, Grant) if isinstance(granted, Grant)]
    assert grants == [(PREFILL, 7), (OTHER, 7), (PREFILL, 8), (OTHER, 8)]
    assert len(messages(core(request(3, room=9)), Grant)) == 2


def test_an_answer_has_no_more_parts_than_an_honest_query_asks_for(
    core: DecodeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "PAGES_INLINE", 1)
    monkeypatch.setattr("kvflow.wire.messages.rooms.PAGES_PER_PART", 1)
    pages = np.arange(2 * PARTS_PER_QUERY, dtype=WIRE_PAGES).tobytes()
    core(msgspec.structs.replace(request(), pages={"kv": pages}))
    core.connect(PREFILL)
    answer = core.hear(PREFILL, PagesQuery(room=ROOM, generation=1, start=2, stop=10**6))
    parts = [part.part for _, part in messages(answer, GrantedPages) if isinstance(part, GrantedPages)]
    assert parts == list(range(2, 2 + PARTS_PER_QUERY))


def test_success_needs_every_rank(transfer: Transfer) -> None:
    assert transfer.notice(PREFILL, 0, (0, 8), last=True, metadata=b"a") == []
    effects = transfer.notice(OTHER, 0, (0, 8), last=True, metadata=b"b")
    assert reports(effects) == [("success", "safe")]
    report = effects[0]
    assert isinstance(report, ReportReceiver)
    assert report.received is not None
    assert [to for to, _ in messages(effects, Ack)] == [PREFILL, OTHER]
    assert (report.received.metadata, report.received.num_bytes, report.received.num_notices) == (
        {0: b"a", 1: b"b"},
        32,
        2,
    )
    assert not transfer.core.core.rooms.rooms


def test_a_notice_of_one_rank_looks_at_no_other() -> None:
    costs = []
    for num_ranks in (5, 50):
        ranks = [peer("prefill", number) for number in range(num_ranks)]
        core = DecodeDriver()
        core(request())
        transfer = Transfer(core, core.connect(*ranks))
        notices = [ev.NoticeDelivered(transfer.make(rank, 0, (0, 8), num_bytes=16, last=True)) for rank in ranks]
        costs.append(statistics.median(num_steps(partial(core.core.handle, notice, 0.0)) for notice in notices))
        assert not core.core.rooms.rooms
    assert costs[0] == costs[1]


def test_notices_may_come_in_any_order(transfer: Transfer) -> None:
    transfer.notice(OTHER, 0, (0, 8), last=True)
    assert transfer.notice(PREFILL, 2, (6, 8), last=True) == []
    assert transfer.notice(PREFILL, 0, (0, 3)) == []
    assert reports(transfer.notice(PREFILL, 1, (3, 6))) == [("success", "safe")]


def test_duplicates_count_once(transfer: Transfer) -> None:
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert transfer.notice(PREFILL, 0, (0, 8), last=True) == []
    assert anomalies(transfer.notice(PREFILL, 0, (0, 6), last=True)) == ["notice_contradicts_itself"]
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


@pytest.mark.parametrize(
    ("changes", "anomaly"),
    [
        ({"engine_rank": 2}, "notice_from_unknown_rank"),
        ({"engine_rank": 1}, "notice_with_wrong_token"),
        ({"token": 1}, "notice_with_wrong_token"),
        ({"generation": 2}, "notice_of_unknown_transfer"),
        ({"room": 8}, "notice_of_unknown_transfer"),
    ],
)
def test_foreign_notices_count_never(transfer: Transfer, changes: dict[str, object], anomaly: str) -> None:
    assert anomalies(transfer.notice(PREFILL, 0, (0, 8), last=True, **changes)) == [anomaly]
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_impossible_sequence_numbers_count_never(transfer: Transfer) -> None:
    assert anomalies(transfer.notice(PREFILL, 9, (0, 1))) == ["notice_seq_impossible"]
    transfer.notice(PREFILL, 1, (4, 8), last=True)
    assert anomalies(transfer.notice(PREFILL, 2, (0, 1))) == ["notice_after_last"]
    transfer.notice(OTHER, 3, (0, 8))
    assert anomalies(transfer.notice(OTHER, 1, (0, 8), last=True)) == ["notice_after_last"]


@pytest.mark.parametrize(
    "notices",
    [
        [(0, (0, 7))],
        [(0, (1, 8))],
        [(0, (0, 4)), (1, (5, 8))],
        [(0, (0, 5)), (1, (4, 8))],
    ],
)
def test_notices_that_do_not_add_up_fail_the_transfer(
    transfer: Transfer, notices: list[tuple[int, tuple[int, int]]]
) -> None:
    effects: list[DecodeEffect] = []
    for seq, tokens in notices:
        effects = transfer.notice(PREFILL, seq, tokens, last=seq == len(notices) - 1)
    assert reports(effects)[0] == ("failed", "draining")
    ((_, cancel), *_) = messages(effects, Cancel)
    assert isinstance(cancel, Cancel)
    assert cancel.failure.reason is FailureReason.INCOMPLETE


def test_missing_bytes_fail_the_transfer(transfer: Transfer) -> None:
    effects = transfer.notice(PREFILL, 0, (0, 8), last=True, num_bytes=15)
    ((_, cancel), *_) = messages(effects, Cancel)
    assert isinstance(cancel, Cancel)
    assert "15 bytes" in cancel.failure.detail


def test_ranks_that_send_nothing_are_told_but_not_waited_for(core: DecodeDriver) -> None:
    core(request())
    transfer = Transfer(core, core.connect(PREFILL, OTHER, silent=[OTHER]))
    assert (transfer.grants[PREFILL].pages, transfer.grants[OTHER].pages) == ({"kv": b"\1\0\0\0"}, {})
    assert reports(transfer.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]


def test_a_full_prefix_hit_waits_for_the_metadata_only(core: DecodeDriver) -> None:
    core(request(tokens=(8, 8)))
    transfer = Transfer(core, core.connect(PREFILL))
    effects = transfer.notice(PREFILL, 0, (8, 8), last=True, metadata=b"m")
    assert reports(effects) == [("success", "safe")]


def test_abort_keeps_the_pages_until_every_rank_has_drained(transfer: Transfer) -> None:
    effects = transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
    assert reports(effects) == [("aborted", "draining")]
    assert [receiver for receiver, _ in messages(effects, Cancel)] == [PREFILL, OTHER]
    drained = [Drained(room=ROOM, generation=1, engine_rank=rank) for rank in (0, 1)]
    assert reports(transfer.core.hear(PREFILL, drained[0])) == []
    assert reports(transfer.core.hear(OTHER, drained[1])) == [("aborted", "safe")]


def test_abort_before_anything_was_granted_is_safe_at_once(core: DecodeDriver) -> None:
    core(request())
    assert reports(core(ev.ReceiveAborted(ROOM, ABORTED))) == [("aborted", "draining"), ("aborted", "safe")]
    assert messages(core.connect(PREFILL), Grant) == []


def test_completion_during_the_drain_makes_the_pages_safe_but_not_a_success(transfer: Transfer) -> None:
    transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("aborted", "safe")]


@pytest.mark.parametrize("is_drained", [True, False])
def test_failure_of_one_rank_ends_it_for_all(transfer: Transfer, is_drained: bool) -> None:
    failed = Failed(room=ROOM, generation=1, engine_rank=0, failure=FAILURE, drained=is_drained)
    effects = transfer.core.hear(PREFILL, failed)
    assert reports(effects) == [("failed", "draining")]
    assert [receiver for receiver, _ in messages(effects, Cancel)] == [OTHER]
    effects = transfer.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))
    if not is_drained:
        assert reports(effects) == []
        effects = transfer.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))
    assert reports(effects) == [("failed", "safe")]


def test_drained_without_a_reason_is_a_failure(transfer: Transfer) -> None:
    effects = transfer.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))
    assert reports(effects)[0] == ("failed", "draining")


def test_drain_that_does_not_come_ends_in_quarantine_until_it_does(transfer: Transfer) -> None:
    transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
    transfer.core.hear(OTHER, Drained(room=ROOM, generation=1, engine_rank=1))
    effects: list[DecodeEffect] = []
    for _ in range(5):
        transfer.core.hear(PREFILL, Pong(peer=PREFILL))
        effects += transfer.core.sleep(Timeouts().drain_s / 5)
    assert reports(effects) == [("aborted", "quarantined")]
    assert transfer.core.core.rooms.rooms
    late = transfer.core.hear(PREFILL, Drained(room=ROOM, generation=1, engine_rank=0))
    assert reports(late) == [("aborted", "safe")]
    assert not transfer.core.core.rooms.rooms


def test_room_is_free_again_while_its_old_pages_are_in_quarantine(transfer: Transfer) -> None:
    transfer.core(ev.ReceiveAborted(ROOM, ABORTED))
    transfer.core.sleep(Timeouts().drain_s)
    transfer.core(request(2))
    assert set(transfer.core.core.rooms.rooms) == {1, 2}


def lose(transfer: Transfer, *, spare: PeerId) -> list[DecodeEffect]:
    """Let every rank but one fall silent for longer than its lease."""
    effects = transfer.core(ev.ConnectionLost(PREFILL))
    for _ in range(4):
        transfer.core.hear(spare, Pong(peer=spare))
        effects += transfer.core.sleep(0.75)
    return effects


def test_lost_rank_means_quarantine_if_no_proof_comes_in_time(transfer: Transfer) -> None:
    transfer.notice(OTHER, 0, (0, 8), last=True)
    effects = lose(transfer, spare=OTHER)
    assert reports(effects) == [("failed", "draining")]
    assert ProbePeer(PREFILL, endpoint_of(PREFILL)) in effects
    assert reports(transfer.core.sleep(5.0)) == [("failed", "quarantined")]


def test_death_of_a_lost_rank_is_a_proof(transfer: Transfer) -> None:
    transfer.notice(OTHER, 0, (0, 8), last=True)
    lose(transfer, spare=OTHER)
    assert reports(transfer.core(GONE)) == [("failed", "safe")]


def test_death_proves_nothing_if_bytes_can_outlive_it() -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)
    core(request())
    effects = core(GONE)
    assert reports(effects) == [("failed", "draining")]
    assert WaitForFence(PREFILL, number=1) in effects
    assert reports(core.sleep(5.0)) == [("failed", "quarantined")]


LAST_WORDS = [Goodbye(peer=PREFILL, fenced=True), Drained(room=ROOM, generation=1, engine_rank=0)]


@pytest.mark.parametrize("said", LAST_WORDS, ids=["goodbye", "drained"])
def test_what_a_process_had_said_counts_after_a_probe_has_found_that_it_has_ended(said: Goodbye | Drained) -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)
    core(request())
    assert Disconnect(PREFILL) not in core(GONE), "it may be on its way"
    assert reports(core.hear(PREFILL, said)) == [("failed", "safe")]


def test_the_connection_to_a_process_that_has_ended_is_not_kept_for_ever() -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)
    core(request())
    core(GONE)
    assert Disconnect(PREFILL) in core.sleep(30.0)
    assert core.core.rooms.rooms


def test_the_connection_to_a_process_whose_end_is_the_proof_is_closed_at_once(transfer: Transfer) -> None:
    assert Disconnect(PREFILL) in transfer.core(GONE)


def test_nothing_is_awaited_of_a_process_once_another_answers_at_its_port() -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)
    core(request())
    core(GONE)
    refusal = Refuse(peer=peer("prefill", incarnation=2), to=None, detail="handshake required")
    assert Disconnect(PREFILL) in core.hear(PREFILL, refusal)


def test_death_is_a_proof_once_the_transport_has_seen_the_last_bytes_land() -> None:
    core = DecodeDriver(ends_with_process=False)
    core.connect(PREFILL)
    core(request())
    assert reports(core(GONE)) == [("failed", "draining")]
    assert reports(core(ev.PeerFenced(PREFILL))) == [("failed", "safe")]
    assert core(ev.PeerFenced(PREFILL)) == []


def test_rank_that_has_done_its_part_may_leave(transfer: Transfer) -> None:
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(transfer.core.hear(PREFILL, Goodbye(peer=PREFILL))) == []
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_deadline_ends_a_transfer_that_never_completes(core: DecodeDriver) -> None:
    core(request(timeout_s=2.0))
    core.connect(PREFILL)
    core.hear(PREFILL, Pong(peer=PREFILL))
    effects = core.sleep(2.0)
    assert reports(effects) == [("failed", "draining")]
    assert len(messages(effects, Cancel)) == 1


def test_notices_are_watched_while_a_room_is_received(core: DecodeDriver) -> None:
    assert WatchNotices(active=True) in core(request())
    assert WatchNotices(active=True) not in core(request(2, room=8))
    assert WatchNotices(active=False) not in core(ev.ReceiveAborted(ROOM, ABORTED))
    assert WatchNotices(active=False) in core(ev.ReceiveAborted(8, ABORTED))


def test_second_receive_of_a_room_is_refused_and_changes_nothing(transfer: Transfer) -> None:
    with pytest.raises(LocalProtocolError) as error:
        transfer.core(request(2))
    assert error.value.values == {"room": ROOM, "generation": 1}
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    assert reports(transfer.notice(OTHER, 0, (0, 8), last=True)) == [("success", "safe")]


def test_generations_are_never_reused(core: DecodeDriver) -> None:
    core(request(5))
    with pytest.raises(LocalProtocolError, match="generation"):
        core(request(5, room=8))


def test_rooms_are_bounded() -> None:
    core = DecodeDriver(limits=Limits(transfers=1))
    core(request())
    with pytest.raises(CapacityExceeded):
        core(request(2, room=8))


def test_tokens_of_grants_differ_by_rank(core: DecodeDriver) -> None:
    core.connect(PREFILL, OTHER)
    grants = [granted for _, granted in messages(core(request()), Grant)]
    assert len({granted.token for granted in grants if isinstance(granted, Grant)}) == 2


def test_peers_are_pinged_within_their_lease(core: DecodeDriver) -> None:
    core.connect(PREFILL)
    assert len(messages(core.sleep(2.9), Ping)) == 2


def test_what_only_a_prefill_rank_should_hear_is_counted(transfer: Transfer) -> None:
    effects = transfer.core.hear(PREFILL, Ack(room=ROOM, generation=1))
    assert anomalies(effects) == ["unexpected_ack"]
    assert reports(effects) == []


def test_a_prefill_rank_that_stays_silent_is_forgotten(core: DecodeDriver) -> None:
    core.connect(PREFILL, OTHER)
    effects = core.sleep(3.0 * (BUSY_LEASES + 12))
    assert [effect for effect in effects if isinstance(effect, Disconnect)] == [Disconnect(PREFILL), Disconnect(OTHER)]
    assert len(core.core.peers) == 0


def test_a_transfer_of_which_no_rank_sends_anything_is_complete(core: DecodeDriver) -> None:
    """The room wants only optional layers, and no prefill rank has them."""
    core(request())
    effects = core.connect(PREFILL, silent=[PREFILL])
    assert reports(effects) == [("success", "safe")]
    assert [to for to, _ in messages(effects, Ack)] == [PREFILL]
    assert not core.core.rooms.rooms


def test_an_instance_that_has_forgotten_this_rank_is_looked_up_for_its_proofs(transfer: Transfer) -> None:
    """Otherwise quarantined pages would wait for the next request to the same instance."""
    transfer.core.hear(PREFILL, Refuse(peer=PREFILL, to=None, detail="handshake required"))
    assert LookUp("prefill") in transfer.core.sleep(60.0)
    effects = transfer.core.connect(PREFILL, OTHER)
    assert {receiver for receiver, _ in messages(effects, Cancel)} == {PREFILL, OTHER}
