"""Small worlds keep every promise in every interleaving."""

import itertools
from typing import Any

import pytest

from kvflow.errors import FailureReason, Stage
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.prefill.queue import Window
from kvflow.state.prefill.slots import RemoteSlots, SlotPool
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure
from simulation.explore import FAULTS, Exploration, Setup, SmallWorld, explore
from simulation.explore.search import Violation
from simulation.explore.small import Step
from simulation.explore.world import PromiseBroken
from tests.explore.worlds import WORLDS
from tests.support.slow import slow_except

ONE_SLOT = Setup(max_faults=0, rooms=(1, 2), slots=1)
ONE_POST = Setup(max_faults=0, rooms=(1, 2), posts_per_peer=1)

QUICK = {"without faults", "handshake without faults", "one fault", "two writes that are quiesced"}
"""Worlds outside the slow tests."""


def check(setup: Setup) -> Exploration:
    found = explore(setup)
    assert found.violation is None
    assert found.is_complete
    assert found.num_ends
    return found


@pytest.mark.parametrize("world", slow_except(QUICK, WORLDS))
def test_no_promise_is_broken(world: str) -> None:
    check(WORLDS[world])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "setup",
    [
        Setup(max_faults=0, num_decode=2),
        Setup(max_faults=0, rooms=(1, 2)),
        ONE_SLOT,
        Setup(max_faults=1, num_writes=2, faults=("kill", "doubt", "abort", "fail")),
        Setup(max_faults=1, num_writes=2, slots=1),
        Setup(max_faults=1, posts_per_peer=1, quiesces=True),
        Setup(max_faults=0, num_decode=2, posts_per_peer=1, quiesces=True),
        Setup(max_faults=0, num_writes=2, slots=1, quiesces=True),
        Setup(max_faults=0, num_decode=2, announces=True),
        Setup(max_faults=2),
        Setup(max_faults=2, is_connected=False),
    ],
    ids=[
        "two decode ranks",
        "two rooms",
        "two rooms with one slot",
        "two writes",
        "two writes with one slot",
        "one fault and a quiesce",
        "two decode ranks and a quiesce",
        "two packed writes that are quiesced",
        "two decode ranks that announce",
        "two faults",
        "two faults with the handshake",
    ],
)
def test_no_promise_is_broken_in_larger_worlds(setup: Setup) -> None:
    check(setup)


@pytest.mark.slow
def test_two_rooms_share_a_staging_slot() -> None:
    """Covers what a few seconds allow; the larger worlds cover the rest."""
    found = explore(ONE_SLOT, max_states=1_500)
    assert found.violation is None


def test_faults_add_to_what_can_happen() -> None:
    """Each kind of fault reaches states that are not reached without it."""
    least = check(Setup(max_faults=0))
    for kind in FAULTS:
        if kind != "overtake":  # with one piece there are never two messages in flight in one direction
            found = explore(Setup(max_faults=1, faults=(kind,)), max_states=least.num_states + 1)
            assert found.violation is None
            assert found.num_states > least.num_states, kind


def test_a_walk_stops_where_it_is_told_to() -> None:
    by_states = explore(Setup(), max_states=10)
    assert (by_states.is_complete, by_states.violation) == (False, None)
    assert 10 <= by_states.num_states < 20
    ticks = itertools.count()
    by_time = explore(Setup(), seconds=5, clock=lambda: next(ticks))
    assert (by_time.is_complete, by_time.violation) == (False, None)
    assert by_time.num_states < explore(Setup(), max_states=by_time.num_states + 1).num_states


def taken(world: SmallWorld, *labels: str) -> SmallWorld:
    """Take the first step of each label, in order."""
    for label in labels:
        step_of(world, label).take(world)
    return world


def step_of(world: SmallWorld, label: str) -> Step:
    return next(step for step in world.steps() if step.label == label)


SENT = ("P0 SendOpened", "P0 ChunkOffered", "D0 ReceiveOpened", "('up', 0, 0) Grant")
"""Steps until the only write is in flight."""


def test_a_copy_is_independent_and_has_the_same_fingerprint() -> None:
    world = taken(SmallWorld(Setup()), *SENT)
    copy, before = world.copy(), world.fingerprint()
    assert copy.fingerprint() == before
    taken(copy, "write 0 of P0 ends")
    assert copy.fingerprint() != before
    assert world.fingerprint() == before
    assert world.posts
    assert not copy.posts


