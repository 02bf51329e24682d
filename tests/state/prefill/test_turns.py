"""How much a prefill rank does at once: it yields to the event loop, and makes large plans in a worker thread."""

import pytest

from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.state import events as ev
from kvflow.state.effects import AdmitChunk, DropPlan, PostPlan, PrefillEffect, YieldTurn
from kvflow.state.prefill.posting import PIECES_PER_TURN
from kvflow.wire.messages import Cancel, Drained, Failed, Grant, Staged
from tests.support.cores import (
    ABORTED,
    DECODE,
    OTHER_DECODE,
    PrefillDriver,
    abort_failure,
    grant,
    messages,
    of_kind,
    reports,
)
from tests.support.sending import DELIVERY, ROOM, chunk, delivery, end, pieces, planned, posted
from tests.support.small_routes import small_pieces

ONE_PAGE = small_pieces(4)
"""Pieces of two tokens."""
BROKEN = abort_failure("it cannot be planned")


def granted(limits: Limits | None = None, *, continues: bool = False, asked: Grant | None = None) -> PrefillDriver:
    """Open and grant a room of which everything is wanted, in pieces of two tokens."""
    core = PrefillDriver(limits=limits, continues=continues)
    core.connect(split_policy=ONE_PAGE)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, asked or grant(tokens=(0, 24)))
    return core


def posts_of(effects: list[PrefillEffect]) -> list[int]:
    return [seq for seq, _ in posted(effects)]


# Turns -------------------------------------------------------------------------------------------------------------


def test_so_many_pieces_are_posted_before_the_event_loop_has_its_turn() -> None:
    core = granted()
    effects = core(chunk(0, 20, last=False))
    assert posts_of(effects) == list(range(PIECES_PER_TURN))
    assert effects[-1] == YieldTurn()
    effects = core(ev.TurnContinued())
    assert posts_of(effects) == list(range(PIECES_PER_TURN, 2 * PIECES_PER_TURN))
    assert of_kind(effects, YieldTurn) == [YieldTurn()]
    effects = core(ev.TurnContinued())
    assert (posts_of(effects), of_kind(effects, YieldTurn)) == ([8, 9], [])


def test_nothing_more_is_posted_until_the_turn_of_the_event_loop_is_over() -> None:
    core = granted()
    core(chunk(0, 10))
    assert core(chunk(10, 20)) == []
    assert end(core, 0) == []
    assert posts_of(core(ev.TurnContinued())) == [4, 5, 6, 7]


def test_fewer_pieces_need_no_turn() -> None:
    core = granted()
    effects = core(chunk(0, 2 * (PIECES_PER_TURN - 1)))
    assert len(posts_of(effects)) == PIECES_PER_TURN - 1
    assert of_kind(effects, YieldTurn) == []


def test_a_turn_ends_also_when_so_many_descriptors_were_planned() -> None:
    probe = granted(continues=True)
    (one,) = pieces(probe(chunk(0, 2)))
    core = granted(Bounds(descriptors_planned_inline=one.cost.num_descriptors * 2))
    effects = core(chunk(0, 10))
    assert posts_of(effects) == [0, 1]
    assert effects[-1] == YieldTurn()
    assert posts_of(core(ev.TurnContinued())) == [2, 3]


# Plans in worker threads ---------------------------------------------------------------------------------------------


def slow(**changes: object) -> PrefillDriver:
    """Make every plan too large for the event loop."""
    return granted(
        Bounds(descriptors_planned_inline=1),
        continues=True,
        asked=grant(**({"tokens": (0, 24)} | changes)),  # type: ignore[arg-type]
    )


def test_one_large_plan_is_made_at_a_time() -> None:
    core = slow()
    effects = core(chunk(0, 6))
    assert [piece.seq for piece in planned(effects)] == [0]
    assert posted(effects) == []
    effects = core(ev.PlanFinished(DELIVERY, 0))
    (post,) = of_kind(effects, PostPlan)
    assert (post.delivery, post.seq, post.notice.seq) == (DELIVERY, 0, 0)
    assert [piece.seq for piece in planned(effects)] == [1]


