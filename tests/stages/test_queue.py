"""Whose turn it is: fair between peers, fair between deliveries, and never more than a peer's credit."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.config import Limits
from kvflow.stages.enqueue import ChunkJob, ChunkQueue
from kvflow.state.events import DeliveryId
from kvflow.wire.messages import PeerId
from tests.stages.parts import PEERS, delivery, job

Place = tuple[int, int, int]
"""Engine rank of the peer, room, sequence number."""


def place(taken: ChunkJob) -> Place:
    return taken.delivery.peer.rank.engine_rank, taken.delivery.room, taken.seq


def queue_of(jobs: Iterable[ChunkJob], posts: int = 1_000, num_bytes: int = 1_000) -> ChunkQueue:
    queue = ChunkQueue(Limits(posts_per_peer=posts, bytes_per_peer=num_bytes))
    for queued in jobs:
        queue.push(queued)
    return queue


def take_all(queue: ChunkQueue) -> list[ChunkJob]:
    taken = []
    while (popped := queue.pop()) is not None:
        taken.append(popped)
    return taken


def test_empty_queue() -> None:
    queue = queue_of([])
    assert (queue.pop(), len(queue)) == (None, 0)


def test_chunks_of_a_delivery_keep_their_order() -> None:
    queue = queue_of(job(delivery(), seq) for seq in (3, 1, 2, 0))
    assert [taken.seq for taken in take_all(queue)] == [3, 1, 2, 0]


def test_peers_take_turns() -> None:
    queue = queue_of(job(delivery(to), seq) for to in PEERS for seq in range(2))
    assert [place(taken) for taken in take_all(queue)] == [
        (0, 1, 0),
        (1, 1, 0),
        (2, 1, 0),
        (0, 1, 1),
        (1, 1, 1),
        (2, 1, 1),
    ]


def test_deliveries_to_one_peer_take_turns() -> None:
    queue = queue_of(job(delivery(room=room), seq) for room in (5, 6, 7) for seq in range(2))
    rooms = [taken.delivery.room for taken in take_all(queue)]
    assert rooms == [5, 6, 7, 5, 6, 7]


def test_late_small_transfer_does_not_wait_for_a_long_one() -> None:
    queue = queue_of(job(delivery(room=1), seq) for seq in range(100))
    queue.pop()
    queue.push(job(delivery(room=2)))
    assert delivery(room=2) in [taken.delivery for taken in (queue.pop(), queue.pop()) if taken]


def test_peer_with_many_deliveries_gets_no_more_turns() -> None:
    crowd = [job(delivery(PEERS[0], room), seq) for room in range(10) for seq in range(2)]
    queue = queue_of([*crowd, *(job(delivery(PEERS[1]), seq) for seq in range(5))])
    ranks = [place(taken)[0] for taken in take_all(queue)[:10]]
    assert ranks == [0, 1] * 5


@pytest.mark.parametrize(("posts", "num_bytes"), [(2, 1_000), (1_000, 20)], ids=["posts", "bytes"])
def test_credit_bounds_what_is_taken(posts: int, num_bytes: int) -> None:
    queue = queue_of((job(delivery(), seq, 10) for seq in range(5)), posts, num_bytes)
    first, second = take_all(queue)
    assert (first.seq, second.seq, len(queue)) == (0, 1, 3)
    queue.end(second)
    assert [taken.seq for taken in take_all(queue)] == [2]
    queue.end(first)
    assert [taken.seq for taken in take_all(queue)] == [3]


def test_job_larger_than_all_credit_goes_alone() -> None:
    queue = queue_of((job(delivery(), seq, size) for seq, size in enumerate([1, 5_000, 1])), num_bytes=1_000)
    for expected in range(3):
        (taken,) = take_all(queue)
        assert taken.seq == expected
        queue.end(taken)


def test_peer_without_room_does_not_hold_up_others() -> None:
    queue = queue_of((job(delivery(to), seq) for to in PEERS for seq in range(3)), posts=1)
    full = queue.pop()
    assert full is not None
    others = [queue.pop(), queue.pop()]
    assert queue.pop() is None
    for other in others:
        assert other is not None
        queue.end(other)
    assert [place(taken)[0] for taken in take_all(queue)] == [1, 2]
    queue.end(full)
    assert [place(taken) for taken in take_all(queue)] == [(0, 1, 1)]


def test_drop_forgets_one_delivery_only() -> None:
    rooms = [(1, 0), (2, 0), (1, 1), (2, 1)]
    queue = queue_of(job(delivery(room=room), seq) for room, seq in rooms)
    queue.drop(delivery(room=1))
    queue.drop(delivery(room=1))
    queue.drop(delivery(room=99))
    queue.drop(delivery(PEERS[2], room=2))
    assert len(queue) == 2
    assert [place(taken) for taken in take_all(queue)] == [(0, 2, 0), (0, 2, 1)]


def test_credit_of_a_dropped_delivery_comes_back_with_its_end_only() -> None:
    queue = queue_of([job(delivery(room=1), 0), job(delivery(room=1), 1), job(delivery(room=2))], posts=1)
    taken = queue.pop()
    assert taken is not None
    queue.drop(delivery(room=1))
    assert (queue.pop(), len(queue)) == (None, 1)
    queue.end(taken)
    assert [place(taken) for taken in take_all(queue)] == [(0, 2, 0)]


def test_nothing_is_kept_for_peers_that_are_served() -> None:
    queue = queue_of(job(delivery(to, room)) for to in PEERS for room in range(3))
    for taken in take_all(queue):
        queue.end(taken)
    assert not queue._jobs
    assert not queue._windows


MAX_POSTS, MAX_BYTES = 3, 10


@dataclass
class Model:
    """One flat list, and for each peer and delivery the time since when it waits for its turn."""

    jobs: list[ChunkJob] = field(default_factory=list)
    taken: list[ChunkJob] = field(default_factory=list)
    since: dict[PeerId | DeliveryId, int] = field(default_factory=dict)
    clock: int = 0

    def push(self, new: ChunkJob) -> None:
        waiting = {key for queued in self.jobs for key in (queued.delivery, queued.delivery.peer)}
        for key in (new.delivery, new.delivery.peer):
            if key not in waiting:
                self._to_the_end(key)
        self.jobs.append(new)

    def pop(self) -> ChunkJob | None:
        firsts = [self._first(to) for to in {queued.delivery.peer for queued in self.jobs}]
        fitting = [first for first in firsts if self._has_room(first)]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda first: self.since[first.delivery.peer])
        self.jobs.remove(chosen)
        self.taken.append(chosen)
        self._to_the_end(chosen.delivery)
        self._to_the_end(chosen.delivery.peer)
        return chosen

    def drop(self, dropped: DeliveryId) -> None:
        self.jobs = [queued for queued in self.jobs if queued.delivery != dropped]

    def _first(self, to: PeerId) -> ChunkJob:
        return min((queued for queued in self.jobs if queued.delivery.peer == to), key=lambda q: self.since[q.delivery])

    def _has_room(self, first: ChunkJob) -> bool:
        sizes = [taken.num_bytes for taken in self.taken if taken.delivery.peer == first.delivery.peer]
        return not sizes or (len(sizes) < MAX_POSTS and sum(sizes) + first.num_bytes <= MAX_BYTES)

    def _to_the_end(self, key: PeerId | DeliveryId) -> None:
        self.clock += 1
        self.since[key] = self.clock


deliveries = st.builds(delivery, st.sampled_from(PEERS), st.integers(1, 3))
pushes = st.tuples(st.just("push"), deliveries, st.integers(0, 12))
pops = st.tuples(st.just("pop"), deliveries, st.just(0))
ends = st.tuples(st.just("end"), deliveries, st.integers(0, 100))
drops = st.tuples(st.just("drop"), deliveries, st.just(0))


@settings(max_examples=300, deadline=None)
@given(st.lists(pushes | pops | pushes | pops | ends | drops, max_size=60))
def test_queue_is_its_model(history: list[tuple[str, DeliveryId, int]]) -> None:
    queue, model = queue_of([], MAX_POSTS, MAX_BYTES), Model()
    for seq, (kind, of, number) in enumerate(history):
        match kind:
            case "push":
                new = job(of, seq, number)
                queue.push(new)
                model.push(new)
            case "pop":
                assert queue.pop() == model.pop()
            case "drop":
                queue.drop(of)
                model.drop(of)
            case "end" if model.taken:
                queue.end(model.taken.pop(number % len(model.taken)))
        assert len(queue) == len(model.jobs)
