"""Rooms of a prefill rank: from `send` and a decode rank's grant to the end of the last write."""

import pytest

from kvflow.bounds import Bounds
from kvflow.config import Limits, Timeouts
from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError
from kvflow.state import events as ev
from kvflow.state.effects import AwaitData, CountAnomaly, DisconnectTransport, PrefillEffect, ReportGranted
from kvflow.state.events import Chunk
from kvflow.state.prefill import peers
from kvflow.wire.messages import Ack, Announce, Cancel, Drained, Failed, Goodbye, Notice, PeerId, Ping, Pong, Refuse
from tests.support.cores import (
    ABORTED,
    DECODE,
    OTHER_DECODE,
    PREFILL,
    PrefillDriver,
    abort_failure,
    anomalies,
    connection_of,
    grant,
    messages,
    of_kind,
    pages_for,
    peer,
    reports,
)
from tests.support.sending import DELIVERY, ROOM, chunk, delivery, end, pieces, posted
from tests.support.small_routes import small_pieces

FAILURE = abort_failure("the write broke")
ACK = Ack(room=ROOM, generation=1)


class Device:
    def synchronize(self) -> None:
        pass


@pytest.fixture
def core() -> PrefillDriver:
    driver = PrefillDriver()
    driver.connect()
    return driver


@pytest.fixture
def granted(core: PrefillDriver) -> PrefillDriver:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    return core


def one_post_at_a_time() -> PrefillDriver:
    """A granted room in which each post waits for the end of the one before."""
    core = PrefillDriver(limits=Bounds(posts_per_peer=1))
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    return core


@pytest.mark.parametrize("is_open", [False, True], ids=["granted before it is opened", "opened before it is granted"])
def test_the_engine_hears_what_is_wanted_when_the_last_decode_rank_has_granted(is_open: bool) -> None:
    core = PrefillDriver()
    core.connect(DECODE)
    core.connect(OTHER_DECODE)
    effects: list[PrefillEffect] = []
    if is_open:
        effects += core(ev.SendOpened(ROOM))
    effects += core.hear(DECODE, grant(tokens=(4, 8), num_decode_ranks=2))
    assert of_kind(effects, ReportGranted) == []
    effects += core.hear(OTHER_DECODE, grant(tokens=(2, 6), num_decode_ranks=2))
    if not is_open:
        effects += core(ev.SendOpened(ROOM))
    assert of_kind(effects, ReportGranted) == [ReportGranted(ROOM, {"kv": (2, 8)})]
    assert of_kind(core.hear(DECODE, grant(tokens=(4, 8), num_decode_ranks=2)), ReportGranted) == []


def failed_in(effects: list[PrefillEffect]) -> list[Failed]:
    return [message for _, message in messages(effects, Failed) if isinstance(message, Failed)]


def test_chunks_before_the_grant_are_sent_when_it_comes(core: PrefillDriver) -> None:
    assert core(ev.SendOpened(ROOM)) == []
    assert core(chunk(0, 4)) == []
    assert core(chunk(4, 8, last=True, metadata=b"m")) == []
    assert posted(core.hear(DECODE, grant())) == [(0, (0, 4)), (1, (4, 8))]


def test_a_grant_before_the_room_is_served_when_it_opens(core: PrefillDriver) -> None:
    assert core.hear(DECODE, grant()) == []
    core(ev.SendOpened(ROOM))
    assert posted(core(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_delivery_succeeds_when_the_receiver_has_everything(granted: PrefillDriver) -> None:
    (first,) = pieces(granted(chunk(0, 4)))
    (last,) = pieces(granted(chunk(4, 8, last=True, metadata=b"m")))
    notice = first.notice
    assert (notice.seq, notice.ranges, notice.last, notice.num_bytes, notice.token) == (0, {"kv": (0, 4)}, False, 8, 99)
    assert (last.notice.seq, last.notice.last, last.notice.metadata) == (1, True, b"m")
    assert end(granted, 1) == []
    assert reports(end(granted, 0)) == [("pending", "safe")]
    assert reports(granted.hear(DECODE, ACK)) == [("success", "safe")]
    assert not granted.core.rooms.rooms


def test_only_wanted_tokens_are_sent(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(6, 10)))
    assert core(chunk(0, 4)) == []
    assert posted(core(chunk(4, 8))) == [(0, (6, 8))]
    assert posted(core(chunk(8, 12, last=True))) == [(1, (8, 10))]


def test_a_last_chunk_of_which_nothing_is_wanted_still_delivers_the_metadata(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(8, 8)))
    effects = core(chunk(0, 8, last=True, metadata=b"m"))
    ((receiver, notice),) = messages(effects, Notice)
    assert receiver == DECODE
    assert isinstance(notice, Notice)
    assert (notice.seq, notice.last, notice.metadata, notice.ranges) == (0, True, b"m", {})
    assert reports(effects) == [("pending", "safe")]
    assert reports(core.hear(DECODE, ACK)) == [("success", "safe")]


