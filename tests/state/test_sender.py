"""The sending side of the core."""

import pytest

from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError
from kvflow.state import events as ev
from kvflow.state.effects import CountOddity, DropPlan, Effect, ForgetPeer
from kvflow.state.events import Chunk, DeliveryId
from kvflow.wire.messages import Cancel, Drained, Failed, Goodbye, Notice, Ping, Pong, Received
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, abort_failure, grant, messages, peer, reports
from tests.support.sending import DELIVERY, ROOM, chunk, enqueued, post

FAILURE = abort_failure("the write broke")
RECEIVED = Received(room=ROOM, generation=1)


@pytest.fixture
def core() -> CoreDriver:
    driver = CoreDriver(PREFILL)
    driver.meet_decode()
    return driver


@pytest.fixture
def granted(core: CoreDriver) -> CoreDriver:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    return core


def test_chunks_before_the_grant_are_sent_when_it_comes(core: CoreDriver) -> None:
    assert core(ev.SendOpened(ROOM)) == []
    assert core(chunk(0, 4)) == []
    assert core(chunk(4, 8, last=True, metadata=b"m")) == []
    assert enqueued(core.hear(DECODE, grant())) == [(0, (0, 4)), (1, (4, 8))]


def test_a_grant_before_the_room_is_served_when_it_opens(core: CoreDriver) -> None:
    assert core.hear(DECODE, grant()) == []
    core(ev.SendOpened(ROOM))
    assert enqueued(core(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_delivery_succeeds_when_the_receiver_has_everything(granted: CoreDriver) -> None:
    granted(chunk(0, 4))
    granted(chunk(4, 8, last=True, metadata=b"m"))
    first, last = post(granted, 0), post(granted, 1)
    assert (first.seq, first.ranges, first.last, first.num_bytes, first.token) == (0, {"kv": (0, 4)}, False, 16, 99)
    assert (last.seq, last.last, last.metadata) == (1, True, b"m")
    assert granted(ev.PostSettled(DELIVERY, 1, None)) == []
    assert reports(granted(ev.PostSettled(DELIVERY, 0, None))) == [("pending", "safe")]
    assert reports(granted.hear(DECODE, RECEIVED)) == [("success", "safe")]
    assert granted.core.is_idle


def test_only_wanted_tokens_are_sent(core: CoreDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(6, 10)))
    assert core(chunk(0, 4)) == []
    assert enqueued(core(chunk(4, 8))) == [(0, (6, 8))]
    assert enqueued(core(chunk(8, 12, last=True))) == [(1, (8, 10))]


def test_a_last_chunk_of_which_nothing_is_wanted_still_delivers_the_metadata(core: CoreDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(8, 8)))
    effects = core(chunk(0, 8, last=True, metadata=b"m"))
    ((receiver, notice),) = messages(effects, Notice)
    assert receiver == DECODE
    assert isinstance(notice, Notice)
    assert (notice.seq, notice.last, notice.metadata, notice.ranges) == (0, True, b"m", {})
    assert reports(effects) == [("pending", "safe")]
    assert reports(core.hear(DECODE, RECEIVED)) == [("success", "safe")]


def test_a_rank_that_owes_nothing_has_done_its_part_with_the_last_chunk(core: CoreDriver) -> None:
    core.meet_decode(owed=())
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(pages={}))
    assert core(chunk(0, 4)) == []
    assert reports(core(chunk(4, 8, last=True))) == [("success", "safe")]
    assert core.hear(DECODE, RECEIVED) == []


def test_room_succeeds_when_every_decode_rank_has_everything(core: CoreDriver) -> None:
    other = peer("decode", 1)
    core.meet_decode(other)
    core(ev.SendOpened(ROOM))
    core(chunk(0, 8, last=True))
    core.hear(DECODE, grant(num_decode_ranks=2))
    post(core, 0)
    assert core(ev.PostSettled(DELIVERY, 0, None)) == []
    assert core.hear(DECODE, RECEIVED) == []
    core.hear(other, grant(num_decode_ranks=2))
    second = DeliveryId(ROOM, other, 1)
    post(core, 0, delivery=second)
    assert reports(core(ev.PostSettled(second, 0, None))) == [("pending", "safe")]
    assert reports(core.hear(other, RECEIVED)) == [("success", "safe")]


