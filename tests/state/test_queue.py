"""Whose turn it is: fair between peers, fair between deliveries of a class, and never more than a peer's credit."""

import sys
from collections.abc import Callable, Iterable
from types import FrameType

import pytest
from msgspec.structs import replace

from kvflow.config import NUM_PRIORITIES, Limits
from kvflow.state import queue as queue_module
from kvflow.state.queue import ChunkJob, ChunkQueue, JobEnd
from kvflow.state.slots import SlotPool
from tests.stages.parts import PEERS, delivery, job

Place = tuple[int, int, int]
"""Engine rank of the peer, room, sequence number."""

AGEING_S = 1.0
LOWEST = NUM_PRIORITIES - 1


def place(taken: ChunkJob) -> Place:
    return taken.delivery.peer.rank.engine_rank, taken.delivery.room, taken.seq


def queue_of(
    jobs: Iterable[ChunkJob], *, posts: int = 1_000, num_bytes: int = 1_000, num_rows: int = 1_000
) -> ChunkQueue:
    queue = ChunkQueue(
        Limits(posts_per_peer=posts, bytes_per_peer=num_bytes, rows_per_peer=num_rows), ageing_s=AGEING_S
    )
    for queued in jobs:
        queue.push(queued)
    return queue


def take_all(queue: ChunkQueue, now: float = 0.0) -> list[ChunkJob]:
    taken = []
    while (popped := queue.pop(now)) is not None:
        taken.append(popped)
    return taken


def rooms_of(jobs: Iterable[ChunkJob]) -> list[int]:
    return [taken.delivery.room for taken in jobs]


def test_empty_queue() -> None:
    queue = queue_of([])
    assert (queue.pop(0.0), len(queue)) == (None, 0)


def test_chunks_of_a_delivery_keep_their_order() -> None:
    queue = queue_of(job(delivery(), seq) for seq in (3, 1, 2, 0))
    assert [taken.seq for taken in take_all(queue)] == [3, 1, 2, 0]


def test_peers_take_turns() -> None:
    queue = queue_of(job(delivery(to), seq) for to in PEERS for seq in range(2))
    ranks = [place(taken)[0] for taken in take_all(queue)]
    assert ranks == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("priority", [0, 3, LOWEST])
def test_deliveries_of_a_class_take_turns(priority: int) -> None:
    queue = queue_of(job(delivery(room=room), seq, priority=priority) for room in (5, 6, 7) for seq in range(2))
    assert rooms_of(take_all(queue)) == [5, 6, 7, 5, 6, 7]


@pytest.mark.parametrize("priority", [0, 3, LOWEST])
def test_late_small_transfer_does_not_wait_for_a_long_one_of_its_class(priority: int) -> None:
    """Nor does it matter for how long the other one has waited."""
    queue = queue_of(job(delivery(room=1), seq, priority=priority) for seq in range(100))
    queue.pop(50.0)
    queue.push(job(delivery(room=2), priority=priority, at=60.0))
    assert 2 in rooms_of(taken for taken in (queue.pop(60.0), queue.pop(60.0)) if taken)


def test_peer_with_many_deliveries_gets_no_more_turns() -> None:
    crowd = [job(delivery(PEERS[0], room), seq) for room in range(10) for seq in range(2)]
    queue = queue_of([*crowd, *(job(delivery(PEERS[1]), seq) for seq in range(5))])
    ranks = [place(taken)[0] for taken in take_all(queue)[:10]]
    assert ranks == [0, 1] * 5


# Credit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["posts", "num_bytes", "num_rows"])
def test_credit_bounds_what_is_taken(bound: str) -> None:
    bounds = {"posts": 2, "num_bytes": 20, "num_rows": 20}
    queue = queue_of((job(delivery(), seq, 10, num_rows=10) for seq in range(5)), **{bound: bounds[bound]})
    first, second = take_all(queue)
    assert (first.seq, second.seq, len(queue)) == (0, 1, 3)
    queue.end(second)
    assert [taken.seq for taken in take_all(queue)] == [2]
    queue.end(first)
    assert [taken.seq for taken in take_all(queue)] == [3]


