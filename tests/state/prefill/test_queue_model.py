"""A model of the queue: for any sequence of calls, credit adds up, and every promise about turns holds."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.bounds import Bounds
from kvflow.config import NUM_PRIORITIES
from kvflow.state.effects import Cost, Piece
from kvflow.state.events import DeliveryId
from kvflow.state.prefill.queue import PAUSE_PER_PIECE, PieceEnd, PieceQueue
from kvflow.wire.messages import PeerId
from tests.support.examples import examples
from tests.support.sending import PEERS, delivery, piece

AGEING_S = 1.0
MAX_POSTS, MAX_BYTES, MAX_DESCRIPTORS = 3, 10, 12
LIMITS = Bounds(
    posts_per_peer=MAX_POSTS, bytes_per_peer=MAX_BYTES, descriptors_per_peer=MAX_DESCRIPTORS, ageing_s=AGEING_S
)

peers = st.sampled_from(PEERS)
deliveries = st.builds(delivery, peers, st.integers(1, 5))


@dataclass
class Waiting:
    """Pieces of one delivery, and the turns of others at the same peer since it was queued and since it was due."""

    joined_at: float
    pieces: list[Piece] = field(default_factory=list)
    turns_of_others: Counter[DeliveryId] = field(default_factory=Counter)
    turns_since_due: Counter[DeliveryId] = field(default_factory=Counter)

    @property
    def priority(self) -> int:
        return self.pieces[0].grant.priority

    def rejoin(self, now: float) -> None:
        self.joined_at = now
        self.turns_of_others.clear()
        self.turns_since_due.clear()


class QueueMachine(RuleBasedStateMachine):
    """Waiting and posted pieces, in plain lists."""

    @initialize()
    def begin(self) -> None:
        self.queue = PieceQueue(LIMITS)
        self.now = 0.0
        self.waiting: dict[DeliveryId, Waiting] = {}
        self.background: dict[DeliveryId, list[Piece]] = {}
        self.background_began = self.paused_until = 0.0
        self.under_way: list[Piece] = []
        self.priorities: dict[DeliveryId, int] = {}
        self.turns_of_peers: dict[PeerId, Counter[PeerId]] = {}
        self.num_pushed = 0
        self.pushed_at: dict[int, float] = {}

    @rule(seconds=st.sampled_from([1 / 64, 0.25, 1.0, 2.5, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        of=deliveries,
        sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 14)), min_size=1, max_size=4),
        priority=st.integers(0, NUM_PRIORITIES - 1),
    )
    def push(self, of: DeliveryId, sizes: list[tuple[int, int]], priority: int) -> None:
        """Push all pieces of a delivery with the priority of its grant."""
        priority = self.priorities.setdefault(of, priority)
        for num_bytes, num_descriptors in sizes:
            new = piece(of, self.num_pushed, num_bytes, num_descriptors=num_descriptors, priority=priority)
            self.num_pushed += 1
            self.queue.expect(of.peer)
            self.queue.push(new, self.now, wants_slot=False)
            self.pushed_at[new.seq] = self.now
            self.waiting.setdefault(of, Waiting(self.now)).pieces.append(new)
        self.follow_peers()

    @rule(of=st.builds(delivery, peers, st.integers(6, 7)), sizes=st.lists(st.integers(0, 12), min_size=1, max_size=3))
    def push_in_background(self, of: DeliveryId, sizes: list[int]) -> None:
        for num_bytes in sizes:
            new = piece(of, self.num_pushed, num_bytes, is_background=True)
            self.num_pushed += 1
            self.queue.expect(of.peer)
            self.queue.push(new, self.now, wants_slot=False)
            self.background.setdefault(of, []).append(new)

    @rule(count=st.integers(1, 6))
    def pop(self, count: int) -> None:
        for _ in range(count):
            self.follow_peers()
            taken = self.queue.pop(self.now)
            if taken is None:
                assert not self.turns_of_peers
                assert not self.may_go_on_in_background()
                return
            if taken.link.is_background:
                self.take_in_background(taken)
            else:
                self.check_turn(taken)
                self.take(taken)

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        ended = self.under_way.pop(which % len(self.under_way))
        self.queue.end_piece(ended.delivery, ended.seq, PieceEnd.ENDED, self.now)
        if ended.link.is_background:
            self.paused_until = self.now + PAUSE_PER_PIECE * (self.now - self.background_began)

    @rule(of=st.builds(delivery, peers, st.integers(1, 7)))
    def drop(self, of: DeliveryId) -> None:
        waiting, in_background = self.waiting.pop(of, None), self.background.pop(of, [])
        before = len(self.queue)
        self.queue.drop(of)
        assert before - len(self.queue) == (len(waiting.pieces) if waiting else 0) + len(in_background)
        self.follow_peers()

    @invariant()
    def counts_are_those_of_what_waits_and_what_is_under_way(self) -> None:
        in_background = sum(map(len, self.background.values()))
        assert len(self.queue) == sum(len(waiting.pieces) for waiting in self.waiting.values()) + in_background
        assert sum(out.link.is_background for out in self.under_way) <= 1
        windows = self.queue._windows
        assert sorted(windows) == sorted({out.delivery.peer for out in self.under_way})
        for peer, window in windows.items():
            costs = self.costs(peer)
            total = (len(costs), sum(cost.num_bytes for cost in costs), sum(cost.num_descriptors for cost in costs))
            assert (window.num_posts, window.num_bytes, window.num_descriptors) == total
            is_within = total[0] <= MAX_POSTS and total[1] <= MAX_BYTES and total[2] <= MAX_DESCRIPTORS
            assert is_within or total[0] == 1

    def teardown(self) -> None:
        """Check that everything that waits gets its turn, and that nothing is left."""
        if not hasattr(self, "queue"):
            return
        while self.waiting or self.background or self.under_way:
            self.pop(1)
            if self.under_way:
                self.end(0)
        assert (len(self.queue), self.queue._windows) == (0, {})
        for lanes in (self.queue.lanes, self.queue.background):
            assert not any((lanes.by_peer, lanes.candidates, lanes.deferred, lanes.without_slot))
        assert (self.queue._num_waiting, len(self.queue._under_way)) == ({}, 0)

    def take(self, taken: Piece) -> None:
        """Record a turn and the deliveries that waited meanwhile."""
        of, peer = taken.delivery, taken.delivery.peer
        mine = self.waiting[of]
        mine.pieces.pop(0)
        mine.rejoin(self.now)
        if not mine.pieces:
            del self.waiting[of]
        for other, waiting in self.waiting.items():
            if other != of and other.peer == peer:
                waiting.turns_of_others[of] += 1
                waiting.turns_since_due[of] += self.now >= waiting.joined_at + waiting.priority * AGEING_S
        for turns in self.turns_of_peers.values():
            turns[peer] += 1
        self.turns_of_peers.pop(peer, None)
        self.under_way.append(taken)

    def take_in_background(self, taken: Piece) -> None:
        """Check that nothing else had to go first, and that others have had their time."""
        assert not self.turns_of_peers
        assert self.may_begin_in_background()
        assert self.fits(taken)
        mine = self.background[taken.delivery]
        assert taken is mine.pop(0)
        if not mine:
            del self.background[taken.delivery]
        self.background_began = self.now
        self.under_way.append(taken)

    def may_begin_in_background(self) -> bool:
        is_running = any(out.link.is_background for out in self.under_way)
        return not is_running and (not self.under_way or self.now >= self.paused_until)

    def may_go_on_in_background(self) -> bool:
        """Return whether a piece has to go now, whichever of its peer's deliveries is first."""
        firsts = [mine[0] for mine in self.background.values()]
        blocked = {first.delivery.peer for first in firsts if not self.fits(first)}
        return self.may_begin_in_background() and any(first.delivery.peer not in blocked for first in firsts)

    def check_turn(self, taken: Piece) -> None:
        mine = self.waiting[taken.delivery]
        assert taken is mine.pieces[0]
        assert self.fits(taken)
        for other, waiting in self.waiting.items():
            if other == taken.delivery or other.peer != taken.delivery.peer:
                continue
            if waiting.priority == mine.priority:
                assert not waiting.turns_of_others[taken.delivery], "two turns, while one of the same class had none"
            if waiting.priority < mine.priority:
                head_start = (mine.priority - waiting.priority) * AGEING_S
                assert self.pushed_at[taken.seq] + head_start <= waiting.joined_at, (
                    "a lower class went before it was lifted"
                )
            assert not waiting.turns_since_due[taken.delivery], "two turns, while one that was due had none"
        for peer, turns in self.turns_of_peers.items():
            assert peer == taken.delivery.peer or not turns[taken.delivery.peer], "two turns, while a peer had none"

    def follow_peers(self) -> None:
        """Count turns for peers whose next piece fits, whichever that is."""
        firsts = [waiting.pieces[0] for waiting in self.waiting.values()]
        waiting_at = {first.delivery.peer for first in firsts}
        blocked = {first.delivery.peer for first in firsts if not self.fits(first)}
        must_be_served = [peer for peer in PEERS if peer in waiting_at - blocked]
        self.turns_of_peers = {peer: self.turns_of_peers.get(peer, Counter()) for peer in must_be_served}

    def fits(self, new: Piece) -> bool:
        costs = [*self.costs(new.delivery.peer), new.cost]
        num_bytes, num_descriptors = (sum(column) for column in zip(*costs, strict=True))
        return len(costs) == 1 or (
            len(costs) <= MAX_POSTS and num_bytes <= MAX_BYTES and num_descriptors <= MAX_DESCRIPTORS
        )

    def costs(self, peer: PeerId) -> list[Cost]:
        return [out.cost for out in self.under_way if out.delivery.peer == peer]


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=examples(100), stateful_step_count=50)