def test_a_large_plan_that_fails_makes_way_for_the_next_one() -> None:
    core = slow(num_decode_ranks=2)
    core.connect(OTHER_DECODE, split_policy=ONE_PAGE)
    core(ev.SendOpened(8))
    core.hear(OTHER_DECODE, grant(room=8, tokens=(0, 24)))
    core(chunk(0, 2))
    assert core(chunk(0, 2, room=8)) == []
    effects = core(ev.PlanFailed(DELIVERY, 0, BROKEN))
    assert reports(effects)[-1] == ("failed", "safe")
    assert [piece.delivery.peer for piece in planned(effects)] == [OTHER_DECODE]


def test_a_large_plan_for_one_decode_rank_does_not_delay_small_pieces_for_another() -> None:
    (one,) = pieces(granted(continues=True)(chunk(0, 2)))
    core = granted(Bounds(descriptors_planned_inline=one.cost.num_descriptors - 1), continues=True)
    core.connect(OTHER_DECODE, split_policy=ONE_PAGE)
    core(ev.SendOpened(8))
    core.hear(OTHER_DECODE, grant(room=8, tokens=(0, 1)))
    assert [piece.seq for piece in planned(core(chunk(0, 6)))] == [0]
    assert [piece.delivery.peer for piece in pieces(core(chunk(0, 1, room=8)))] == [OTHER_DECODE]
    assert [piece.seq for piece in planned(core(ev.PlanFinished(DELIVERY, 0)))] == [1]


def test_pieces_with_digests_are_planned_beside_the_event_loop_and_several_at_once() -> None:
    core = granted(continues=True, asked=grant(tokens=(0, 24), digest=True))
    effects = core(chunk(0, 6))
    assert [piece.seq for piece in planned(effects)] == [0, 1, 2]
    (post,) = core(ev.PlanFinished(DELIVERY, 1, {"kv": 5}))
    assert isinstance(post, PostPlan)
    assert post.notice.digests == {"kv": 5}


def test_a_plan_that_nobody_wants_any_more_is_dropped_and_gives_its_credit_back() -> None:
    core = slow()
    core(chunk(0, 6))
    effects = core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    assert len(messages(effects, Drained)) == 1, "nothing was posted"
    assert core(ev.PlanFinished(DELIVERY, 0)) == [DropPlan(DELIVERY, 0)]
    assert len(core.core.queue._under_way) == len(core.core.queue) == 0


def test_a_plan_that_is_finished_after_its_decode_rank_left_is_dropped() -> None:
    core = slow()
    core(chunk(0, 2))
    core.sleep(10.0)
    assert DECODE not in core.core.peers
    assert core(ev.PlanFinished(DELIVERY, 0)) == [DropPlan(DELIVERY, 0)]
    assert len(core.core.queue._under_way) == 0


def test_a_plan_that_fails_after_its_room_has_ended_changes_nothing() -> None:
    core = slow()
    core(chunk(0, 2))
    core(ev.SendAborted(ROOM, ABORTED))
    assert core(ev.PlanFailed(DELIVERY, 0, BROKEN)) == []
    assert len(core.core.queue._under_way) == 0


# Plans on the event loop ---------------------------------------------------------------------------------------------


def test_a_piece_that_cannot_be_planned_fails_its_room_though_it_counts_as_posted() -> None:
    core = granted(continues=True)
    assert posts_of(core(chunk(0, 2))) == [0]
    effects = core(ev.PlanFailed(DELIVERY, 0, BROKEN))
    assert reports(effects)[-1] == ("failed", "safe")
    ((_, failed), *_) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert failed.failure == BROKEN
    assert len(core.core.queue._under_way) == 0
    assert not core.core.rooms.rooms