@pytest.mark.parametrize("large", [(5_000, 1), (1, 5_000)], ids=["bytes", "rows"])
def test_job_larger_than_all_credit_goes_alone(large: tuple[int, int]) -> None:
    sizes = [(1_000, 1_000), large, (1_000, 1_000)]
    queue = queue_of(job(delivery(), seq, size, num_rows=rows) for seq, (size, rows) in enumerate(sizes))
    for expected in range(3):
        (taken,) = take_all(queue)
        assert taken.seq == expected
        queue.end(taken)


def test_peer_without_room_does_not_hold_up_others() -> None:
    queue = queue_of((job(delivery(to), seq) for to in PEERS for seq in range(3)), posts=1)
    full = queue.pop(0.0)
    assert full is not None
    others = [queue.pop(0.0), queue.pop(0.0)]
    assert queue.pop(0.0) is None
    for other in others:
        assert other is not None
        queue.end(other)
    assert [place(taken)[0] for taken in take_all(queue)] == [1, 2]
    queue.end(full)
    assert [place(taken) for taken in take_all(queue)] == [(0, 1, 1)]


def test_whoever_waits_for_a_slot_that_will_never_be_free_goes_without() -> None:
    local, remote = SlotPool(1), {to: SlotPool(1) for to in PEERS}
    queue = ChunkQueue(Limits(), AGEING_S, local, remote.get)
    for to in PEERS[:2]:
        queue.push(replace(job(delivery(to)), wants_slot=True))
    (taken,) = take_all(queue)
    assert taken.slots is not None
    queue.end(taken, JobEnd.DOUBTED)
    (other,) = take_all(queue)
    assert (other.delivery.peer, other.slots) == (PEERS[1], None)


def test_large_job_is_not_overtaken_by_smaller_ones_of_its_class() -> None:
    """Credit comes back one by one, so that only a smaller job would fit; all of it is saved up for the large one."""
    queue = queue_of((job(delivery(room=room), 0, 25) for room in range(4)), num_bytes=100)
    under_way = take_all(queue)
    queue.push(job(delivery(room=50), 0, 80))
    others = [job(delivery(room=51), 0, 1), job(delivery(PEERS[1], room=52), 0, 1)]
    for other in others:
        queue.push(other)
    assert rooms_of(take_all(queue)) == [52]
    for ended in under_way[:3]:
        queue.end(ended)
        assert queue.pop(0.0) is None
    queue.end(under_way[3])
    assert rooms_of(take_all(queue)) == [50, 51]


def test_job_that_does_not_fit_gives_way_when_its_transfer_is_dropped() -> None:
    queue = queue_of([job(delivery(room=1), 0, 60)], num_bytes=100)
    queue.pop(0.0)
    queue.push(job(delivery(room=2), 0, 50))
    queue.push(job(delivery(room=3), 0, 40))
    assert queue.pop(0.0) is None
    queue.drop(delivery(room=2))
    assert rooms_of(take_all(queue)) == [3]


def test_drop_forgets_one_delivery_only() -> None:
    rooms = [(1, 0), (2, 0), (1, 1), (2, 1)]
    queue = queue_of(job(delivery(room=room), seq) for room, seq in rooms)
    dropped = [delivery(room=1), delivery(room=1), delivery(room=99), delivery(PEERS[2], room=2)]
    assert [queue.drop(one) for one in dropped] == [2, 0, 0, 0]
    assert len(queue) == 2
    assert [place(taken) for taken in take_all(queue)] == [(0, 2, 0), (0, 2, 1)]


def test_credit_of_a_dropped_delivery_comes_back_with_its_end_only() -> None:
    queue = queue_of([job(delivery(room=1), 0), job(delivery(room=1), 1), job(delivery(room=2))], posts=1)
    taken = queue.pop(0.0)
    assert taken is not None
    queue.drop(delivery(room=1))
    assert (queue.pop(0.0), len(queue)) == (None, 1)
    queue.end(taken)
    assert [place(taken) for taken in take_all(queue)] == [(0, 2, 0)]


def test_nothing_is_kept_for_peers_that_are_served() -> None:
    queue = queue_of(job(delivery(to, room), priority=room) for to in PEERS for room in range(3))
    queue.drop(delivery(PEERS[0], 2))
    for taken in take_all(queue):
        queue.end(taken)
    assert not queue._lanes
    assert not queue._windows
    assert not queue._candidates


