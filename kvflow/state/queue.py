"""Whose turn it is among the chunks that wait for credit. Pure.

Jobs wait by peer, and within a peer by delivery. Peers take turns, and a peer whose next job does not fit its window
sits out until credit comes back: nobody else waits for it, and nothing smaller of its class overtakes it.

Among the deliveries to one peer there is a rotation for each class of priority, and each delivery has a time at which
it is due: when waiting will have lifted its next job from class `c` to class 0, `c * ageing_s` after the job came, but
never before the delivery got in line, so that lifted ones take turns with each other. Next is whoever is due first
among the first of each rotation; finding it takes the same work however many wait. It follows that

- between two turns of a delivery every other one of its class that waits has one;
- a class is worth a head start of `ageing_s` over the next one, no more;
- once a delivery of class `c` has waited for its turn for `c * ageing_s`, only those that are in line already can have
  a turn before it, one each.
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvflow.config import Limits
from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.pages import PageTable
from kvflow.geometry.tokens import TokenRange
from kvflow.state.events import DeliveryId
from kvflow.state.slots import SlotPool
from kvflow.state.window import Cost, Window
from kvflow.wire.messages import Grant, PeerId

__all__ = ["ChunkJob", "ChunkQueue", "JobEnd", "JobSlots"]


class JobSlots(NamedTuple):
    """Staging slots of a packed job: where it is gathered, and where it is written to."""

    local: int
    remote: int


class JobEnd(enum.Enum):
    """How a job leaves its peer's window."""

    DROPPED = "dropped"
    """It was never posted."""
    ENDED = "ended"
    """Its post has ended."""
    DOUBTED = "doubted"
    """Nobody can tell whether its post has ended."""
    ENDED_AFTER_DOUBT = "ended after doubt"
    """Its post has ended after all; its credit was given back before."""


class ChunkJob(msgspec.Struct, frozen=True):
    """A part of a chunk on its way to one decode rank.

    Attributes:
        ranges: For each component, what of the chunk the decode rank wants; none is empty.
        pages: Source pages of the chunk, for each component.
        grant: Whose pages to write, and how urgently.
        cost: What it takes of the peer's window.
        is_last: No job of this delivery follows.
        enqueued_at: In seconds on a monotonic clock.
        layers: Of the model, that go with it.
        wants_slot: It is to be packed, if there are slots.
        slots: Those that it has been given.
    """

    delivery: DeliveryId
    seq: int
    ranges: Mapping[str, TokenRange]
    pages: Mapping[str, PageTable]
    grant: Grant
    cost: Cost
    is_last: bool
    enqueued_at: float
    layers: LayerRange = ALL_LAYERS
    wants_slot: bool = False
    slots: JobSlots | None = None