def test_a_rank_that_sends_nothing_has_done_its_part_with_the_last_chunk() -> None:
    core = PrefillDriver()
    core.connect(wants=False)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(pages={}))
    assert core(chunk(0, 4)) == []
    assert reports(core(chunk(4, 8, last=True))) == [("success", "safe")]
    assert core.hear(DECODE, ACK) == []


def test_room_succeeds_when_every_decode_rank_has_everything(core: PrefillDriver) -> None:
    core.connect(OTHER_DECODE)
    core(ev.SendOpened(ROOM))
    core(chunk(0, 8, last=True))
    core.hear(DECODE, grant(num_decode_ranks=2))
    assert end(core, 0) == []
    assert core.hear(DECODE, ACK) == []
    core.hear(OTHER_DECODE, grant(num_decode_ranks=2))
    assert reports(end(core, 0, delivery(OTHER_DECODE))) == [("pending", "safe")]
    assert reports(core.hear(OTHER_DECODE, ACK)) == [("success", "safe")]


def test_the_receiver_may_know_before_the_transport_says_so(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    assert granted.hear(DECODE, ACK) == []
    assert reports(end(granted, 0)) == [("success", "safe")]
    assert not granted.core.rooms.rooms


def test_written_is_not_delivered(granted: PrefillDriver) -> None:
    """The last notice may be lost with the peer: the pages are quiet, but the transfer has failed."""
    granted(chunk(0, 8, last=True))
    end(granted, 0)
    assert reports(granted.hear(DECODE, Goodbye(peer=DECODE))) == [("failed", "safe")]
    assert not granted.core.rooms.rooms


@pytest.mark.parametrize("generation", [1, 2])
def test_ack_of_what_is_not_open_counts_for_nothing(core: PrefillDriver, generation: int) -> None:
    core.hear(DECODE, grant(generation=1))
    effects = core.hear(DECODE, Ack(room=ROOM, generation=generation))
    assert effects == [CountAnomaly("ack_of_unknown_transfer", DECODE, ROOM)]


@pytest.mark.parametrize("wanted", [(0, 9), (0, 12)])
def test_tokens_beyond_the_prompt_are_a_failure_with_a_reason(core: PrefillDriver, wanted: tuple[int, int]) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=wanted))
    effects = core(chunk(0, 8, last=True))
    (failed,) = failed_in(effects)
    assert failed.failure.reason is FailureReason.TOKENS_NOT_SERVED
    assert failed.drained
    assert reports(effects)[-1] == ("failed", "safe")


def test_tokens_before_the_first_chunk_are_a_failure_at_once(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(0, 8)))
    (failed,) = failed_in(core(chunk(4, 8)))
    assert "0:8" in failed.failure.detail


def test_abort_waits_for_what_is_posted_and_posts_nothing_more() -> None:
    core = one_post_at_a_time()
    core(chunk(0, 4))
    assert posted(core(chunk(4, 8, last=True))) == []
    effects = core(ev.SendAborted(ROOM, ABORTED))
    assert reports(effects) == [("aborted", "draining")]
    (failed,) = failed_in(effects)
    assert not failed.drained
    effects = end(core, 0)
    assert [receiver for receiver, _ in messages(effects, Drained)] == [DECODE]
    assert reports(effects) == [("aborted", "safe")]
    assert posted(effects) == []
    assert len(core.core.queue._under_way) == len(core.core.queue) == 0


