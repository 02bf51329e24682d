"""The order of turns: fair between peers, fair between deliveries of a class, and never beyond a peer's credit."""

from collections import deque
from collections.abc import Iterable, Sequence

import pytest

from kvflow.bounds import Bounds
from kvflow.config import NUM_PRIORITIES, Timeouts
from kvflow.room import RoomId
from kvflow.state.effects import Piece
from kvflow.state.events import DeliveryId
from kvflow.state.prefill.deadlines import PrefillTimer
from kvflow.state.prefill.peers import DecodePeers
from kvflow.state.prefill.queue import PAUSE_PER_PIECE, PieceEnd, PieceQueue, Turn
from kvflow.state.prefill.slots import RemoteSlots, SlotPool
from kvflow.state.timers import Timers
from kvflow.wire.messages import PeerId, StagingWindow
from tests.support.cores import peer
from tests.support.sending import PEERS, piece
from tests.support.sending import delivery as delivery_of
from tests.support.steps import num_steps

Queued = tuple[Piece, float]
"""A piece, and when it is queued."""

Place = tuple[int, RoomId, int]
"""Engine rank of the peer, room, sequence number."""

AGEING_S = 1.0
LOWEST = NUM_PRIORITIES - 1


def delivery(to: PeerId = PEERS[0], room: int = 1) -> DeliveryId:
    return delivery_of(to, room)


def job(
    of: DeliveryId, seq: int = 0, num_bytes: int = 1, *, num_descriptors: int = 1, priority: int = 0, at: float = 0.0
) -> Queued:
    return piece(of, seq, num_bytes, num_descriptors=num_descriptors, priority=priority), at


def push(queue: PieceQueue, queued: Queued, *, wants_slot: bool = False) -> None:
    waiting, now = queued
    queue.expect(waiting.delivery.peer)
    queue.push(waiting, now, wants_slot=wants_slot)


def end(queue: PieceQueue, taken: Piece, how: PieceEnd = PieceEnd.ENDED, at: float = 0.0) -> None:
    queue.end_piece(taken.delivery, taken.seq, how, at)


def place(taken: Piece) -> Place:
    return taken.delivery.peer.rank.engine_rank, taken.delivery.room, taken.seq


def queue_of(
    jobs: Iterable[Queued], *, posts: int = 1_000, num_bytes: int = 1_000, num_descriptors: int = 1_000
) -> PieceQueue:
    queue = PieceQueue(
        Bounds(posts_per_peer=posts, bytes_per_peer=num_bytes, descriptors_per_peer=num_descriptors, ageing_s=AGEING_S)
    )
    for queued in jobs:
        push(queue, queued)
    return queue


def take_all(queue: PieceQueue, now: float = 0.0) -> list[Piece]:
    taken = []
    while (popped := queue.pop(now)) is not None:
        taken.append(popped)
    return taken


def rooms_of(jobs: Iterable[Piece]) -> list[RoomId]:
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
    """This holds however long the other transfer has waited."""
    queue = queue_of(job(delivery(room=1), seq, priority=priority) for seq in range(100))
    queue.pop(50.0)
    push(queue, job(delivery(room=2), priority=priority, at=60.0))
    assert 2 in rooms_of(taken for taken in (queue.pop(60.0), queue.pop(60.0)) if taken)


def test_peer_with_many_deliveries_gets_no_more_turns() -> None:
    crowd = [job(delivery(PEERS[0], room), seq) for room in range(10) for seq in range(2)]
    queue = queue_of([*crowd, *(job(delivery(PEERS[1]), seq) for seq in range(5))])
    ranks = [place(taken)[0] for taken in take_all(queue)[:10]]
    assert ranks == [0, 1] * 5


# Credit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["posts", "num_bytes", "num_descriptors"])
def test_credit_bounds_what_is_taken(bound: str) -> None:
    bounds = {"posts": 2, "num_bytes": 20, "num_descriptors": 20}
    queue = queue_of((job(delivery(), seq, 10, num_descriptors=10) for seq in range(5)), **{bound: bounds[bound]})
    first, second = take_all(queue)
    assert (first.seq, second.seq, len(queue)) == (0, 1, 3)
    end(queue, second)
    assert [taken.seq for taken in take_all(queue)] == [2]
    end(queue, first)
    assert [taken.seq for taken in take_all(queue)] == [3]


