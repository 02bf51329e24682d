"""A peer that fails again and again is left alone for a while, and tried again one transfer at a time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.breaker import Breaker
from kvflow.state.effects import Effect, ForgetPeer, GreetInstance, ReportReceiver
from kvflow.state.tables import BREAKER, BreakerSignal, BreakerState
from kvflow.wire.messages import Failed, Failure, Ping, Refuse
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, grant, messages, peer, reports
from tests.support.receiving import Wire, wish
from tests.support.sending import ROOM, chunk, delivery, post, settle

UNREACHABLE = Failure(FailureReason.UNREACHABLE, Stage.BOOTSTRAP, "decode/0", "no answer")
BROKEN = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "it broke")


def test_every_pair_is_decided() -> None:
    assert set(BREAKER) == set(itertools.product(BreakerState, BreakerSignal))


def fail(breaker: Breaker, *times: float) -> None:
    for now in times:
        breaker.failed(now)


def test_it_opens_at_the_third_failure_in_a_row() -> None:
    breaker = Breaker()
    fail(breaker, 0.0, 1.0)
    assert breaker.admits(1.0)
    fail(breaker, 2.0)
    assert not breaker.admits(2.0)


def test_a_success_between_failures_forgives_them() -> None:
    breaker = Breaker()
    fail(breaker, 0.0, 1.0)
    breaker.succeeded()
    fail(breaker, 2.0, 3.0)
    assert breaker.admits(3.0)


def test_transfers_that_fail_together_count_once() -> None:
    breaker = Breaker()
    fail(breaker, *(number / 1_000 for number in range(500)))
    assert breaker.admits(0.5)


def test_the_pause_doubles_with_each_probe_that_fails_up_to_a_bound() -> None:
    breaker = Breaker()
    fail(breaker, 0.0, 1.0, 2.0)
    now, pauses = 2.0, []
    for _ in range(6):
        begin = now
        while not breaker.admits(now):
            now += 0.25
        pauses.append(now - begin)
        assert not breaker.admits(now), "one probe at a time"
        now += 0.5
        fail(breaker, now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_probe_that_succeeds_heals_and_the_next_pause_is_short_again() -> None:
    breaker = Breaker()
    fail(breaker, 0.0, 1.0, 2.0)
    assert breaker.admits(3.0)
    fail(breaker, 3.0)
    assert breaker.admits(5.0)
    breaker.succeeded()
    assert breaker.admits(5.0)
    fail(breaker, 6.0, 7.0, 8.0)
    assert not breaker.admits(8.9)
    assert breaker.admits(9.0)


def test_a_probe_of_which_nothing_is_heard_does_not_close_the_door_for_good() -> None:
    breaker = Breaker()
    fail(breaker, 0.0, 1.0, 2.0)
    assert breaker.admits(3.0)
    assert not breaker.admits(12.9)
    assert breaker.admits(13.0)


def test_after_a_probe_that_decides_nothing_the_next_transfer_is_the_probe() -> None:
    breaker = Breaker()
    fail(breaker, 0.0, 1.0, 2.0)
    for now in (3.0, 3.1, 3.2):
        assert breaker.admits(now)
        assert not breaker.admits(now)
        breaker.undecided(now)
    assert breaker.admits(3.3)
    fail(breaker, 3.4)
    assert not breaker.admits(5.3), "the pause has doubled once"
    assert breaker.admits(5.4)


def test_nothing_decided_changes_nothing_but_while_it_probes() -> None:
    breaker = Breaker()
    fail(breaker, 0.0, 1.0)
    breaker.undecided(1.5)
    fail(breaker, 2.0)
    breaker.undecided(2.5)
    assert not breaker.admits(2.9)
    assert breaker.admits(3.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["failed", "failed", "succeeded", "undecided", "admits"]), st.floats(0.0, 4.0)),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_a_transfer_is_let_through_within_the_longest_pause(steps: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    for step, seconds in steps:
        now += seconds
        if step == "failed":
            breaker.failed(now)
        elif step == "undecided":
            breaker.undecided(now)
        elif step == "succeeded":
            breaker.succeeded()
            assert breaker.admits(now)
        else:
            breaker.admits(now)
    assert breaker.admits(now) or breaker.admits(now + 10.0)


@given(st.lists(st.floats(0.5, 30.0), min_size=3, max_size=40))
def test_without_a_success_at_most_one_transfer_is_let_through_after_each_pause(gaps: list[float]) -> None:
    breaker, now = Breaker(), 0.0
    fail(breaker, 0.0, 1.0, 2.0)
    admitted_at = [2.0]
    for gap in gaps:
        now = 2.0 + gap if now == 0.0 else now + gap
        if breaker.admits(now):
            assert now - admitted_at[-1] >= 1.0
            admitted_at.append(now)
            assert not breaker.admits(now)
            breaker.failed(now + 0.01)


# On a decode rank: by instance -------------------------------------------------------------------------------------


@pytest.fixture
def decode() -> CoreDriver:
    return CoreDriver(DECODE)


def fail_to_reach(core: CoreDriver, generation: int) -> None:
    assert core(wish(generation)) == [GreetInstance("prefill")]
    core.sleep(1.0)
    assert reports(core(ev.InstanceUnreachable("prefill", UNREACHABLE)))[-1] == ("failed", "safe")


def reasons(effects: list[Effect]) -> list[FailureReason]:
    return [item.failure.reason for item in effects if isinstance(item, ReportReceiver) and item.failure]


def trip(core: CoreDriver) -> None:
    for generation in (1, 2, 3):
        fail_to_reach(core, generation)


def test_an_instance_that_never_answers_is_avoided_at_once_and_tried_after_the_pause(decode: CoreDriver) -> None:
    trip(decode)
    effects = decode(wish(4))
    assert reports(effects) == [("failed", "draining"), ("failed", "safe")]
    assert reasons(effects) == [FailureReason.PEER_FAILING] * 2
    assert decode.core.is_idle
    decode.sleep(1.0)
    assert decode(wish(5)) == [GreetInstance("prefill")]
    assert reasons(decode(wish(6, room=8)))[0] is FailureReason.PEER_FAILING
    wire = Wire(decode, decode.meet_prefill(PREFILL))
    assert reports(wire.notice(PREFILL, 0, (0, 8), last=True)) == [("success", "safe")]
    assert len(decode(wish(7, room=9))) == 1, "it is trusted again"


def test_a_probe_that_another_rank_ends_does_not_cost_a_pause(decode: CoreDriver) -> None:
    """Each rank of a decode instance avoids prefill from a time of its own, and one that avoids it ends the request."""
    trip(decode)
    decode.sleep(1.0)
    for generation in (4, 6, 8):
        assert reasons(decode(wish(generation))) == []
        assert reasons(decode(wish(generation + 1, room=8)))[0] is FailureReason.PEER_FAILING
        assert reasons(decode(ev.ReceiveAborted(ROOM, ABORTED)))[0] is FailureReason.ABORTED


def test_another_instance_is_not_blamed(decode: CoreDriver) -> None:
    trip(decode)
    other = ev.ReceiveOpened(8, 4, "other", {"kv": (0, 8)}, {"kv": b""}, 1, 60.0, b"secret of the test")
    assert decode(other) == [GreetInstance("other")]


def test_rooms_that_one_cause_ends_are_one_failure(decode: CoreDriver) -> None:
    for generation in (1, 2, 3, 4):
        decode(wish(generation, room=generation))
    decode(ev.InstanceUnreachable("prefill", UNREACHABLE))
    assert decode(wish(5)) == [GreetInstance("prefill")]


@pytest.mark.parametrize(
    "reason",
    [
        FailureReason.UNKNOWN_ROOM,
        FailureReason.TOKENS_NOT_SERVED,
        FailureReason.ABORTED,
        FailureReason.CAPACITY,
        FailureReason.PEER_CLOSED,
        FailureReason.REFUSED,
    ],
)
def test_what_is_not_the_instances_fault_does_not_speak_against_it(decode: CoreDriver, reason: FailureReason) -> None:
    decode.meet_prefill(PREFILL)
    for generation in range(1, 6):
        decode(wish(generation))
        failure = Failure(reason, Stage.ENQUEUE, "prefill/0", "")
        decode.hear(PREFILL, Failed(room=ROOM, generation=generation, engine_rank=0, failure=failure, drained=True))
        decode.sleep(1.0)
    assert len(decode(wish(6))) == 1, "granted"


def test_failed_writes_of_its_prefill_rank_speak_against_an_instance(decode: CoreDriver) -> None:
    decode.meet_prefill(PREFILL)
    for generation in (1, 2, 3):
        decode(wish(generation))
        decode.hear(PREFILL, Failed(room=ROOM, generation=generation, engine_rank=0, failure=BROKEN, drained=True))
        decode.sleep(0.9)
    assert reasons(decode(wish(4)))[0] is FailureReason.PEER_FAILING


# On a prefill rank: by decode rank ---------------------------------------------------------------------------------


@pytest.fixture
def prefill() -> CoreDriver:
    core = CoreDriver(PREFILL, Timeouts(lease_s=30.0))
    core(ev.PeerGreeted(DECODE, 30.0, ("kv",)))
    return core


def send(core: CoreDriver, room: int, failure: Failure | None) -> list[Effect]:
    """A transfer of one write that ends somehow."""
    core(ev.SendOpened(room))
    core.hear(DECODE, grant(room=room, generation=room))
    core(chunk(0, 8, room=room, last=True))
    post(core, 0, delivery=delivery(DECODE, room, room))
    core.sleep(1.0)
    return core(ev.PostSettled(delivery(DECODE, room, room), 0, failure))


def test_a_decode_rank_to_which_writes_fail_must_greet_anew(prefill: CoreDriver) -> None:
    """What its transport holds for that peer is thrown away with the acquaintance."""
    for room in (1, 2):
        assert ForgetPeer(DECODE) not in send(prefill, room, BROKEN)
    prefill(ev.SendOpened(8))
    prefill.hear(DECODE, grant(room=8, generation=8))
    prefill.hear(DECODE, grant(room=9, generation=9))
    effects = send(prefill, 3, BROKEN)
    assert effects[-1] == ForgetPeer(DECODE)
    ((to, refusal),) = messages(effects, Refuse)
    assert (to, getattr(refusal, "to", None)) == (DECODE, DECODE)
    told = [message.room for _, message in messages(effects, Failed) if isinstance(message, Failed)]
    assert told == [3, 8]
    assert len(prefill.core.senders.waiting) == 0
    assert prefill.core.peers == {}


def test_a_decode_rank_that_has_greeted_anew_starts_with_a_clean_record(prefill: CoreDriver) -> None:
    for room in (1, 2, 3):
        send(prefill, room, BROKEN)
    prefill(ev.PeerGreeted(DECODE, 30.0, ("kv",)))
    for room in (4, 5):
        assert ForgetPeer(DECODE) not in send(prefill, room, BROKEN)
    send(prefill, 6, None)
    for room in (11, 12):
        assert ForgetPeer(DECODE) not in send(prefill, room, BROKEN), "a write that went well has forgiven the others"


def test_a_write_in_doubt_counts_once_also_if_its_pages_were_released_meanwhile(prefill: CoreDriver) -> None:
    for room in (1, 2):
        prefill(ev.SendOpened(room))
        prefill.hear(DECODE, grant(room=room, generation=room))
        prefill(chunk(0, 8, room=room, last=True))
        post(prefill, 0, delivery=delivery(DECODE, room, room))
        prefill(ev.PostDoubted(delivery(DECODE, room, room), 0, BROKEN))
        prefill(ev.QuarantineReleased(room))
        prefill.sleep(1.0)
        prefill(ev.PostSettled(delivery(DECODE, room, room), 0, BROKEN))
        prefill.sleep(1.0)
    assert DECODE in prefill.core.peers


def test_writes_that_fail_after_the_parting_change_nothing(prefill: CoreDriver) -> None:
    prefill(ev.SendOpened(8))
    prefill.hear(DECODE, grant(room=8, generation=8))
    prefill(chunk(0, 8, room=8, last=True))
    late = delivery(DECODE, 8, 8)
    post(prefill, 0, delivery=late)
    for room in (1, 2, 3):
        send(prefill, room, BROKEN)
    effects = prefill(ev.PostSettled(late, 0, BROKEN))
    assert reports(effects) == [("failed", "safe")]
    assert messages(effects, Refuse) == []
    assert prefill.core.is_idle


def test_other_decode_ranks_are_not_parted_with(prefill: CoreDriver) -> None:
    other = peer("decode", 1)
    prefill(ev.PeerGreeted(other, 30.0, ("kv",)))
    for room in (1, 2, 3):
        send(prefill, room, BROKEN)
    assert list(prefill.core.peers) == [other]
    assert len(prefill.hear(other, Ping(peer=other))) == 1


def test_an_engine_that_aborts_does_not_speak_against_the_peer(prefill: CoreDriver) -> None:
    for room in range(1, 6):
        prefill(ev.SendOpened(room))
        prefill.hear(DECODE, grant(room=room, generation=room))
        prefill(chunk(0, 8, room=room, last=True))
        post(prefill, 0, delivery=delivery(DECODE, room, room))
        prefill(ev.SendAborted(room, ABORTED))
        settle(prefill, 0, delivery(DECODE, room, room))
        prefill.sleep(1.0)
    assert DECODE in prefill.core.peers