def test_the_other_posts_of_a_room_with_a_piece_that_cannot_be_planned_are_waited_for() -> None:
    core = granted(continues=True)
    core(chunk(0, 4))
    effects = core(ev.PlanFailed(DELIVERY, 1, BROKEN))
    assert reports(effects)[-1] == ("failed", "draining")
    assert messages(effects, Drained) == []
    effects = end(core, 0)
    assert reports(effects) == [("failed", "safe")]
    assert len(messages(effects, Drained)) == 1


def test_a_released_delivery_is_proved_also_by_a_piece_that_cannot_be_planned() -> None:
    core = granted(continues=True)
    core(chunk(0, 4))
    core(ev.PostInDoubt(DELIVERY, 0, BROKEN))
    core.hear(DECODE, Cancel(room=ROOM, generation=1, failure=ABORTED))
    core(ev.QuarantineReleased(ROOM))
    assert end(core, 0) == []
    effects = core(ev.PlanFailed(DELIVERY, 1, BROKEN))
    assert len(messages(effects, Drained)) == 1
    assert len(core.core.rooms.unfenced) == 0


# Capacity ------------------------------------------------------------------------------------------------------------


def has_capacity(core: PrefillDriver, room: int) -> bool:
    return core.core.line.is_open(room)


def full(limits: Limits) -> PrefillDriver:
    core = granted(limits, continues=True)
    core(chunk(0, 6))
    return core


def test_a_chunk_may_be_offered_while_fewer_pieces_wait_than_allowed() -> None:
    core = full(Bounds(posts_per_peer=1, queued_chunks=3))
    assert has_capacity(core, ROOM), "one is posted, two wait"
    core(chunk(6, 8))
    assert not has_capacity(core, ROOM)
    assert has_capacity(core, 99), "a room that is not open waits for nobody"


def test_chunks_that_wait_for_capacity_are_offered_when_there_is_some_again() -> None:
    core = full(Bounds(posts_per_peer=1, queued_chunks=2))
    assert not has_capacity(core, ROOM)
    assert core(ev.ChunkWaits(ROOM, 7)) == core(ev.ChunkWaits(ROOM, 8)) == []
    effects = end(core, 0)
    assert effects[-1] == AdmitChunk(ROOM, 7)
    core(chunk(6, 8))
    assert core(ev.WaitEnded(7)) == []
    assert end(core, 1)[-1] == AdmitChunk(ROOM, 8)
    assert core(ev.WaitEnded(8)) == []
    assert has_capacity(core, ROOM)


def test_an_end_frees_capacity_for_chunks_to_the_same_decode_rank() -> None:
    core = full(Bounds(posts_per_peer=1, queued_chunks=2))
    core(ev.ChunkWaits(ROOM, 7))
    assert AdmitChunk(ROOM, 7) in core(ev.SendAborted(ROOM, ABORTED))


def test_a_decode_rank_with_too_much_in_line_holds_up_only_rooms_that_it_asked_for() -> None:
    core = full(Bounds(posts_per_peer=1, queued_chunks=2))
    core.connect(OTHER_DECODE)
    core(ev.SendOpened(8))
    core.hear(OTHER_DECODE, grant(room=8))
    assert has_capacity(core, 8)
    assert not has_capacity(core, ROOM)
    assert core.core.rooms.peers_of(8) == [OTHER_DECODE]
    assert delivery(OTHER_DECODE, 8).peer in core.core.peers


@pytest.mark.parametrize("staged", [Staged(0, head_major=False), None])
def test_a_plan_of_an_unknown_room_is_dropped(staged: Staged | None) -> None:
    core = slow()
    core(chunk(0, 2))
    core(ev.SendAborted(ROOM, ABORTED))
    assert not core.core.rooms.rooms
    assert core(ev.PlanFinished(DELIVERY, 0, {}, staged)) == [DropPlan(DELIVERY, 0)]