@pytest.mark.parametrize("large", [(5_000, 1), (1, 5_000)], ids=["bytes", "descriptors"])
def test_job_larger_than_all_credit_goes_alone(large: tuple[int, int]) -> None:
    sizes = [(1_000, 1_000), large, (1_000, 1_000)]
    queue = queue_of(job(delivery(), seq, size, num_descriptors=count) for seq, (size, count) in enumerate(sizes))
    for expected in range(3):
        (taken,) = take_all(queue)
        assert taken.seq == expected
        end(queue, taken)


def test_peer_without_room_does_not_hold_up_others() -> None:
    queue = queue_of((job(delivery(to), seq) for to in PEERS for seq in range(3)), posts=1)
    full = queue.pop(0.0)
    assert full is not None
    others = [queue.pop(0.0), queue.pop(0.0)]
    assert queue.pop(0.0) is None
    for other in others:
        assert other is not None
        end(queue, other)
    assert [place(taken)[0] for taken in take_all(queue)] == [1, 2]
    end(queue, full)
    assert [place(taken) for taken in take_all(queue)] == [(0, 1, 1)]


def slots_of(num_slots: int, peers: Sequence[PeerId] = PEERS) -> RemoteSlots:
    """Return staging slots at every peer."""
    timers: Timers[PrefillTimer] = Timers()
    slots = RemoteSlots(DecodePeers(timers, 100), Timeouts(), timers, lambda _: None)
    for to in peers:
        slots.connected(to, StagingWindow(4096, 64, num_slots), 0.0)
    return slots


def test_a_piece_that_waits_for_a_slot_that_will_never_be_free_goes_without() -> None:
    queue = PieceQueue(Bounds(ageing_s=AGEING_S), SlotPool(1), slots_of(1))
    for to in PEERS[:2]:
        push(queue, job(delivery(to)), wants_slot=True)
    (taken,) = take_all(queue)
    assert taken.slots is not None
    end(queue, taken, PieceEnd.IN_DOUBT)
    (other,) = take_all(queue)
    assert (other.delivery.peer, other.slots) == (PEERS[1], None)


def test_a_packed_piece_takes_one_descriptor_of_the_credit() -> None:
    queue = PieceQueue(Bounds(descriptors_per_peer=2, ageing_s=AGEING_S), SlotPool(3), slots_of(3))
    for seq in range(3):
        push(queue, job(delivery(), seq, num_descriptors=1_000), wants_slot=True)
    assert [taken.seq for taken in take_all(queue)] == [0, 1]


def test_slots_of_a_piece_that_goes_directly_are_free_for_the_next_one() -> None:
    queue = PieceQueue(Bounds(ageing_s=AGEING_S), SlotPool(1), slots_of(1))
    for seq in range(2):
        push(queue, job(delivery(), seq), wants_slot=True)
    (first,) = take_all(queue)
    queue.release_slots(first.delivery, first.seq)
    (second,) = take_all(queue)
    assert second.slots == first.slots
    end(queue, first)
    end(queue, second)
    assert len(queue._under_way) == 0


@pytest.mark.parametrize("how", PieceEnd)
def test_peers_that_wait_for_a_local_slot_get_it_in_order(how: PieceEnd) -> None:
    """If the slot is lost, all of them go without one."""
    queue = PieceQueue(Bounds(ageing_s=AGEING_S), SlotPool(1), slots_of(2))
    for seq in range(2):
        for to in PEERS:
            push(queue, job(delivery(to), seq), wants_slot=True)
    ranks = []
    while taken := take_all(queue):
        ranks += [place(one)[0] for one in taken]
        for one in taken:
            if how is not PieceEnd.IN_DOUBT or one.slots is not None:
                end(queue, one, how)
    in_order = [0, 1, 2] * 2
    assert sorted(ranks) == sorted(in_order)
    assert how is PieceEnd.IN_DOUBT or ranks == in_order
    assert len(queue) == 0
    assert not queue.lanes.without_slot


def test_a_peer_that_cannot_use_a_local_slot_does_not_keep_it_from_others() -> None:
    queue = PieceQueue(Bounds(posts_per_peer=1, ageing_s=AGEING_S), SlotPool(2), slots_of(1))
    taken = {}
    for to in (PEERS[0], PEERS[2]):
        push(queue, job(delivery(to)), wants_slot=True)
        (taken[to],) = take_all(queue)
    for to in PEERS[:2]:
        push(queue, job(delivery(to), 1), wants_slot=True)  # the window of the first one is full
    assert take_all(queue) == []
    end(queue, taken[PEERS[2]])
    assert [place(one)[0] for one in take_all(queue)] == [1]


