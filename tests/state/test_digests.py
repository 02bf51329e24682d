"""Digests in the core: requested by the grant, carried by notices, compared before success."""

import pytest

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.effects import DecodeEffect, PlanPiece, PostPlan, VerifyDigests
from kvflow.wire.messages import Ack, Cancel, Drained, Failure, Goodbye, Grant, Notice, PeerId
from tests.support.cores import ABORTED, DECODE, PREFILL, DecodeDriver, PrefillDriver, grant, messages, peer, reports
from tests.support.receiving import ROOM, request
from tests.support.sending import DELIVERY, chunk

GENERATION = 1
OTHER = peer("prefill", 1)
CORRUPT = Failure(FailureReason.CORRUPT, Stage.AGGREGATE, "decode/0", "prefill/1: tokens 0:8 of component kv differ")
DRAIN_S = 5.0

REQUEST = request(GENERATION, digest=True)


def notices(core: DecodeDriver, effects: list[DecodeEffect], *rooms: PeerId) -> list[DecodeEffect]:
    """Deliver everything that some ranks send, in one notice each."""
    grants = {to: message for to, message in messages(effects, Grant) if isinstance(message, Grant)}
    found: list[DecodeEffect] = []
    for sender in rooms:
        notice = Notice(
            room=ROOM,
            generation=GENERATION,
            token=grants[sender].token,
            engine_rank=sender.rank.engine_rank,
            seq=0,
            ranges={"kv": (0, 8)},
            num_bytes=16,
            last=True,
            digests={"kv": 5},
        )
        found += core(ev.NoticeDelivered(notice))
    return found


@pytest.fixture
def core() -> DecodeDriver:
    return DecodeDriver(Timeouts(drain_s=DRAIN_S))


@pytest.fixture
def granted(core: DecodeDriver) -> list[DecodeEffect]:
    core(REQUEST)
    return core.connect(PREFILL, OTHER)


@pytest.fixture
def verifying(core: DecodeDriver, granted: list[DecodeEffect]) -> DecodeDriver:
    """A core that has received everything, and is comparing digests."""
    notices(core, granted, PREFILL, OTHER)
    return core


def answer(core: DecodeDriver, failure: Failure | None = None) -> list[DecodeEffect]:
    return core(ev.DigestsVerified(GENERATION, failure))


def test_grants_ask_for_digests_if_the_request_does(core: DecodeDriver, granted: list[DecodeEffect]) -> None:
    assert [message.digest for _, message in messages(granted, Grant) if isinstance(message, Grant)] == [True, True]
    effects = core(request(2, room=8))
    assert [message.digest for _, message in messages(effects, Grant) if isinstance(message, Grant)] == [False, False]


def test_digests_are_compared_once_everything_has_arrived(core: DecodeDriver, granted: list[DecodeEffect]) -> None:
    assert notices(core, granted, OTHER) == []
    (effect,) = notices(core, granted, PREFILL)
    assert isinstance(effect, VerifyDigests)
    assert effect.opened == REQUEST
    assert [(written.rank.peer, written.notices[0].digests) for written in effect.written] == [
        (PREFILL, {"kv": 5}),
        (OTHER, {"kv": 5}),
    ]
    assert reports(answer(core)) == [("success", "safe")]
    assert not core.core.rooms.rooms


def test_success_is_said_after_the_comparison_only(verifying: DecodeDriver) -> None:
    assert [to for to, _ in messages(answer(verifying), Ack)] == [PREFILL, OTHER]


def drain(core: DecodeDriver, *senders: PeerId) -> list[DecodeEffect]:
    """Let ranks say that they can write nothing more; return the effects of the last message."""
    effects: list[DecodeEffect] = []
    for sender in senders:
        drained = Drained(room=ROOM, generation=GENERATION, engine_rank=sender.rank.engine_rank)
        effects = core.hear(sender, drained)
    return effects


def test_a_difference_fails_the_transfer_and_its_notices_prove_nothing(verifying: DecodeDriver) -> None:
    """A notice may have overtaken its bytes, so its rank must say that nothing more comes."""
    effects = answer(verifying, CORRUPT)
    assert reports(effects) == [("failed", "draining")]
    cancels = messages(effects, Cancel)
    assert [(to, message.failure) for to, message in cancels if isinstance(message, Cancel)] == [
        (PREFILL, CORRUPT),
        (OTHER, CORRUPT),
    ]
    assert messages(effects, Ack) == []
    assert reports(drain(verifying, PREFILL, OTHER)) == [("failed", "safe")]
    assert not verifying.core.rooms.rooms


def test_pages_are_held_until_a_comparison_that_nobody_wants_any_more_has_ended(verifying: DecodeDriver) -> None:
    assert reports(verifying(ev.ReceiveAborted(ROOM, ABORTED))) == [("aborted", "draining")]
    assert drain(verifying, PREFILL, OTHER) == []
    assert reports(answer(verifying)) == [("aborted", "safe")]
    assert not verifying.core.rooms.rooms


