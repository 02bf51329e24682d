"""Digests in the core: asked for in the grant, carried by notices, compared before success."""

import msgspec
import pytest

from kvflow.config import Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.effects import Effect, PostPlan, VerifyDigests
from kvflow.state.events import Chunk, DeliveryId
from kvflow.wire.messages import Cancel, Failure, Grant, Notice, PeerId, Received
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, debts, grant, messages, peer, reports
from tests.support.receiving import ROOM, wish

GENERATION = 1
OTHER = peer("prefill", 1)
CORRUPT = Failure(FailureReason.CORRUPT, Stage.AGGREGATE, "decode/0", "prefill/1: tokens 0:8 of component kv differ")
DRAIN_S = 5.0

WISH = wish(GENERATION, digest=True)


def notices(core: CoreDriver, effects: list[Effect], *senders: PeerId) -> list[Effect]:
    """Everything that some ranks owe, in one notice each."""
    grants = {to: message for to, message in messages(effects, Grant) if isinstance(message, Grant)}
    found: list[Effect] = []
    for sender in senders:
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
def core() -> CoreDriver:
    return CoreDriver(DECODE, Timeouts(drain_s=DRAIN_S))


@pytest.fixture
def granted(core: CoreDriver) -> list[Effect]:
    core(WISH)
    return core.meet_prefill(PREFILL, OTHER)


@pytest.fixture
def verifying(core: CoreDriver, granted: list[Effect]) -> CoreDriver:
    """Everything has arrived, and is being compared."""
    notices(core, granted, PREFILL, OTHER)
    return core


def answer(core: CoreDriver, failure: Failure | None = None) -> list[Effect]:
    return core(ev.DigestsVerified(GENERATION, failure))


def test_grants_ask_for_digests_if_the_wish_does(core: CoreDriver, granted: list[Effect]) -> None:
    assert [message.digest for _, message in messages(granted, Grant) if isinstance(message, Grant)] == [True, True]
    effects = core(msgspec.structs.replace(WISH, room=8, generation=2, digest=False))
    assert [message.digest for _, message in messages(effects, Grant) if isinstance(message, Grant)] == [False, False]


def test_digests_are_compared_once_everything_has_arrived(core: CoreDriver, granted: list[Effect]) -> None:
    assert notices(core, granted, OTHER) == []
    (effect,) = notices(core, granted, PREFILL)
    assert isinstance(effect, VerifyDigests)
    assert effect.opened == WISH
    assert [(written.rank.peer, written.notices[0].digests) for written in effect.written] == [
        (PREFILL, {"kv": 5}),
        (OTHER, {"kv": 5}),
    ]
    assert reports(answer(core)) == [("success", "safe")]
    assert core.core.is_idle


def test_success_is_said_after_the_comparison_only(verifying: CoreDriver) -> None:
    assert [to for to, _ in messages(answer(verifying), Received)] == [PREFILL, OTHER]


def test_a_difference_fails_the_transfer_and_its_pages_are_safe(verifying: CoreDriver) -> None:
    effects = answer(verifying, CORRUPT)
    assert reports(effects) == [("failed", "draining"), ("failed", "safe")]
    cancels = messages(effects, Cancel)
    assert [(to, message.failure) for to, message in cancels if isinstance(message, Cancel)] == [
        (PREFILL, CORRUPT),
        (OTHER, CORRUPT),
    ]
    assert messages(effects, Received) == []
    assert verifying.core.is_idle


def test_pages_are_held_until_a_comparison_that_nobody_wants_any_more_has_ended(verifying: CoreDriver) -> None:
    assert reports(verifying(ev.ReceiveAborted(ROOM, ABORTED))) == [("aborted", "draining")]
    assert reports(answer(verifying)) == [("aborted", "safe")]
    assert verifying.core.is_idle


def test_a_difference_that_is_found_too_late_changes_nothing(verifying: CoreDriver) -> None:
    verifying(ev.ReceiveAborted(ROOM, ABORTED))
    effects = answer(verifying, CORRUPT)
    assert reports(effects) == [("aborted", "safe")]
    assert messages(effects, Cancel) == []


def test_a_comparison_that_does_not_end_puts_the_pages_into_quarantine(verifying: CoreDriver) -> None:
    verifying(ev.ReceiveAborted(ROOM, ABORTED))
    assert reports(verifying.sleep(DRAIN_S)) == [("aborted", "quarantined")]
    assert reports(answer(verifying)) == [("aborted", "safe")]


def test_an_answer_about_an_unknown_transfer_is_ignored(core: CoreDriver) -> None:
    assert answer(core, CORRUPT) == []


def test_nothing_is_compared_of_a_transfer_that_ended_before_everything_arrived(
    core: CoreDriver, granted: list[Effect]
) -> None:
    notices(core, granted, PREFILL)
    core(ev.ReceiveAborted(ROOM, ABORTED))
    effects = notices(core, granted, OTHER)
    assert reports(effects) == [("aborted", "safe")]
    assert not any(isinstance(effect, VerifyDigests) for effect in effects)


def test_a_lost_rank_that_wrote_everything_does_not_disturb_the_comparison(verifying: CoreDriver) -> None:
    assert reports(verifying(ev.PeerLeft(PREFILL, ABORTED))) == []
    assert reports(answer(verifying)) == [("success", "safe")]


def test_nothing_is_compared_where_nobody_owes_anything(core: CoreDriver) -> None:
    core(WISH)
    assert reports(core(ev.InstanceGreeted("prefill", (ev.GreetedRank(PREFILL, {}),)))) == [("success", "safe")]


def test_only_ranks_that_owe_something_are_compared(core: CoreDriver) -> None:
    core(WISH)
    ranks = (ev.GreetedRank(PREFILL, debts()), ev.GreetedRank(OTHER, {}))
    effects = core(ev.InstanceGreeted("prefill", ranks))
    (effect,) = notices(core, effects, PREFILL)
    assert isinstance(effect, VerifyDigests)
    assert [written.rank.peer for written in effect.written] == [PREFILL]


def test_a_notice_carries_the_digests_of_its_plan() -> None:
    core = CoreDriver(PREFILL)
    core.meet_decode()
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant(digest=True))
    core(ev.ChunkOffered(ROOM, Chunk((0, 8), {"kv": (0, 8)}, last=True)))
    (effect,) = core(ev.PlanFinished(DeliveryId(ROOM, DECODE, 1), 0, 16, {"kv": 5}))
    assert isinstance(effect, PostPlan)
    assert (effect.notice.digests, effect.notice.num_bytes) == ({"kv": 5}, 16)


def test_a_comparison_that_takes_long_is_no_stall(core: CoreDriver, granted: list[Effect]) -> None:
    notices(core, granted, PREFILL, OTHER)
    effects = core.sleep(WISH.timeout_s - 1.0)
    assert reports(effects) == []


def test_a_notice_that_is_said_again_does_not_start_another_comparison(core: CoreDriver, granted: list[Effect]) -> None:
    notices(core, granted, PREFILL, OTHER)
    assert notices(core, granted, PREFILL, OTHER) == []