# Priority ----------------------------------------------------------------------------------------------------------


def test_classes_go_in_order() -> None:
    queue = queue_of(job(delivery(room=7 - priority), priority=priority) for priority in (4, 0, 7, 2, 5, 1, 6, 3))
    assert rooms_of(take_all(queue)) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_higher_class_overtakes_all_that_wait() -> None:
    queue = queue_of(job(delivery(room=room), seq, priority=1) for room in (1, 2) for seq in range(10))
    queue.pop(0.0)
    for seq in range(3):
        queue.push(job(delivery(room=9), seq, at=0.5))
    assert rooms_of(take_all(queue, 0.6))[:4] == [9, 9, 9, 2]


@pytest.mark.parametrize("priority", range(1, NUM_PRIORITIES))
def test_waiting_lifts_a_job_by_one_class_after_another(priority: int) -> None:
    """It is overtaken by what comes before it has been lifted, and by nothing that comes later."""
    for higher in range(priority):
        lifted_at = (priority - higher) * AGEING_S
        for at, expected in ((lifted_at - 0.1, [2, 1]), (lifted_at + 0.1, [1, 2])):
            queue = queue_of([job(delivery(room=1), priority=priority, at=0.0)])
            queue.push(job(delivery(room=2), priority=higher, at=at))
            assert rooms_of(take_all(queue, at)) == expected


def test_lowest_class_takes_turns_with_the_highest_once_it_is_lifted() -> None:
    """A stream of the highest class that fills all credit starves nobody."""
    queue = queue_of((job(delivery(room=1), seq, priority=LOWEST) for seq in range(50)), posts=1)
    served = []
    for step in range(100):
        now = 0.1 * step
        queue.push(job(delivery(room=2), step, at=now))
        taken = queue.pop(now)
        assert taken is not None
        served.append(taken.delivery.room)
        queue.end(taken)
    num_alone = round(LOWEST * AGEING_S / 0.1)
    assert served[:num_alone] == [2] * num_alone
    assert sorted(served[num_alone:]) == [1] * 15 + [2] * 15
    assert [1, 1] not in [served[at : at + 2] for at in range(99)]


def test_backlog_that_is_lifted_does_not_shut_the_highest_class_out() -> None:
    queue = queue_of(job(delivery(room=1), seq, priority=LOWEST) for seq in range(10))
    queue.pop(100.0)
    for seq in range(5):
        queue.push(job(delivery(room=2), seq, at=100.0))
    assert rooms_of(take_all(queue, 100.0))[:10] == [1, 2] * 5


def test_blocked_large_job_is_overtaken_by_a_higher_class_for_a_bounded_time_only() -> None:
    queue = queue_of([job(delivery(room=1), 0, 60)], num_bytes=100)
    under_way = queue.pop(0.0)
    assert under_way is not None
    queue.push(job(delivery(room=2), 0, 90, priority=2, at=0.0))
    queue.push(job(delivery(room=3), 0, 10, at=1.9))
    assert rooms_of(take_all(queue, 1.9)) == [3]
    queue.push(job(delivery(room=4), 0, 10, at=2.1))
    assert queue.pop(100.0) is None


# Work --------------------------------------------------------------------------------------------------------------


def steps_of(act: Callable[[], object]) -> int:
    """How many lines of the queue's module something runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        if frame.f_code.co_filename != queue_module.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def steps_of_a_turn(num_deliveries: int) -> list[int]:
    """Lines that a few turns of a queue take, credit that comes back included."""
    every_class = (
        job(delivery(room=room), seq, priority=room % NUM_PRIORITIES)
        for room in range(num_deliveries)
        for seq in (0, 1)
    )
    queue = queue_of(every_class, posts=1)

    def turn() -> None:
        taken = queue.pop(1.0)
        assert taken is not None
        queue.end(taken)

    return [steps_of(turn) for _ in range(20)]


def test_a_turn_costs_the_same_however_many_wait() -> None:
    few, many = steps_of_a_turn(100), steps_of_a_turn(10_000)
    assert few == many
    assert max(few) > 10