def test_the_order_of_what_has_nothing_to_do_with_each_other_does_not_matter() -> None:
    labels = ("P0 SendOpened", "D0 ReceiveOpened")
    one, other = (taken(SmallWorld(Setup()), *order) for order in (labels, labels[::-1]))
    assert one.fingerprint() == other.fingerprint()


def test_a_violation_is_told_with_the_shortest_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def land(world: SmallWorld, number: int) -> None:
        raise AssertionError("landed")

    monkeypatch.setattr(SmallWorld, "land", land)
    found = explore(Setup(max_faults=0))
    assert found.violation == Violation((*SENT, "write 0 of P0 ends"), "AssertionError: landed")
    assert not found.is_complete


def violation_of(setup: Setup) -> str:
    found = explore(setup, max_states=10_000).violation
    assert found is not None
    return found.error


def test_a_slot_that_is_free_as_soon_as_its_write_has_ended_is_written_again_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(self: RemoteSlots, event: ev.PostEnded, now: float) -> None:
        window, use = self._find(event.delivery, event.seq)
        if window is not None and use is not None:
            use.has_ended = use.is_unread = True
            self._review(event.delivery, event.seq)

    monkeypatch.setattr(RemoteSlots, "ended", ended)
    error = violation_of(ONE_SLOT)
    assert "slot is written while it is scattered" in error or "slot is scattered for bytes that it does not" in error


def test_a_local_slot_that_is_free_while_a_write_reads_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rooms are packed into one local slot at the same time; their windows on the decode rank are larger."""
    monkeypatch.setattr(SlotPool, "take_slot", lambda _: 0)
    assert "a slot is packed while a write may read it" in violation_of(ONE_SLOT._replace(slots=2))


@pytest.mark.slow
def test_slots_that_do_not_come_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteSlots, "_unread", lambda *_: None)
    assert "a transfer does not end" in violation_of(ONE_SLOT)


def test_credit_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Window, "end_post", lambda *_: None)
    assert "a transfer fails without any fault" in violation_of(ONE_POST)


def test_two_rooms_wait_for_the_only_post_and_for_the_only_slot() -> None:
    """Otherwise these worlds would not test sharing at all."""
    for setup in (ONE_POST, ONE_SLOT):
        world = taken(SmallWorld(setup), *SENT, "P0 SendOpened", "P0 ChunkOffered", "D0 ReceiveOpened", SENT[-1])
        assert len(world.posts) == 1
        assert len(taken(SmallWorld(Setup(rooms=(1, 2))), *SENT, *SENT).posts) == 2
        taken(world, "write 0 of P0 ends", "D0 NoticeDelivered")
        assert not world.posts


def failed() -> Failure:
    return Failure(FailureReason.ABORTED, Stage.ENQUEUE, "D/0", "given up")


def test_a_world_notices_pages_that_are_given_back_too_early() -> None:
    """All other results rest on the world's own checks."""
    world = taken(SmallWorld(Setup()), *SENT)
    world.received[0, 1] = (Outcome.ABORTED, Memory.SAFE)
    with pytest.raises(PromiseBroken, match="a write lands in pages that were released"):
        taken(world, "write 0 of P0 ends")


def test_a_world_notices_that_a_transfer_fails_for_no_reason() -> None:
    world = taken(SmallWorld(Setup(max_faults=0)), *SENT)
    world.tell("D", 0, ev.ReceiveAborted(1, failed()))
    with pytest.raises(PromiseBroken, match="a transfer fails without any fault"):
        world.check_end()


def test_a_world_notices_that_service_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode rank never finds the restarted incarnation."""
    world = taken(SmallWorld(Setup()), *SENT, "kill P0")
    world.num_faults = 1
    world.copy().check_end()
    dead = world.records
    carry_out = SmallWorld._carry_out_decode

    def carry_out_blindly(world: SmallWorld, number: int, effect: Any, event: Any) -> None:
        if isinstance(effect, ef.LookUp):
            world._add_task("D", number, ev.InstanceFound(effect.instance, dead))
        else:
            carry_out(world, number, effect, event)

    monkeypatch.setattr(SmallWorld, "_carry_out_decode", carry_out_blindly)
    with pytest.raises(PromiseBroken, match="service does not recover"):
        world.check_end()