class ChunkQueue:
    """Jobs that wait for their turn and their credit.

    It reads no clock: times come in as numbers and never decrease from call to call.

    Args:
        limits: Bounds of each peer's window.
        ageing_s: How much waiting lifts a job by one class.
        local: Slots of this rank.
        remote: Gives the slots of a peer; None if it has none.
    """

    def __init__(
        self,
        limits: Limits,
        ageing_s: float,
        local: SlotPool | None = None,
        remote: Callable[[PeerId], SlotPool | None] = lambda _: None,
    ) -> None:
        self._local = local or SlotPool(0)
        self._remote = remote
        self._charges: dict[tuple[DeliveryId, int], Cost] = {}
        self._limits = limits
        self._ageing_s = ageing_s
        self._lanes: dict[PeerId, _Lane] = {}
        self._windows: dict[PeerId, Window] = {}
        self._candidates: OrderedDict[PeerId, None] = OrderedDict()
        self._num_jobs = 0

    def __len__(self) -> int:
        return self._num_jobs

    def push(self, job: ChunkJob) -> None:
        """Put a job at the end of its delivery's line, at the time that is its `enqueued_at`."""
        peer = job.delivery.peer
        if peer not in self._lanes:
            self._lanes[peer] = _Lane(self._ageing_s)
        self._lanes[peer].push(job)
        self._candidates.setdefault(peer)
        self._num_jobs += 1

    def pop(self, now: float) -> ChunkJob | None:
        """Take the job whose turn it is and open its credit; None if no peer's next job fits its window."""
        while self._candidates:
            peer = next(iter(self._candidates))
            line, window = self._lanes[peer].next_line(), self._windows.get(peer)
            job = line.jobs[0]
            pools = self._pools(job)
            cost = job.cost.packed if pools else job.cost
            if (window is None or window.admits(cost)) and all(pool.num_free for pool in pools):
                return self._take(peer, line, pools, now)
            del self._candidates[peer]
        return None

    def end(self, job: ChunkJob, how: JobEnd = JobEnd.DROPPED) -> None:
        """Close the credit of a job that `pop` gave; the remote slot of one that was posted is the peer's to return."""
        if how is not JobEnd.ENDED_AFTER_DOUBT:
            self._end_post(job)
        if job.slots is not None:
            self._end_slots(job.delivery.peer, job.slots, how)

    def offer_slots(self, peer: PeerId) -> None:
        """Look at a peer's jobs again, because a slot of it is free."""
        if peer in self._lanes:
            self._candidates.setdefault(peer)

    def without_slots(self, job: ChunkJob) -> ChunkJob:
        """Give the slots of a job back that goes without."""
        if job.slots is not None:
            self._end_slots(job.delivery.peer, job.slots, JobEnd.DROPPED)
        return replace(job, slots=None)

    def _end_post(self, job: ChunkJob) -> None:
        peer = job.delivery.peer
        window = self._windows[peer]
        window.end(self._charges.pop((job.delivery, job.seq)))
        if window.num_posts == 0:
            del self._windows[peer]
        self.offer_slots(peer)

    def _end_slots(self, peer: PeerId, slots: JobSlots, how: JobEnd) -> None:
        for waiting in self._lanes:  # whoever waits for a local slot: one is free, or there is one less to wait for
            self._candidates.setdefault(waiting)
        if how is JobEnd.DOUBTED:
            self._local.lose(slots.local)
            return
        self._local.give_back(slots.local)
        remote = self._remote(peer)
        if how is JobEnd.DROPPED and remote is not None:
            remote.give_back(slots.remote)

    def _pools(self, job: ChunkJob) -> tuple[SlotPool, ...]:
        """Where a job gets its slots; nowhere if it goes without, because none is left and none will come."""
        remote = self._remote(job.delivery.peer)
        if not job.wants_slot or remote is None:
            return ()
        pools = (self._local, remote)
        return pools if all(pool.num_free or pool.may_come for pool in pools) else ()

    def drop(self, delivery: DeliveryId) -> int:
        """Forget the jobs of a delivery that have not been taken, and say how many there were."""
        lane = self._lanes.get(delivery.peer)
        if lane is None:
            return 0
        num_dropped = lane.drop(delivery)
        self._num_jobs -= num_dropped
        self._candidates.setdefault(delivery.peer)
        self._forget_if_empty(delivery.peer)
        return num_dropped

    def _take(self, peer: PeerId, line: "_Line", pools: tuple[SlotPool, ...], now: float) -> ChunkJob:
        job = self._lanes[peer].take(line, now)
        if pools:
            job = replace(job, slots=JobSlots(*(pool.take() for pool in pools)))
        charge = job.cost.packed if pools else job.cost
        self._charges[job.delivery, job.seq] = charge
        self._window(peer).begin(charge)
        self._num_jobs -= 1
        self._candidates.move_to_end(peer)
        self._forget_if_empty(peer)
        return job

    def _forget_if_empty(self, peer: PeerId) -> None:
        if self._lanes[peer].is_empty:
            del self._lanes[peer]
            del self._candidates[peer]

    def _window(self, peer: PeerId) -> Window:
        if peer not in self._windows:
            limits = self._limits
            self._windows[peer] = Window(limits.posts_per_peer, limits.bytes_per_peer, limits.rows_per_peer)
        return self._windows[peer]


class _Line(msgspec.Struct):
    """Jobs of one delivery, in order; `place` is when it is due and, among equals, who was first."""

    delivery: DeliveryId
    jobs: deque[ChunkJob]
    place: tuple[float, int] = (0.0, 0)


class _Lane:
    """What waits for one peer: a line for each delivery, in the rotation of its class."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._lines: dict[DeliveryId, _Line] = {}
        self._rotations: dict[int, OrderedDict[DeliveryId, _Line]] = {}
        self._num_joined = 0

    @property
    def is_empty(self) -> bool:
        return not self._lines

    def push(self, job: ChunkJob) -> None:
        line = self._lines.get(job.delivery)
        if line is not None:
            line.jobs.append(job)
            return
        self._lines[job.delivery] = line = _Line(job.delivery, deque([job]))
        self._join(line, job.enqueued_at)

    def take(self, line: _Line, now: float) -> ChunkJob:
        self._leave(line)
        job = line.jobs.popleft()
        if line.jobs:
            self._join(line, now)
        else:
            del self._lines[line.delivery]
        return job

    def drop(self, delivery: DeliveryId) -> int:
        line = self._lines.pop(delivery, None)
        if line is None:
            return 0
        self._leave(line)
        return len(line.jobs)

    def next_line(self) -> _Line:
        firsts = [next(iter(rotation.values())) for rotation in self._rotations.values()]
        return firsts[0] if len(firsts) == 1 else min(firsts, key=lambda line: line.place)

    def _join(self, line: _Line, now: float) -> None:
        job = line.jobs[0]
        due = max(now, job.enqueued_at + job.grant.priority * self._ageing_s)
        line.place = (due, self._num_joined)
        self._num_joined += 1
        self._rotations.setdefault(job.grant.priority, OrderedDict())[line.delivery] = line

    def _leave(self, line: _Line) -> None:
        priority = line.jobs[0].grant.priority
        rotation = self._rotations[priority]
        del rotation[line.delivery]
        if not rotation:
            del self._rotations[priority]
