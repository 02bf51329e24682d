"""One room for several decode ranks: they succeed together and fail together."""

import pytest

from kvflow.errors import FailureReason
from kvflow.state import events as ev
from kvflow.state.effects import DropPlan, Effect, EnqueueChunk
from kvflow.wire.messages import Cancel, Drained, Failed, PeerId, Received
from tests.support.cores import ABORTED, DECODE, PREFILL, CoreDriver, grant, messages, peer, reports
from tests.support.sending import ROOM, chunk, delivery, post

OTHER = peer("decode", 1)
THIRD = peer("decode", 2)


def shared(effects: list[Effect]) -> list[tuple[PeerId, tuple[int, int]]]:
    return [(effect.delivery.peer, effect.ranges["kv"]) for effect in effects if isinstance(effect, EnqueueChunk)]


@pytest.fixture
def core() -> CoreDriver:
    driver = CoreDriver(PREFILL)
    for other in (DECODE, OTHER, THIRD):
        driver.meet_decode(other)
    driver(ev.SendOpened(ROOM))
    return driver


def test_nothing_is_posted_for_a_decode_rank_after_another_one_has_ended_the_room(core: CoreDriver) -> None:
    """The first wants more than there is. The second was told that nothing can be written: so nothing may be."""
    core.hear(DECODE, grant(tokens=(0, 12), num_decode_ranks=2))
    core.hear(OTHER, grant(tokens=(4, 8), num_decode_ranks=2))
    core(chunk(0, 4))
    post(core, 0, delivery=delivery(DECODE))
    effects = core(chunk(4, 8, last=True))
    told = {to: failed.drained for to, failed in messages(effects, Failed) if isinstance(failed, Failed)}
    assert told == {DECODE: False, OTHER: True}
    assert shared(effects) == []
    assert core(ev.PlanFinished(delivery(OTHER), 0, 8)) == [DropPlan(delivery(OTHER), 0)]


def test_each_decode_rank_gets_the_tokens_that_it_wants(core: CoreDriver) -> None:
    core.hear(DECODE, grant(tokens=(0, 6), num_decode_ranks=2))
    core(chunk(0, 4))
    assert shared(core.hear(OTHER, grant(tokens=(2, 8), num_decode_ranks=2))) == [(OTHER, (2, 4))]
    assert shared(core(chunk(4, 8, last=True))) == [(DECODE, (4, 6)), (OTHER, (4, 8))]


def test_a_decode_rank_whose_grant_cannot_be_served_ends_the_room_for_all(core: CoreDriver) -> None:
    core(chunk(0, 8, last=True))
    core.hear(DECODE, grant(num_decode_ranks=2))
    post(core, 0, delivery=delivery(DECODE))
    effects = core.hear(OTHER, grant(tokens=(0, 9), num_decode_ranks=2))
    reasons = {to: failed.failure.reason for to, failed in messages(effects, Failed) if isinstance(failed, Failed)}
    assert reasons == dict.fromkeys([DECODE, OTHER], FailureReason.TOKENS_NOT_SERVED)
    assert reports(effects)[0] == ("failed", "draining")


def test_each_is_told_drained_after_its_own_last_write(core: CoreDriver) -> None:
    core(chunk(0, 8, last=True))
    for to in (DECODE, OTHER):
        core.hear(to, grant(num_decode_ranks=2))
        post(core, 0, delivery=delivery(to))
    core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    effects = core(ev.PostSettled(delivery(OTHER), 0, None))
    assert [to for to, _ in messages(effects, Drained)] == [OTHER]
    assert reports(effects) == []
    effects = core(ev.PostSettled(delivery(DECODE), 0, None))
    assert [to for to, _ in messages(effects, Drained)] == [DECODE]
    assert reports(effects) == [("failed", "safe")]


def test_a_decode_rank_to_which_nothing_is_owed_is_counted(core: CoreDriver) -> None:
    """It asks, as every decode rank does; its part is done with the last chunk."""
    core.meet_decode(OTHER, owed=())
    core.hear(DECODE, grant(num_decode_ranks=2))
    core(chunk(0, 8, last=True))
    post(core, 0, delivery=delivery(DECODE))
    assert reports(core(ev.PostSettled(delivery(DECODE), 0, None))) == []
    assert reports(core.hear(DECODE, Received(room=ROOM, generation=1))) == []
    assert reports(core.hear(OTHER, grant(num_decode_ranks=2, pages={}))) == [("success", "safe")]
