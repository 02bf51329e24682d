"""Whatever is pushed, popped, ended and dropped, and whenever: credit adds up, and every promise about turns holds."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.config import NUM_PRIORITIES, Limits
from kvflow.state.events import DeliveryId
from kvflow.state.queue import ChunkJob, ChunkQueue
from kvflow.state.window import Cost
from kvflow.wire.messages import PeerId
from tests.stages.parts import PEERS, delivery, job

AGEING_S = 1.0
MAX_POSTS, MAX_BYTES, MAX_ROWS = 3, 10, 12
LIMITS = Limits(posts_per_peer=MAX_POSTS, bytes_per_peer=MAX_BYTES, rows_per_peer=MAX_ROWS)

peers = st.sampled_from(PEERS)
deliveries = st.builds(delivery, peers, st.integers(1, 5))


@dataclass
class Waiting:
    """Jobs of one delivery, and who had a turn since it got in line: at the same peer, and since it was due at last."""

    joined_at: float
    jobs: list[ChunkJob] = field(default_factory=list)
    turns_of_others: Counter[DeliveryId] = field(default_factory=Counter)
    turns_since_due: Counter[DeliveryId] = field(default_factory=Counter)

    @property
    def priority(self) -> int:
        return self.jobs[0].grant.priority

    def rejoin(self, now: float) -> None:
        self.joined_at = now
        self.turns_of_others.clear()
        self.turns_since_due.clear()


class QueueMachine(RuleBasedStateMachine):
    """Jobs that wait and jobs that are under way, in plain lists."""

    @initialize()
    def begin(self) -> None:
        self.queue = ChunkQueue(LIMITS, AGEING_S)
        self.now = 0.0
        self.waiting: dict[DeliveryId, Waiting] = {}
        self.under_way: list[ChunkJob] = []
        self.priorities: dict[DeliveryId, int] = {}
        self.turns_of_peers: dict[PeerId, Counter[PeerId]] = {}
        self.num_pushed = 0

    @rule(seconds=st.sampled_from([1 / 64, 0.25, 1.0, 2.5, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        of=deliveries,
        sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 14)), min_size=1, max_size=4),
        priority=st.integers(0, NUM_PRIORITIES - 1),
    )
    def push(self, of: DeliveryId, sizes: list[tuple[int, int]], priority: int) -> None:
        """All jobs of a delivery have the priority of its grant."""
        priority = self.priorities.setdefault(of, priority)
        for num_bytes, num_rows in sizes:
            new = job(of, self.num_pushed, num_bytes, num_rows=num_rows, priority=priority, at=self.now)
            self.num_pushed += 1
            self.queue.push(new)
            self.waiting.setdefault(of, Waiting(self.now)).jobs.append(new)
        self.follow_peers()

    @rule(count=st.integers(1, 6))
    def pop(self, count: int) -> None:
        for _ in range(count):
            self.follow_peers()
            taken = self.queue.pop(self.now)
            if taken is None:
                assert not self.turns_of_peers
                return
            self.check_turn(taken)
            self.take(taken)

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        self.queue.end(self.under_way.pop(which % len(self.under_way)))

    @rule(of=deliveries)
    def drop(self, of: DeliveryId) -> None:
        waiting = self.waiting.pop(of, None)
        assert self.queue.drop(of) == (len(waiting.jobs) if waiting else 0)
        self.follow_peers()

    @invariant()
    def counts_are_those_of_what_waits_and_what_is_under_way(self) -> None:
        assert len(self.queue) == sum(len(waiting.jobs) for waiting in self.waiting.values())
        windows = self.queue._windows
        assert sorted(windows) == sorted({out.delivery.peer for out in self.under_way})
        for peer, window in windows.items():
            costs = self.costs(peer)
            total = (len(costs), sum(cost.num_bytes for cost in costs), sum(cost.num_rows for cost in costs))
            assert (window.num_posts, window.num_bytes, window.num_rows) == total
            is_within = total[0] <= MAX_POSTS and total[1] <= MAX_BYTES and total[2] <= MAX_ROWS
            assert is_within or total[0] == 1

    def teardown(self) -> None:
        """Everything that waits gets its turn, and then nothing is left."""
        if not hasattr(self, "queue"):
            return
        while self.waiting or self.under_way:
            self.pop(1)
            if self.under_way:
                self.end(0)
        assert (len(self.queue), self.queue._lanes, self.queue._windows) == (0, {}, {})

    def take(self, taken: ChunkJob) -> None:
        """Note a turn: whose, and who waited meanwhile."""
        of, peer = taken.delivery, taken.delivery.peer
        mine = self.waiting[of]
        mine.jobs.pop(0)
        mine.rejoin(self.now)
        if not mine.jobs:
            del self.waiting[of]
        for other, waiting in self.waiting.items():
            if other != of and other.peer == peer:
                waiting.turns_of_others[of] += 1
                waiting.turns_since_due[of] += self.now >= waiting.joined_at + waiting.priority * AGEING_S
        for turns in self.turns_of_peers.values():
            turns[peer] += 1
        self.turns_of_peers.pop(peer, None)
        self.under_way.append(taken)

    def check_turn(self, taken: ChunkJob) -> None:
        mine = self.waiting[taken.delivery]
        assert taken is mine.jobs[0]
        assert self.fits(taken)
        for other, waiting in self.waiting.items():
            if other == taken.delivery or other.peer != taken.delivery.peer:
                continue
            if waiting.priority == mine.priority:
                assert not waiting.turns_of_others[taken.delivery], "two turns, while one of the same class had none"
            if waiting.priority < mine.priority:
                head_start = (mine.priority - waiting.priority) * AGEING_S
                assert taken.enqueued_at + head_start <= waiting.joined_at, "a lower class went before it was lifted"
            assert not waiting.turns_since_due[taken.delivery], "two turns, while one that was due had none"
        for peer, turns in self.turns_of_peers.items():
            assert peer == taken.delivery.peer or not turns[taken.delivery.peer], "two turns, while a peer had none"

    def follow_peers(self) -> None:
        """Count turns for peers that must have one: those with jobs that fit, whichever of their deliveries is next."""
        firsts = [waiting.jobs[0] for waiting in self.waiting.values()]
        waiting_at = {first.delivery.peer for first in firsts}
        blocked = {first.delivery.peer for first in firsts if not self.fits(first)}
        must_be_served = [peer for peer in PEERS if peer in waiting_at - blocked]
        self.turns_of_peers = {peer: self.turns_of_peers.get(peer, Counter()) for peer in must_be_served}

    def fits(self, new: ChunkJob) -> bool:
        costs = [*self.costs(new.delivery.peer), new.cost]
        num_bytes, num_rows = (sum(column) for column in zip(*costs, strict=True))
        return len(costs) == 1 or (len(costs) <= MAX_POSTS and num_bytes <= MAX_BYTES and num_rows <= MAX_ROWS)

    def costs(self, peer: PeerId) -> list[Cost]:
        return [out.cost for out in self.under_way if out.delivery.peer == peer]


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=200, stateful_step_count=60)