def test_a_piece_that_may_not_be_taken_keeps_its_turn() -> None:
    queue = queue_of(job(delivery(to)) for to in PEERS[:2])
    asked: list[Place] = []

    def turn(waiting: Piece, is_packed: bool) -> Turn:
        asked.append(place(waiting))
        assert not is_packed
        return Turn.OVER

    assert queue.pop(0.0, turn) is None
    assert queue.pop(0.0, turn) is None
    assert asked == [(0, 1, 0), (0, 1, 0)]
    assert [place(taken) for taken in take_all(queue)] == [(0, 1, 0), (1, 1, 0)]


def test_deferred_peers_let_others_go_on_and_are_resumed_in_order() -> None:
    queue = queue_of(job(delivery(to), seq) for to in PEERS[:3] for seq in range(2))
    asked: list[PeerId] = []

    def turn(waiting: Piece, is_packed: bool) -> Turn:
        asked.append(waiting.delivery.peer)
        return Turn.TAKEN if waiting.delivery.peer == PEERS[2] else Turn.DEFERRED

    for seq in range(2):
        taken = queue.pop(0.0, turn)
        assert taken is not None
        assert (taken.delivery.peer, taken.seq) == (PEERS[2], seq)
    assert queue.pop(0.0, turn) is None
    assert asked == [*PEERS[:2], PEERS[2], PEERS[2]], "nobody is asked twice while it is deferred"
    queue.drop(delivery(PEERS[0]))
    assert queue.resume()
    assert not queue.resume()
    resumed = queue.pop(0.0)
    assert resumed is not None
    assert resumed.delivery.peer == PEERS[1]


def test_a_post_in_doubt_gives_its_credit_back_once() -> None:
    queue = queue_of((job(delivery(), seq) for seq in range(3)), posts=1)
    (first,) = take_all(queue)
    end(queue, first, PieceEnd.IN_DOUBT)
    assert queue.is_in_doubt(first.delivery, first.seq)
    (second,) = take_all(queue)
    end(queue, first)
    assert take_all(queue) == []
    end(queue, second)
    assert [taken.seq for taken in take_all(queue)] == [2]


# Capacity ----------------------------------------------------------------------------------------------------------


def test_capacity_counts_pieces_that_wait_for_their_data_too() -> None:
    queue = PieceQueue(Bounds(queued_chunks=2, ageing_s=AGEING_S))
    queue.expect(PEERS[0])
    assert not queue.full
    queue.expect(PEERS[0])
    assert list(queue.full) == PEERS[:1]
    assert len(queue) == 2


def test_freed_capacity_is_said_only_where_there_was_none() -> None:
    queue = PieceQueue(Bounds(queued_chunks=2, ageing_s=AGEING_S))
    queue.expect(PEERS[0])
    queue.stop_expecting(PEERS[0], 1)
    assert not queue.has_freed_capacity
    for seq in range(3):
        push(queue, job(delivery(), seq))
    queue.pop(0.0)
    assert not queue.has_freed_capacity, "two wait, which is as many as may"
    queue.pop(0.0)
    assert queue.has_freed_capacity


def test_large_job_is_not_overtaken_by_smaller_ones_of_its_class() -> None:
    """Credit comes back in small amounts that would fit only the smaller job; all of it is saved for the large one."""
    queue = queue_of((job(delivery(room=room), 0, 25) for room in range(4)), num_bytes=100)
    under_way = take_all(queue)
    push(queue, job(delivery(room=50), 0, 80))
    others = [job(delivery(room=51), 0, 1), job(delivery(PEERS[1], room=52), 0, 1)]
    for other in others:
        push(queue, other)
    assert rooms_of(take_all(queue)) == [52]
    for ended in under_way[:3]:
        end(queue, ended)
        assert queue.pop(0.0) is None
    end(queue, under_way[3])
    assert rooms_of(take_all(queue)) == [50, 51]


def test_job_that_does_not_fit_gives_way_when_its_transfer_is_dropped() -> None:
    queue = queue_of([job(delivery(room=1), 0, 60)], num_bytes=100)
    queue.pop(0.0)
    push(queue, job(delivery(room=2), 0, 50))
    push(queue, job(delivery(room=3), 0, 40))
    assert queue.pop(0.0) is None
    queue.drop(delivery(room=2))
    assert rooms_of(take_all(queue)) == [3]


def drop(queue: PieceQueue, of: DeliveryId) -> int:
    """Drop a delivery; return how many of its pieces were waiting."""
    before = len(queue)
    queue.drop(of)
    return before - len(queue)