def test_the_receiver_may_know_before_the_transport_says_so(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    assert granted.hear(DECODE, RECEIVED) == []
    assert reports(granted(ev.PostSettled(DELIVERY, 0, None))) == [("success", "safe")]
    assert granted.core.is_idle


def test_written_is_not_delivered(granted: CoreDriver) -> None:
    """Its last notice may be lost with the peer: the pages are quiet, but the transfer has failed."""
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    granted(ev.PostSettled(DELIVERY, 0, None))
    assert reports(granted.hear(DECODE, Goodbye(peer=DECODE))) == [("failed", "safe")]
    assert granted.core.is_idle


@pytest.mark.parametrize("generation", [1, 2])
def test_received_of_what_is_not_open_counts_for_nothing(core: CoreDriver, generation: int) -> None:
    core.hear(DECODE, grant(generation=1))
    effects = core.hear(DECODE, Received(room=ROOM, generation=generation))
    assert effects == [CountOddity("received_of_unknown_transfer", DECODE, ROOM)]


@pytest.mark.parametrize("wanted", [(0, 9), (0, 12)])
def test_tokens_beyond_the_prompt_are_a_failure_with_a_reason(core: CoreDriver, wanted: tuple[int, int]) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=wanted))
    effects = core(chunk(0, 8, last=True))
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert failed.failure.reason is FailureReason.TOKENS_NOT_SERVED
    assert failed.drained
    assert reports(effects)[-1] == ("failed", "safe")


def test_tokens_before_the_first_chunk_are_a_failure_at_once(core: CoreDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(0, 8)))
    ((_, failed),) = messages(core(chunk(4, 8)), Failed)
    assert isinstance(failed, Failed)
    assert "0:8" in failed.failure.detail


def test_abort_waits_for_what_is_posted_and_posts_nothing_more(granted: CoreDriver) -> None:
    granted(chunk(0, 4))
    granted(chunk(4, 8, last=True))
    post(granted, 0)
    effects = granted(ev.SendAborted(ROOM, ABORTED))
    assert reports(effects) == [("aborted", "draining")]
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert not failed.drained
    assert granted(ev.PlanFinished(DELIVERY, 1, 16)) == [DropPlan(DELIVERY, 1)]
    effects = granted(ev.PostSettled(DELIVERY, 0, None))
    assert [receiver for receiver, _ in messages(effects, Drained)] == [DECODE]
    assert reports(effects) == [("aborted", "safe")]


def test_cancel_is_answered_with_drained_after_the_last_post(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    effects = granted.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    assert messages(effects, Drained) == messages(effects, Failed) == []
    assert reports(effects) == [("failed", "draining")]
    assert len(messages(granted(ev.PostSettled(DELIVERY, 0, None)), Drained)) == 1


def test_cancel_of_what_was_never_granted_is_answered_at_once(core: CoreDriver) -> None:
    core.hear(DECODE, grant())
    assert len(messages(core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED)), Drained)) == 1
    core(ev.SendOpened(ROOM))
    assert core(chunk(0, 8)) == [], "the cancelled grant must not be served"


def test_cancel_is_answered_every_time(granted: CoreDriver) -> None:
    cancel = Cancel(room=ROOM, generation=1, failure=ABORTED)
    assert len(messages(granted.hear(DECODE, cancel), Drained)) == 1
    assert len(messages(granted.hear(DECODE, cancel), Drained)) == 1


def test_one_decode_rank_that_cancels_ends_the_room_for_all(core: CoreDriver) -> None:
    other = peer("decode", 1)
    core.meet_decode(other)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(num_decode_ranks=2))
    core.hear(other, grant(num_decode_ranks=2))
    effects = core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    assert [receiver for receiver, _ in messages(effects, Failed)] == [other]
    assert [receiver for receiver, _ in messages(effects, Drained)] == [DECODE]