def test_a_comparison_that_nobody_wants_any_more_is_left_unfinished_and_confirms_nothing(
    verifying: DecodeDriver,
) -> None:
    """A notice may have overtaken its bytes, which land after the end."""
    verifying(ev.ReceiveAborted(ROOM, ABORTED))
    effects = answer(verifying)
    assert reports(effects) == []
    assert [to for to, _ in messages(effects, Cancel)] == [PREFILL, OTHER]
    assert reports(drain(verifying, PREFILL, OTHER)) == [("aborted", "safe")]


def test_a_difference_that_is_found_too_late_changes_no_outcome(verifying: DecodeDriver) -> None:
    """Notices prove nothing then, so the rank that has not said yet that its writes have ended is asked again."""
    verifying(ev.ReceiveAborted(ROOM, ABORTED))
    assert drain(verifying, PREFILL) == []
    effects = answer(verifying, CORRUPT)
    assert reports(effects) == []
    assert [to for to, _ in messages(effects, Cancel)] == [OTHER]
    assert reports(drain(verifying, OTHER)) == [("aborted", "safe")]


def test_a_comparison_that_does_not_end_puts_the_pages_into_quarantine(verifying: DecodeDriver) -> None:
    verifying(ev.ReceiveAborted(ROOM, ABORTED))
    assert drain(verifying, PREFILL, OTHER) == []
    assert reports(verifying.sleep(DRAIN_S)) == [("aborted", "quarantined")]
    assert reports(answer(verifying)) == [("aborted", "safe")]


def test_an_answer_about_an_unknown_transfer_is_ignored(core: DecodeDriver) -> None:
    assert answer(core, CORRUPT) == []


def test_nothing_is_compared_of_a_transfer_that_ended_before_everything_arrived(
    core: DecodeDriver, granted: list[DecodeEffect]
) -> None:
    """So nothing confirms its notices: each rank has to say that nothing more comes."""
    notices(core, granted, PREFILL)
    core(ev.ReceiveAborted(ROOM, ABORTED))
    effects = notices(core, granted, OTHER)
    assert reports(effects) == []
    assert not any(isinstance(effect, VerifyDigests) for effect in effects)
    assert reports(drain(core, PREFILL, OTHER)) == [("aborted", "safe")]


def test_a_lost_rank_that_wrote_everything_does_not_disturb_the_comparison(verifying: DecodeDriver) -> None:
    assert reports(verifying.hear(PREFILL, Goodbye(peer=PREFILL))) == []
    assert reports(answer(verifying)) == [("success", "safe")]


@pytest.mark.parametrize("proof", ["drained", "fenced"])
def test_a_proof_that_came_while_its_notices_were_believed_still_counts(
    core: DecodeDriver, granted: list[DecodeEffect], proof: str
) -> None:
    """Of two ranks that are killed, one has sent everything; it is gone, and cannot give its proof again."""
    notices(core, granted, PREFILL)
    if proof == "fenced":
        core(ev.PeerFenced(PREFILL))
    else:
        drain(core, PREFILL)
    assert reports(core(ev.PeerFenced(OTHER)))[-1] == ("failed", "safe")


def test_nothing_is_compared_where_nobody_sends_anything(core: DecodeDriver) -> None:
    core(REQUEST)
    assert reports(core.connect(PREFILL, silent=[PREFILL])) == [("success", "safe")]


def test_only_ranks_that_send_something_are_compared(core: DecodeDriver) -> None:
    core(REQUEST)
    effects = core.connect(PREFILL, OTHER, silent=[OTHER])
    (effect,) = notices(core, effects, PREFILL)
    assert isinstance(effect, VerifyDigests)
    assert [written.rank.peer for written in effect.written] == [PREFILL]


def test_a_notice_carries_the_digests_of_its_plan() -> None:
    core = PrefillDriver()
    core.connect()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(digest=True))
    (plan,) = core(chunk(0, 8, last=True))
    assert isinstance(plan, PlanPiece)
    (effect,) = core(ev.PlanFinished(DELIVERY, 0, {"kv": 5}))
    assert isinstance(effect, PostPlan)
    assert (effect.notice.digests, effect.notice.num_bytes) == ({"kv": 5}, 16)


def test_a_comparison_that_takes_long_is_no_stall(core: DecodeDriver, granted: list[DecodeEffect]) -> None:
    notices(core, granted, PREFILL, OTHER)
    effects = core.sleep(REQUEST.timeout_s - 1.0)
    assert reports(effects) == []


def test_a_notice_that_is_said_again_does_not_start_another_comparison(
    core: DecodeDriver, granted: list[DecodeEffect]
) -> None:
    notices(core, granted, PREFILL, OTHER)
    assert notices(core, granted, PREFILL, OTHER) == []