def test_drop_forgets_one_delivery_only() -> None:
    rooms = [(1, 0), (2, 0), (1, 1), (2, 1)]
    queue = queue_of(job(delivery(room=room), seq) for room, seq in rooms)
    dropped = [delivery(room=1), delivery(room=1), delivery(room=99), delivery(PEERS[2], room=2)]
    assert [drop(queue, one) for one in dropped] == [2, 0, 0, 0]
    assert len(queue) == 2
    assert [place(taken) for taken in take_all(queue)] == [(0, 2, 0), (0, 2, 1)]


def test_credit_of_a_dropped_delivery_comes_back_with_its_end_only() -> None:
    queue = queue_of([job(delivery(room=1), 0), job(delivery(room=1), 1), job(delivery(room=2))], posts=1)
    taken = queue.pop(0.0)
    assert taken is not None
    queue.drop(delivery(room=1))
    assert (queue.pop(0.0), len(queue)) == (None, 1)
    end(queue, taken)
    assert [place(taken) for taken in take_all(queue)] == [(0, 2, 0)]


def test_nothing_is_kept_for_peers_that_are_served() -> None:
    queue = queue_of(job(delivery(to, room), priority=room) for to in PEERS for room in range(3))
    queue.drop(delivery(PEERS[0], 2))
    for taken in take_all(queue):
        end(queue, taken)
    assert not queue._windows
    assert not queue._num_waiting
    assert not queue._under_way
    lanes = queue.lanes
    assert not any((lanes.by_peer, lanes.candidates, lanes.deferred, lanes.without_slot))


# Priority ----------------------------------------------------------------------------------------------------------


def test_classes_go_in_order() -> None:
    queue = queue_of(job(delivery(room=7 - priority), priority=priority) for priority in (4, 0, 7, 2, 5, 1, 6, 3))
    assert rooms_of(take_all(queue)) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_higher_class_overtakes_all_that_wait() -> None:
    queue = queue_of(job(delivery(room=room), seq, priority=1) for room in (1, 2) for seq in range(10))
    queue.pop(0.0)
    for seq in range(3):
        push(queue, job(delivery(room=9), seq, at=0.5))
    assert rooms_of(take_all(queue, 0.6))[:4] == [9, 9, 9, 2]


@pytest.mark.parametrize("priority", range(1, NUM_PRIORITIES))
def test_waiting_lifts_a_job_by_one_class_after_another(priority: int) -> None:
    """Higher classes overtake it until it is lifted to their level, and never afterwards."""
    for higher in range(priority):
        lifted_at = (priority - higher) * AGEING_S
        for at, expected in ((lifted_at - 0.1, [2, 1]), (lifted_at + 0.1, [1, 2])):
            queue = queue_of([job(delivery(room=1), priority=priority, at=0.0)])
            push(queue, job(delivery(room=2), priority=higher, at=at))
            assert rooms_of(take_all(queue, at)) == expected


def test_lowest_class_takes_turns_with_the_highest_once_it_is_lifted() -> None:
    """A stream of the highest class that fills all credit does not starve the lowest."""
    queue = queue_of((job(delivery(room=1), seq, priority=LOWEST) for seq in range(50)), posts=1)
    served = []
    for step in range(100):
        now = 0.1 * step
        push(queue, job(delivery(room=2), step, at=now))
        taken = queue.pop(now)
        assert taken is not None
        served.append(taken.delivery.room)
        end(queue, taken)
    num_alone = round(LOWEST * AGEING_S / 0.1)
    assert served[:num_alone] == [2] * num_alone
    assert sorted(served[num_alone:]) == [1] * 15 + [2] * 15
    assert [1, 1] not in [served[at : at + 2] for at in range(99)]


def test_backlog_that_is_lifted_does_not_shut_the_highest_class_out() -> None:
    queue = queue_of(job(delivery(room=1), seq, priority=LOWEST) for seq in range(10))
    queue.pop(100.0)
    for seq in range(5):
        push(queue, job(delivery(room=2), seq, at=100.0))
    assert rooms_of(take_all(queue, 100.0))[:10] == [1, 2] * 5


def test_blocked_large_job_is_overtaken_by_a_higher_class_for_a_bounded_time_only() -> None:
    queue = queue_of([job(delivery(room=1), 0, 60)], num_bytes=100)
    under_way = queue.pop(0.0)
    assert under_way is not None
    push(queue, job(delivery(room=2), 0, 90, priority=2, at=0.0))
    push(queue, job(delivery(room=3), 0, 10, at=1.9))
    assert rooms_of(take_all(queue, 1.9)) == [3]
    push(queue, job(delivery(room=4), 0, 10, at=2.1))
    assert queue.pop(100.0) is None