def test_a_failed_post_fails_the_room(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    effects = granted(ev.PostSettled(DELIVERY, 0, FAILURE))
    assert reports(effects)[-1] == ("failed", "safe")
    ((_, failed), *_) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert failed.failure == FAILURE


def test_a_doubtful_post_quarantines_until_it_has_ended(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    effects = granted(ev.PostDoubted(DELIVERY, 0, FAILURE))
    assert reports(effects)[-1] == ("failed", "quarantined")
    assert messages(effects, Drained) == []
    with pytest.raises(LocalProtocolError, match="in use"):
        granted(ev.SendOpened(ROOM))
    effects = granted(ev.PostSettled(DELIVERY, 0, FAILURE))
    assert reports(effects) == [("failed", "safe")]
    assert len(messages(effects, Drained)) == 1


def test_a_post_that_does_not_end_is_quarantined_after_the_drain_timeout(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    granted(ev.SendAborted(ROOM, ABORTED))
    assert reports(granted.sleep(Timeouts().drain_s)) == [("aborted", "quarantined")]
    assert reports(granted(ev.PostSettled(DELIVERY, 0, None))) == [("aborted", "safe")]


def test_second_grant_of_a_rank_is_refused_and_changes_nothing(granted: CoreDriver) -> None:
    effects = granted.hear(DECODE, grant(generation=2))
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert (failed.generation, failed.failure.reason) == (2, FailureReason.ROOM_IN_USE)
    assert enqueued(granted(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_a_repeated_grant_is_not_obeyed_again(granted: CoreDriver) -> None:
    granted(chunk(0, 4))
    assert granted.hear(DECODE, grant()) == []


def test_a_repeated_grant_of_a_failed_room_is_told_so_again(granted: CoreDriver) -> None:
    said = messages(granted(ev.SendAborted(ROOM, ABORTED)), Failed)
    assert said == messages(granted.hear(DECODE, grant()), Failed)
    granted(ev.SendOpened(ROOM))
    assert said == messages(granted.hear(DECODE, grant()), Failed)


@pytest.mark.parametrize("second", [3, 1])
def test_decode_ranks_that_disagree_on_their_number_are_refused(granted: CoreDriver, second: int) -> None:
    other = peer("decode", 1)
    granted.meet_decode(other)
    ((receiver, failed),) = messages(granted.hear(other, grant(num_decode_ranks=second)), Failed)
    assert isinstance(failed, Failed)
    assert (receiver, failed.failure.reason) == (other, FailureReason.PROTOCOL)


@pytest.mark.parametrize(("open_s", "timeout_s"), [(30.0, 1.5), (1.5, 60.0)])
def test_grant_for_a_room_that_never_opens_is_answered(open_s: float, timeout_s: float) -> None:
    core = CoreDriver(PREFILL, Timeouts(open_s=open_s))
    core.meet_decode()
    core.hear(DECODE, grant(timeout_s=timeout_s))
    effects: list[Effect] = []
    for _ in range(4):
        core.hear(DECODE, Ping(peer=DECODE))
        effects += core.sleep(0.5)
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert (failed.failure.reason, failed.drained) == (FailureReason.UNKNOWN_ROOM, True)
    assert failed.failure.detail == "prefill did not open the room within 1.5 s"
    assert len(core.core.senders.waiting) == 0


def test_late_grant_for_a_failed_room_is_answered_at_once(core: CoreDriver) -> None:
    core(ev.SendOpened(ROOM))
    core(ev.SendAborted(ROOM, ABORTED))
    ((_, failed),) = messages(core.hear(DECODE, grant()), Failed)
    assert isinstance(failed, Failed)
    assert failed.failure == ABORTED


def test_room_may_be_used_again_after_its_end(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    granted(ev.PostSettled(DELIVERY, 0, None))
    granted.hear(DECODE, RECEIVED)
    assert granted.hear(DECODE, grant(generation=2)) == []
    granted(ev.SendOpened(ROOM))
    assert enqueued(granted(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_nobody_asks_for_finished_pages(core: CoreDriver) -> None:
    core(ev.SendOpened(ROOM))
    core(chunk(0, 8, last=True))
    assert reports(core.sleep(Timeouts().grant_s)) == [("failed", "draining"), ("failed", "safe")]


def test_delivery_ends_when_the_decode_rank_has_given_up(core: CoreDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(timeout_s=1.0))
    assert reports(core.sleep(1.0))[-1] == ("failed", "safe")


@pytest.mark.parametrize(
    "offered",
    [
        [(0, 4), (5, 8)],
        [(0, 4), (3, 8)],
        [(0, 4), (4, 4)],
        [(4, 0)],
        [(-1, 4)],
    ],
)
def test_chunks_that_do_not_follow_are_refused_and_nothing_changes(
    granted: CoreDriver, offered: list[tuple[int, int]]
) -> None:
    *good, bad = offered
    for tokens in good:
        granted(chunk(*tokens))
    with pytest.raises(LocalProtocolError):
        granted(chunk(*bad))
    assert enqueued(granted(chunk(good[-1][1] if good else 0, 8, last=True)))


def test_nothing_follows_the_last_chunk(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    with pytest.raises(LocalProtocolError, match="after the last"):
        granted(chunk(8, 9))


def test_room_in_use_and_unknown_rooms_are_refused(core: CoreDriver) -> None:
    core(ev.SendOpened(ROOM))
    with pytest.raises(LocalProtocolError, match="in use"):
        core(ev.SendOpened(ROOM))
    with pytest.raises(LocalProtocolError, match="not open"):
        core(ev.ChunkOffered(8, Chunk((0, 1), {"kv": (0, 1)})))


def test_rooms_and_waiting_grants_are_bounded() -> None:
    core = CoreDriver(PREFILL, limits=Limits(transfers=1, pending_grants=1))
    core.meet_decode()
    core(ev.SendOpened(ROOM))
    with pytest.raises(CapacityExceeded):
        core(ev.SendOpened(8))
    assert core.hear(DECODE, grant(room=1)) == []
    ((_, failed),) = messages(core.hear(DECODE, grant(room=2)), Failed)
    assert isinstance(failed, Failed)
    assert failed.failure.reason is FailureReason.CAPACITY


def test_silent_decode_rank_is_lost_after_its_lease(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    granted.sleep(2.0)
    granted.hear(DECODE, Ping(peer=DECODE))
    assert reports(granted.sleep(2.9)) == []
    assert reports(granted.sleep(0.2)) == [("failed", "draining")]


def test_a_stall_of_this_process_is_not_taken_for_silence_of_the_peer(granted: CoreDriver) -> None:
    granted.now += 50.0
    assert reports(granted(ev.TimePassed())) == []
    granted.hear(DECODE, Ping(peer=DECODE))
    assert reports(granted.sleep(2.0)) == []
    assert reports(granted.sleep(2.0))[-1] == ("failed", "safe")


def test_ping_is_answered(core: CoreDriver) -> None:
    assert messages(core.hear(DECODE, Ping(peer=DECODE)), Pong) == [(DECODE, Pong(peer=PREFILL))]


@pytest.mark.parametrize("restarted", [True, False])
def test_a_peer_that_leaves_or_restarts_fails_its_rooms_and_is_forgotten(granted: CoreDriver, restarted: bool) -> None:
    if restarted:
        effects = granted(ev.PeerGreeted(peer("decode", 0, incarnation=2), 3.0, owed=("kv",)))
    else:
        effects = granted.hear(DECODE, Goodbye(peer=DECODE))
    assert reports(effects)[-1] == ("failed", "safe")
    assert effects[-1] == ForgetPeer(DECODE)
    assert granted.hear(DECODE, grant()) == [CountOddity("message_from_stranger", DECODE, None)]


def test_closing_fails_everything_and_refuses_what_comes(granted: CoreDriver) -> None:
    granted.hear(DECODE, grant(room=8))
    effects = granted(ev.ClosingStarted(ABORTED))
    assert sorted(failed.room for _, failed in messages(effects, Failed) if isinstance(failed, Failed)) == [ROOM, 8]
    assert len(messages(granted.hear(DECODE, grant(room=9)), Failed)) == 1
    with pytest.raises(LocalProtocolError, match="closing"):
        granted(ev.SendOpened(10))


def test_a_peer_that_stays_silent_is_forgotten(core: CoreDriver) -> None:
    effects = core.sleep(3.0 * 13)
    assert effects[-1] == ForgetPeer(DECODE)
    assert (core.core.peers, len(core.core.deadlines)) == ({}, 0)


def test_a_silent_decode_rank_is_parted_with_though_a_write_to_it_is_in_doubt(granted: CoreDriver) -> None:
    """It can prove nothing about the pages here; parting with it lets the transport find out."""
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    granted(ev.PostDoubted(DELIVERY, 0, FAILURE))
    assert ForgetPeer(DECODE) in granted.sleep(3.0)
    assert reports(granted(ev.PostSettled(DELIVERY, 0, FAILURE, lingers=True))) == [("failed", "safe")]


def test_bytes_that_may_still_land_are_never_drained(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    ended = granted(ev.PostSettled(DELIVERY, 0, FAILURE, lingers=True))
    assert ("failed", "safe") in reports(ended)
    ((_, said),) = messages(ended, Failed)
    assert isinstance(said, Failed)
    assert not said.drained
    cancel = Cancel(room=ROOM, generation=1, failure=ABORTED)
    assert messages(granted.hear(DECODE, cancel), Drained) == []
    granted(ev.PeerGreeted(DECODE, 3.0, ("kv",)))
    assert messages(granted.hear(DECODE, cancel), Drained) == []
    ((_, again),) = messages(granted.hear(DECODE, grant()), Failed)
    assert isinstance(again, Failed)
    assert not again.drained


def test_a_later_life_asks_nothing_about_bytes_for_an_earlier_one(granted: CoreDriver) -> None:
    granted(chunk(0, 8, last=True))
    post(granted, 0)
    granted(ev.PostSettled(DELIVERY, 0, FAILURE, lingers=True))
    assert len(granted.core.senders.unproved) == 1
    granted.meet_decode(DECODE._replace(incarnation=2))
    assert len(granted.core.senders.unproved) == 0


def test_two_lives_of_a_decode_rank_are_not_two_decode_ranks(core: CoreDriver) -> None:
    """The first life is owed nothing, so its delivery is complete at once and outlives it."""
    first, second = peer("decode", incarnation=5), peer("decode", incarnation=6)
    core.meet_decode(first, owed=())
    core(ev.SendOpened(ROOM))
    core(chunk(0, 8, last=True))
    assert messages(core.hear(first, grant(num_decode_ranks=2)), Failed) == []
    core.meet_decode(second, owed=())
    effects = core.hear(second, grant(num_decode_ranks=2))
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert failed.failure.reason is FailureReason.ROOM_IN_USE
    assert reports(effects) == []
