"""A room for several decode ranks: they succeed together and fail together."""

import statistics
from functools import partial

import pytest

from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.errors import FailureReason
from kvflow.geometry.ranges import TokenRange
from kvflow.state import events as ev
from kvflow.state.effects import PrefillEffect
from kvflow.wire.messages import Ack, Cancel, Drained, Failed, PeerId
from tests.support.cores import ABORTED, DECODE, PrefillDriver, connection_of, grant, messages, peer, reports
from tests.support.sending import ROOM, chunk, delivery, end, pieces
from tests.support.steps import num_steps

OTHER = peer("decode", 1)
THIRD = peer("decode", 2)


def shared(effects: list[PrefillEffect]) -> list[tuple[PeerId, TokenRange]]:
    return [(piece.delivery.peer, piece.ranges["kv"]) for piece in pieces(effects)]


def connected(*others: PeerId, limits: Limits | None = None) -> PrefillDriver:
    driver = PrefillDriver(limits=limits)
    for other in others:
        driver.connect(other)
    driver(ev.SendOpened(ROOM))
    return driver


@pytest.fixture
def core() -> PrefillDriver:
    return connected(DECODE, OTHER, THIRD)


def test_nothing_is_posted_for_a_decode_rank_after_another_one_has_ended_the_room() -> None:
    """The first wants more tokens than there are; the second was told that nothing can be written to it."""
    core = connected(DECODE, OTHER)
    core.hear(DECODE, grant(tokens=(0, 12), num_decode_ranks=2))
    core.hear(OTHER, grant(tokens=(4, 8), num_decode_ranks=2))
    core(chunk(0, 4))
    effects = core(chunk(4, 8, last=True))
    told = {to: failed.drained for to, failed in messages(effects, Failed) if isinstance(failed, Failed)}
    assert told == {DECODE: False, OTHER: True}
    assert shared(effects) == []
    assert shared(end(core, 0, delivery(DECODE))) == []
    assert len(core.core.queue) == 0


def test_each_decode_rank_gets_the_tokens_that_it_wants(core: PrefillDriver) -> None:
    core.hear(DECODE, grant(tokens=(0, 6), num_decode_ranks=2))
    core(chunk(0, 4))
    assert shared(core.hear(OTHER, grant(tokens=(2, 8), num_decode_ranks=2))) == [(OTHER, (2, 4))]
    assert sorted(shared(core(chunk(4, 8, last=True)))) == [(DECODE, (4, 6)), (OTHER, (4, 8))]


def test_a_decode_rank_whose_grant_cannot_be_served_ends_the_room_for_all(core: PrefillDriver) -> None:
    core(chunk(0, 8, last=True))
    core.hear(DECODE, grant(num_decode_ranks=2))
    effects = core.hear(OTHER, grant(tokens=(0, 9), num_decode_ranks=2))
    reasons = {to: failed.failure.reason for to, failed in messages(effects, Failed) if isinstance(failed, Failed)}
    assert reasons == dict.fromkeys([DECODE, OTHER], FailureReason.TOKENS_NOT_SERVED)
    assert reports(effects)[0] == ("failed", "draining")


def test_each_is_told_drained_after_its_own_last_write(core: PrefillDriver) -> None:
    core(chunk(0, 8, last=True))
    for to in (DECODE, OTHER):
        core.hear(to, grant(num_decode_ranks=2))
    core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    effects = end(core, 0, delivery(OTHER))
    assert [to for to, _ in messages(effects, Drained)] == [OTHER]
    assert reports(effects) == []
    effects = end(core, 0, delivery(DECODE))
    assert [to for to, _ in messages(effects, Drained)] == [DECODE]
    assert reports(effects) == [("failed", "safe")]


def test_a_decode_rank_that_wants_nothing_is_counted() -> None:
    """It sends a grant like every decode rank; its part is done with the last chunk."""
    core = connected(DECODE)
    core.connect(OTHER, wants=False)
    core.hear(DECODE, grant(num_decode_ranks=2))
    core(chunk(0, 8, last=True))
    assert reports(end(core, 0, delivery(DECODE))) == []
    assert reports(core.hear(DECODE, Ack(room=ROOM, generation=1))) == []
    assert reports(core.hear(OTHER, grant(num_decode_ranks=2, pages={}))) == [("success", "safe")]


def test_a_decode_rank_without_credit_holds_up_no_other() -> None:
    core = connected(DECODE, OTHER, limits=Bounds(posts_per_peer=1))
    core.hear(DECODE, grant(num_decode_ranks=2))
    core.hear(OTHER, grant(num_decode_ranks=2))
    core(chunk(0, 4))
    end(core, 0, delivery(OTHER))
    assert shared(core(chunk(4, 8, last=True))) == [(OTHER, (4, 8))]
    assert shared(end(core, 0, delivery(DECODE))) == [(DECODE, (4, 8))]


def test_every_decode_rank_but_the_expected_ones_is_refused(core: PrefillDriver) -> None:
    for to in (DECODE, OTHER):
        core.hear(to, grant(num_decode_ranks=2))
    ((to, failed),) = messages(core.hear(THIRD, grant(num_decode_ranks=2)), Failed)
    assert isinstance(failed, Failed)
    assert (to, failed.failure.reason, failed.drained) == (THIRD, FailureReason.PROTOCOL, True)


def test_an_event_of_one_decode_rank_looks_at_no_other() -> None:
    costs = []
    for num_ranks in (5, 50):
        peers = [peer("decode", number) for number in range(num_ranks)]
        core = connected(*peers)
        core(chunk(0, 8, last=True))
        grants = [ev.MessageArrived(connection_of(to), grant(num_decode_ranks=num_ranks)) for to in peers]
        ends = [ev.PostEnded(delivery(to), 0, None, False) for to in peers]
        acks = [ev.MessageArrived(connection_of(to), Ack(room=ROOM, generation=1)) for to in peers]
        costs.append(
            [
                statistics.median(num_steps(partial(core.core.handle, event, 0.0)) for event in kind)
                for kind in (grants, ends, acks)
            ]
        )
    assert costs[0] == costs[1]