# Work --------------------------------------------------------------------------------------------------------------


def steps_of_a_turn(num_deliveries: int) -> list[int]:
    """Return how many steps a few turns of a queue take, including returned credit."""
    every_class = (
        job(delivery(room=room), seq, priority=room % NUM_PRIORITIES)
        for room in range(num_deliveries)
        for seq in (0, 1)
    )
    queue = queue_of(every_class, posts=1)

    def turn() -> None:
        taken = queue.pop(1.0)
        assert taken is not None
        end(queue, taken)

    return [num_steps(turn) for _ in range(20)]


def test_a_turn_costs_the_same_however_many_wait() -> None:
    few, many = steps_of_a_turn(100), steps_of_a_turn(10_000)
    assert max(many) < 1.1 * min(few)


def steps_of_a_slot(num_peers: int) -> list[int]:
    """Return how many steps a few turns take while all peers wait for the only local slot."""
    peers = [peer("decode", number) for number in range(num_peers)]
    queue = PieceQueue(Bounds(ageing_s=AGEING_S), SlotPool(1), slots_of(1, peers))
    for to in peers:
        push(queue, job(delivery(to)), wants_slot=True)
    take_all(queue)
    under_way = deque(queue._under_way)

    def turn() -> None:
        queue.end_piece(*under_way.popleft(), PieceEnd.ENDED, 0.0)
        (taken,) = take_all(queue)
        under_way.append((taken.delivery, taken.seq))

    return [num_steps(turn) for _ in range(20)]


def test_a_free_slot_costs_the_same_however_many_peers_wait_for_it() -> None:
    few, many = steps_of_a_slot(30), steps_of_a_slot(300)
    assert max(many) < 1.1 * min(few)


def background_queue(*others: Queued, in_background: int = 2) -> PieceQueue:
    """Return a queue with pieces in the background for one peer, and then others."""
    queue = queue_of(())
    for seq in range(in_background):
        push(queue, (piece(delivery(PEERS[0], room=9), seq, is_background=True), 0.0))
    for other in others:
        push(queue, other)
    return queue


def test_pieces_in_the_background_come_after_all_others_and_one_at_a_time() -> None:
    queue = background_queue(job(delivery(PEERS[0])), job(delivery(PEERS[1]), priority=LOWEST))
    first, second, third = take_all(queue)
    assert [place(taken) for taken in (first, second, third)] == [(0, 1, 0), (1, 1, 0), (0, 9, 0)]
    assert queue.pop(0.0) is None
    end(queue, third)
    assert [place(taken) for taken in take_all(queue)] == [(0, 9, 1)]


def test_pieces_in_the_background_follow_one_another_while_nothing_else_is_sent() -> None:
    queue = background_queue(in_background=3)
    for seq in range(3):
        (taken,) = take_all(queue, float(seq))
        assert place(taken) == (0, 9, seq)
        end(queue, taken, at=seq + 1.0)


def test_pieces_in_the_background_pause_beside_others() -> None:
    queue = background_queue(job(delivery(PEERS[1])))
    _, taken = take_all(queue, 1.0)
    end(queue, taken, at=2.0)
    pause_s = PAUSE_PER_PIECE * 1.0
    assert queue.pop(2.0 + pause_s - 0.1) is None
    assert [place(taken) for taken in take_all(queue, 2.0 + pause_s)] == [(0, 9, 1)]


def test_pieces_in_the_background_go_on_when_the_others_have_ended() -> None:
    queue = background_queue(job(delivery(PEERS[1])))
    other, taken = take_all(queue, 1.0)
    end(queue, taken, at=2.0)
    assert queue.pop(2.0) is None
    end(queue, other, at=3.0)
    assert [place(taken) for taken in take_all(queue, 3.0)] == [(0, 9, 1)]


def test_a_piece_in_the_background_that_is_in_doubt_makes_way_for_the_next() -> None:
    queue = background_queue()
    (taken,) = take_all(queue)
    end(queue, taken, PieceEnd.IN_DOUBT)
    assert [place(taken) for taken in take_all(queue)] == [(0, 9, 1)]
    end(queue, taken)
    assert queue.pop(0.0) is None


def test_a_piece_in_the_background_waits_for_credit_of_its_peer() -> None:
    queue = queue_of([job(delivery(PEERS[0]))], posts=1)
    push(queue, (piece(delivery(PEERS[0], room=9), is_background=True), 0.0))
    (other,) = take_all(queue)
    end(queue, other)
    assert [place(taken) for taken in take_all(queue)] == [(0, 9, 0)]