def test_cancel_is_answered_with_drained_after_the_last_post(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    effects = granted.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    assert messages(effects, Drained) == messages(effects, Failed) == []
    assert reports(effects) == [("failed", "draining")]
    assert len(messages(end(granted, 0), Drained)) == 1


def test_cancel_of_what_was_never_granted_is_answered_at_once(core: PrefillDriver) -> None:
    core.hear(DECODE, grant())
    assert len(messages(core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED)), Drained)) == 1


def test_cancel_is_answered_every_time(granted: PrefillDriver) -> None:
    cancel = Cancel(room=ROOM, generation=1, failure=ABORTED)
    assert len(messages(granted.hear(DECODE, cancel), Drained)) == 1
    assert len(messages(granted.hear(DECODE, cancel), Drained)) == 1


def test_one_decode_rank_that_cancels_ends_the_room_for_all(core: PrefillDriver) -> None:
    core.connect(OTHER_DECODE)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(num_decode_ranks=2))
    core.hear(OTHER_DECODE, grant(num_decode_ranks=2))
    effects = core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    assert [receiver for receiver, _ in messages(effects, Failed)] == [OTHER_DECODE]
    assert [receiver for receiver, _ in messages(effects, Drained)] == [DECODE]


def test_a_failed_post_fails_the_room(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    effects = end(granted, 0, failure=FAILURE)
    assert reports(effects)[-1] == ("failed", "safe")
    assert failed_in(effects)[0].failure == FAILURE


def test_a_post_in_doubt_quarantines_until_it_has_ended(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    effects = granted(ev.PostInDoubt(DELIVERY, 0, FAILURE))
    assert reports(effects)[-1] == ("failed", "quarantined")
    assert messages(effects, Drained) == []
    with pytest.raises(LocalProtocolError, match="in use"):
        granted(ev.SendOpened(ROOM))
    effects = end(granted, 0, failure=FAILURE)
    assert reports(effects) == [("failed", "safe")]
    assert len(messages(effects, Drained)) == 1


def test_a_post_that_does_not_end_is_quarantined_after_the_drain_timeout(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    granted(ev.SendAborted(ROOM, ABORTED))
    assert reports(granted.sleep(Timeouts().drain_s)) == [("aborted", "quarantined")]
    assert reports(end(granted, 0)) == [("aborted", "safe")]


def test_second_grant_of_a_rank_is_refused_and_changes_nothing(granted: PrefillDriver) -> None:
    (failed,) = failed_in(granted.hear(DECODE, grant(generation=2)))
    assert (failed.generation, failed.failure.reason) == (2, FailureReason.ROOM_IN_USE)
    assert posted(granted(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_a_repeated_grant_is_not_obeyed_again(granted: PrefillDriver) -> None:
    granted(chunk(0, 4))
    assert granted.hear(DECODE, grant()) == []


def test_a_repeated_grant_of_a_failed_room_is_told_so_again(granted: PrefillDriver) -> None:
    said = messages(granted(ev.SendAborted(ROOM, ABORTED)), Failed)
    assert said == messages(granted.hear(DECODE, grant()), Failed)
    granted(ev.SendOpened(ROOM))
    assert said == messages(granted.hear(DECODE, grant()), Failed)


@pytest.mark.parametrize("second", [3, 1])
def test_decode_ranks_that_disagree_on_their_number_are_refused(granted: PrefillDriver, second: int) -> None:
    granted.connect(OTHER_DECODE)
    effects = granted.hear(OTHER_DECODE, grant(num_decode_ranks=second))
    ((receiver, _),) = messages(effects, Failed)
    assert (receiver, failed_in(effects)[0].failure.reason) == (OTHER_DECODE, FailureReason.PROTOCOL)


@pytest.mark.parametrize(("open_s", "timeout_s"), [(30.0, 1.5), (1.5, 60.0)])
def test_grant_for_a_room_that_never_opens_is_answered(open_s: float, timeout_s: float) -> None:
    core = PrefillDriver(Timeouts(open_s=open_s))
    core.connect()
    core.hear(DECODE, grant(timeout_s=timeout_s))
    effects: list[PrefillEffect] = []
    for _ in range(4):
        core.hear(DECODE, Ping(peer=DECODE))
        effects += core.sleep(0.5)
    (failed,) = failed_in(effects)
    assert (failed.failure.reason, failed.drained) == (FailureReason.UNKNOWN_ROOM, True)
    assert failed.failure.detail == "prefill did not open the room within 1.5 s"
    assert len(core.core.requests.waiting) == 0


def test_late_grant_for_a_failed_room_is_answered_at_once(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    core(ev.SendAborted(ROOM, ABORTED))
    (failed,) = failed_in(core.hear(DECODE, grant()))
    assert failed.failure == ABORTED


def test_room_may_be_used_again_after_its_end(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    end(granted, 0)
    granted.hear(DECODE, ACK)
    assert granted.hear(DECODE, grant(generation=2)) == []
    granted(ev.SendOpened(ROOM))
    assert posted(granted(chunk(0, 8, last=True))) == [(0, (0, 8))]


def test_nobody_asks_for_finished_pages(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    core(chunk(0, 8, last=True))
    assert reports(core.sleep(Timeouts().grant_s)) == [("failed", "draining"), ("failed", "safe")]


def test_delivery_ends_when_the_decode_rank_has_given_up(core: PrefillDriver) -> None:
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
    granted: PrefillDriver, offered: list[tuple[int, int]]
) -> None:
    *good, bad = offered
    for tokens in good:
        granted(chunk(*tokens))
    with pytest.raises(LocalProtocolError):
        granted(chunk(*bad))
    assert posted(granted(chunk(good[-1][1] if good else 0, 8, last=True)))


def test_nothing_follows_the_last_chunk(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    with pytest.raises(LocalProtocolError, match="after the last"):
        granted(chunk(8, 9))


def test_room_in_use_and_unknown_rooms_are_refused(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    with pytest.raises(LocalProtocolError, match="in use"):
        core(ev.SendOpened(ROOM))
    with pytest.raises(LocalProtocolError, match="not open"):
        core(ev.ChunkOffered(8, Chunk((0, 1), {"kv": (0, 1)})))


def test_rooms_and_waiting_grants_are_bounded() -> None:
    core = PrefillDriver(limits=Bounds(transfers=1, pending_grants=1))
    core.connect()
    core(ev.SendOpened(ROOM))
    with pytest.raises(CapacityExceeded):
        core(ev.SendOpened(8))
    assert core.hear(DECODE, grant(room=1)) == []
    (failed,) = failed_in(core.hear(DECODE, grant(room=2)))
    assert failed.failure.reason is FailureReason.CAPACITY


def test_a_grant_with_pages_that_do_not_fit_is_refused_and_ends_the_room(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    effects = core.hear(DECODE, grant(tokens=(0, 8), pages={"kv": pages_for((0, 6))}))
    (failed,) = failed_in(effects)
    assert (failed.failure.reason, failed.drained) == (FailureReason.INVALID_PAGES, True)
    assert reports(effects)[-1] == ("failed", "safe")
    (again,) = failed_in(core.hear(DECODE, grant()))
    assert again.failure == failed.failure


@pytest.mark.parametrize("limits", [Bounds(pending_grants=8), Limits(pending_grant_bytes=8 * 16)])
def test_grants_of_one_instance_leave_room_for_those_of_others(limits: Limits) -> None:
    core = PrefillDriver(limits=limits)
    greedy, honest = peer("greedy"), peer("honest")
    core.connect(greedy)
    core.connect(honest)
    for room in range(100):
        core.hear(greedy, grant(room=room))
    assert core.core.counts().waiting_grants == 4
    assert core.hear(honest, grant(room=200)) == []
    (failed,) = failed_in(core.hear(greedy, grant(room=201)))
    assert failed.failure.reason is FailureReason.CAPACITY


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_grant_instead_of_an_announcement_or_grant_is_weighed(is_announced: bool) -> None:
    """A grant that is too large still voids the one that it would have replaced."""
    core = PrefillDriver(limits=Limits(pending_grant_bytes=64))
    core.connect()
    for room in (1, 2, 3):
        announced = Announce(room=room, generation=1, num_decode_ranks=1, timeout_s=60.0)
        assert core.hear(DECODE, announced if is_announced else grant(room=room, pages={"kv": bytes(4)})) == []
    assert core.hear(DECODE, grant(room=1, generation=2, pages={"kv": bytes(28)})) == []
    assert core.hear(DECODE, grant(room=1, generation=2, pages={"kv": bytes(28)})) == [], "retransmitted"
    effects = core.hear(DECODE, grant(room=2, generation=2, pages={"kv": bytes(28)}))
    (failed,) = failed_in(effects)
    assert (failed.failure.reason, failed.generation) == (FailureReason.CAPACITY, 2)
    assert not any(isinstance(effect, CountAnomaly) for effect in effects), "honest decode ranks do that"
    assert core.core.counts().waiting_grants + core.core.counts().announced == 2


def test_who_is_kept_from_more_keeps_what_is_retransmitted() -> None:
    core = PrefillDriver(limits=Bounds(pending_grants=8))
    greedy, other = peer("greedy"), peer("other")
    core.connect(greedy)
    core.connect(other)
    for who, num_rooms in ((greedy, 4), (other, 2)):
        for room in range(num_rooms):
            assert core.hear(who, grant(room=room, generation=room + 1)) == []
    assert core.hear(greedy, grant(room=0, generation=1)) == []


def test_made_up_names_have_one_share_together() -> None:
    core = PrefillDriver(limits=Bounds(peers=8, pending_grants=8))
    made_up = [peer(f"greedy-{number}") for number in range(5)]
    for who in made_up[:4]:
        core.connect(who, principal="greedy-*")
        core.hear(who, grant(room=1))
        core.hear(who, grant(room=2))
    assert core.core.counts().waiting_grants == 4
    hello = core.hello(made_up[4])
    effects = core(ev.MessageArrived(connection_of(made_up[4]), hello, principal="greedy-*"))
    assert "too many decode ranks" in str(effects)
    core.connect(peer("honest"), principal="honest")
    assert core.hear(peer("honest"), grant(room=1)) == []


def test_bytes_of_hellos_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound covers connected ranks, those being checked, and newcomers that wait for a former incarnation."""
    monkeypatch.setattr(peers, "MAX_HELLO_BYTES", 100)
    core = PrefillDriver()

    def say(who: PeerId, num_bytes: int) -> str:
        hello = core.hello(who)
        return str(core(ev.MessageArrived(connection_of(who), hello, principal="greedy", num_bytes=num_bytes)))

    core.connect(DECODE, principal="greedy", num_bytes=20)
    core.connect(DECODE, principal="greedy", num_bytes=30)
    newcomer = DECODE._replace(incarnation=77)
    assert "Ping" in say(newcomer, 10)
    assert "Ping" in say(newcomer, 10), "it repeats its hello"
    assert "too many" in say(newcomer, 31)
    assert "CheckHello" in say(OTHER_DECODE, 20)
    assert "too many" in say(peer("decode", 2), 1)
    core.connect(peer("honest"), principal="honest", num_bytes=25)
    core.hear(DECODE, Goodbye(peer=DECODE))
    assert "CheckHello" in say(peer("decode", 2), 1)


def test_decode_ranks_of_one_instance_leave_room_for_those_of_others() -> None:
    core = PrefillDriver(limits=Limits(peers=8))
    for rank in range(4):
        core.connect(peer("greedy", rank))
    refused = core.hear(peer("greedy", 4), core.hello(peer("greedy", 4)))
    assert "too many decode ranks of greedy" in str(refused)
    core.connect(peer("honest"))
    core.connect(peer("greedy", 0))
    assert core.core.counts().peers == 5


def test_silent_decode_rank_is_lost_after_its_lease(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    granted.sleep(2.0)
    granted.hear(DECODE, Ping(peer=DECODE))
    assert reports(granted.sleep(2.9)) == []
    assert reports(granted.sleep(0.2)) == [("failed", "draining")]


def test_a_stall_of_this_process_is_not_taken_for_silence_of_the_peer(granted: PrefillDriver) -> None:
    granted.now += 50.0
    assert reports(granted(ev.TimePassed())) == []
    granted.hear(DECODE, Ping(peer=DECODE))
    assert reports(granted.sleep(2.0)) == []
    assert reports(granted.sleep(2.0))[-1] == ("failed", "safe")


def test_ping_is_answered(core: PrefillDriver) -> None:
    assert messages(core.hear(DECODE, Ping(peer=DECODE)), Pong) == [(DECODE, Pong(peer=PREFILL))]


@pytest.mark.parametrize("restarted", [True, False])
def test_a_peer_that_leaves_or_restarts_fails_its_rooms_and_is_disconnected(
    granted: PrefillDriver, restarted: bool
) -> None:
    if restarted:
        effects = granted.connect(peer("decode", incarnation=2))
    else:
        effects = granted.hear(DECODE, Goodbye(peer=DECODE))
    assert reports(effects)[-1] == ("failed", "safe")
    assert DisconnectTransport(DECODE) in effects
    assert DECODE not in granted.core.peers


def test_closing_fails_everything_and_refuses_what_comes(granted: PrefillDriver) -> None:
    granted.hear(DECODE, grant(room=8))
    effects = granted(ev.CloseStarted(ABORTED))
    assert sorted(failed.room for failed in failed_in(effects)) == [ROOM, 8]
    assert len(messages(granted.hear(DECODE, grant(room=9)), Failed)) == 1
    with pytest.raises(LocalProtocolError, match="closing"):
        granted(ev.SendOpened(10))


def test_a_peer_that_stays_silent_leaves_nothing_behind(core: PrefillDriver) -> None:
    effects = core.sleep(3.0 * 13)
    assert DisconnectTransport(DECODE) in effects
    assert (len(core.core.peers), len(core.core.timers)) == (0, 0)


def test_a_silent_decode_rank_is_disconnected_though_a_write_to_it_is_in_doubt(granted: PrefillDriver) -> None:
    """The rank can prove nothing about the source pages; disconnecting lets the transport find out."""
    granted(chunk(0, 8, last=True))
    granted(ev.PostInDoubt(DELIVERY, 0, FAILURE))
    assert DisconnectTransport(DECODE) in granted.sleep(3.0)
    assert reports(end(granted, 0, failure=FAILURE, lingers=True)) == [("failed", "safe")]


def test_bytes_that_linger_are_never_said_to_be_drained(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    effects = end(granted, 0, failure=FAILURE, lingers=True)
    assert reports(effects)[-1] == ("failed", "safe"), "the source pages are free"
    assert [failed.drained for failed in failed_in(effects)] == [False]
    for _ in range(2):
        assert messages(granted.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED)), Drained) == []
    assert len(granted.core.rooms.unfenced) == 1


def test_a_later_incarnation_asks_nothing_about_bytes_for_an_earlier_one(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    end(granted, 0, failure=FAILURE, lingers=True)
    later = DECODE._replace(incarnation=2)
    granted.connect(later)
    assert len(granted.core.rooms.unfenced) == 1, "a hello does not show that its sender lives"
    granted.hear(later, Ping(peer=later))
    assert len(granted.core.rooms.unfenced) == 0


def test_a_rank_that_a_dead_incarnation_had_replaced_is_told_no_proof_that_there_is_not(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    end(granted, 0, failure=FAILURE, lingers=True)
    granted.connect(DECODE._replace(incarnation=2))
    granted.connect(DECODE)
    granted.hear(DECODE, Ping(peer=DECODE))
    assert messages(granted.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED)), Drained) == []


def test_two_incarnations_of_a_decode_rank_are_not_two_decode_ranks() -> None:
    """The first one wants nothing, so its delivery is complete at once and outlives it."""
    core = PrefillDriver()
    first, second = peer("decode", incarnation=5), peer("decode", incarnation=6)
    core.connect(first, wants=False)
    core(ev.SendOpened(ROOM))
    core(chunk(0, 8, last=True))
    assert messages(core.hear(first, grant(num_decode_ranks=2)), Failed) == []
    core.connect(second, wants=False)
    effects = core.hear(second, grant(num_decode_ranks=2))
    (failed,) = failed_in(effects)
    assert failed.failure.reason is FailureReason.ROOM_IN_USE
    assert reports(effects) == []


# Data that is not ready --------------------------------------------------------------------------------------------


def test_a_piece_waits_for_the_device_and_those_behind_it_wait_with_it(core: PrefillDriver) -> None:
    device, other_device = Device(), Device()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(tokens=(0, 6)))
    assert core(ev.ChunkOffered(ROOM, Chunk((0, 2), {"kv": (0, 2)}, ready=device))) == [AwaitData(DELIVERY, 0, device)]
    assert core(chunk(2, 4)) == []
    assert core(ev.ChunkOffered(ROOM, Chunk((4, 6), {"kv": (4, 6)}, ready=other_device, last=True))) == []
    effects = core(ev.DataReady(DELIVERY, 0))
    assert posted(effects) == [(0, (0, 2)), (1, (2, 4))]
    assert AwaitData(DELIVERY, 1, other_device) in effects
    assert core(ev.DataReady(DELIVERY, 0)) == [], "it was said before"
    assert posted(core(ev.DataReady(DELIVERY, 1))) == [(2, (4, 6))]


def test_a_device_that_fails_fails_the_room(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(ev.ChunkOffered(ROOM, Chunk((0, 8), {"kv": (0, 8)}, ready=Device(), last=True)))
    effects = core(ev.DataReady(DELIVERY, 0, FAILURE))
    assert reports(effects)[-1] == ("failed", "safe")
    assert failed_in(effects)[0].failure == FAILURE
    assert len(core.core.queue) == 0


def test_data_of_a_delivery_that_has_ended_is_not_sent(core: PrefillDriver) -> None:
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(ev.ChunkOffered(ROOM, Chunk((0, 8), {"kv": (0, 8)}, ready=Device(), last=True)))
    core(ev.SendAborted(ROOM, ABORTED))
    assert core(ev.DataReady(DELIVERY, 0)) == []
    assert len(core.core.queue) == 0


# Notices ------------------------------------------------------------------------------------------------------------


def test_a_transport_with_notices_in_band_needs_none_over_the_control_channel(granted: PrefillDriver) -> None:
    granted(chunk(0, 4))
    assert messages(end(granted, 0), Notice) == []


def test_without_notices_in_band_each_goes_over_the_control_channel_when_its_post_has_ended() -> None:
    core = PrefillDriver(in_band_notices=False)
    core.connect(split_policy=small_pieces(8))
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    effects = core(chunk(0, 8, last=True))
    assert messages(effects, Notice) == []
    sent = [piece.notice for piece in pieces(effects)]
    for seq in (1, 0):
        assert messages(end(core, seq), Notice) == [(DECODE, sent[seq])]


def test_without_notices_in_band_a_failed_post_sends_none() -> None:
    core = PrefillDriver(in_band_notices=False)
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(chunk(0, 8, last=True))
    assert messages(end(core, 0, failure=FAILURE), Notice) == []


# Late events --------------------------------------------------------------------------------------------------------


def test_the_end_of_a_post_of_a_former_incarnation_is_only_counted(granted: PrefillDriver) -> None:
    granted(chunk(0, 8, last=True))
    granted(ev.PostInDoubt(DELIVERY, 0, FAILURE))
    granted(ev.QuarantineReleased(ROOM))
    again = peer("decode", incarnation=2)
    granted.connect(again)
    granted.hear(again, Ping(peer=again))
    assert anomalies(end(granted, 0)) == ["end_of_unknown_post"]
    assert len(granted.core.queue._under_way) == 0


@pytest.mark.parametrize("is_restarted", [True, False], ids=["restarted", "said goodbye"])
def test_a_lingering_write_to_a_rank_that_is_over_is_not_remembered(granted: PrefillDriver, is_restarted: bool) -> None:
    [piece] = pieces(granted(chunk(0, 4)))
    if is_restarted:
        again = peer("decode", incarnation=2)
        granted.connect(again)
        granted.hear(again, Ping(peer=again))
    else:
        granted.hear(DECODE, Goodbye(peer=DECODE))
    granted(ev.PostEnded(piece.delivery, piece.seq, ABORTED, True))
    assert not granted.core.rooms.rooms
    assert not granted.core.rooms.unfenced


# The bound on lingering writes -------------------------------------------------------------------------------------


def linger(core: PrefillDriver, room: int, decode: PeerId) -> None:
    """End a room whose bytes may still land at a decode rank."""
    core(ev.SendOpened(room))
    core.hear(decode, grant(room, generation=room))
    core(chunk(0, 8, room=room, last=True))
    core(ev.PostEnded(ev.DeliveryId(room, decode, room), 0, FAILURE, True))


def test_a_decode_rank_at_which_too_much_may_still_land_is_refused_and_others_are_served() -> None:
    core = PrefillDriver(limits=Bounds(unfenced=16))
    other = peer("decode", 1)
    for decode in (DECODE, other):
        core.connect(decode)
    for room in (1, 2):
        linger(core, room, DECODE)
    core(ev.SendOpened(3))
    (failed,) = failed_in(core.hear(DECODE, grant(3, generation=3)))
    assert (failed.failure.reason, failed.drained) == (FailureReason.CAPACITY, True)
    core(chunk(0, 8, room=3, last=True))
    assert pieces(core.hear(other, grant(3, generation=3)))


def test_nothing_is_begun_while_too_much_may_still_land_at_decode_ranks_that_are_connected() -> None:
    core = PrefillDriver(limits=Bounds(unfenced=1))
    core.connect()
    linger(core, 1, DECODE)
    with pytest.raises(CapacityExceeded, match="may still land"):
        core(ev.SendOpened(2))


def test_nothing_is_dropped_if_that_does_not_make_place() -> None:
    """The driver checks that the core is unchanged by a request that it refuses."""
    core = PrefillDriver(limits=Bounds(unfenced=2))
    ranks = [peer("decode", number) for number in range(3)]
    for room, decode in enumerate(ranks, 1):
        core.connect(decode)
        core(ev.SendOpened(room))
        core.hear(decode, grant(room, generation=room))
    for room, decode in enumerate(ranks, 1):
        core(chunk(0, 8, room=room, last=True))
        core(ev.PostEnded(ev.DeliveryId(room, decode, room), 0, FAILURE, True))
    for _ in range(10):
        for decode in ranks[1:]:
            core.hear(decode, Ping(peer=decode))
        core.sleep(1.0)
    assert ranks[0] not in core.core.peers
    with pytest.raises(CapacityExceeded, match="may still land"):
        core(ev.SendOpened(9))
    assert len(core.core.rooms.unfenced) == 3


def test_what_may_still_land_at_a_decode_rank_that_is_gone_is_dropped_and_it_is_never_told_drained() -> None:
    core = PrefillDriver(limits=Bounds(unfenced=1))
    core.connect()
    linger(core, 1, DECODE)
    core.sleep(10.0)
    core(ev.SendOpened(2))
    assert not core.core.rooms.unfenced
    effects = core(ev.MessageArrived(connection_of(DECODE), core.hello(DECODE, attempt=9)))
    ((_, refused),) = messages(effects, Refuse)
    assert isinstance(refused, Refuse)
    assert "no longer tracked" in refused.detail
    assert messages(core.hear(DECODE, Cancel(room=1, generation=1, failure=ABORTED)), Drained) == []
    assert messages(core(ev.TransportClosed()), Goodbye) == []


def test_a_failed_that_says_drained_is_followed_by_no_other(granted: PrefillDriver) -> None:
    effects = granted(ev.SendAborted(ROOM, ABORTED))
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert failed.drained
    assert messages(effects + granted.pass_time(5.0), Drained) == []


def test_a_transfer_that_fails_while_it_is_written_says_drained_once_at_the_end(granted: PrefillDriver) -> None:
    granted(chunk(0, 4))
    granted(chunk(4, 8, last=True))
    effects = granted(ev.SendAborted(ROOM, ABORTED))
    assert [failed.drained for _, failed in messages(effects, Failed) if isinstance(failed, Failed)] == [False]
    assert messages(effects + end(granted, 0), Drained) == [], "the other write may still land"
    assert len(messages(end(granted, 1), Drained)) == 1


def test_a_success_says_no_drained(granted: PrefillDriver) -> None:
    effects = granted(chunk(0, 8, last=True)) + end(granted, 0) + granted.hear(DECODE, ACK)
    assert messages(effects, Drained) == []
