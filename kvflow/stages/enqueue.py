"""Second stage: granted chunks wait here for their data, their turn and their credit.

A chunk, or a piece of a large one, becomes a job when the core says that a decode rank wants it. It waits until the
device has computed it (`ready`), and then in the queue of `kvflow.state.queue` for its turn and for room in the peer's
window. Full windows fill this queue, and when too much waits for one decode rank, the engine's `chunk()` waits for the
rooms that go there.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from kvflow.errors import FailureReason, Stage
from kvflow.stages.context import StageContext
from kvflow.stages.staging import NO_SLOTS, Slots
from kvflow.state.effects import EnqueueChunk
from kvflow.state.events import DeliveryId, PlanFailed, ReadyEvent
from kvflow.state.queue import ChunkJob, ChunkQueue, JobEnd
from kvflow.state.window import Cost
from kvflow.wire.messages import Failure, PeerId

__all__ = ["Enqueue"]

DEVICE_WAITS_AT_ONCE = 64
"""Threads that wait for devices; they have a bound of their own, so that nothing else has to wait for them."""


@dataclass
class _Gate:
    """Rooms that wait to offer a chunk to one peer, in line: the first for room, the others for their turn."""

    line: anyio.Lock = field(default_factory=anyio.Lock)
    has_room: anyio.Event = field(default_factory=anyio.Event)
    num_waiting: int = 0


class Enqueue:
    """Runs the queue.

    Args:
        context: Of this rank.
        cost: What a part of a chunk takes of its peer's window.
        on_change: Called when it may be somebody's turn: `next_job` says whose.
        slots: How packed jobs get their slots; none are packed by default.
    """

    def __init__(
        self,
        context: StageContext,
        cost: Callable[[EnqueueChunk], Cost],
        on_change: Callable[[], None],
        slots: Slots | None = None,
    ) -> None:
        self._slots = slots or NO_SLOTS
        limits, ageing_s = context.config.limits, context.config.timeouts.ageing_s
        self.queue = ChunkQueue(limits, ageing_s, self._slots.local, self._slots.remote)
        self._context = context
        self._cost = cost
        self._on_change = on_change
        self._num_queued: defaultdict[PeerId, int] = defaultdict(int)
        self._gates: dict[PeerId, _Gate] = {}
        self._device_waits = anyio.CapacityLimiter(DEVICE_WAITS_AT_ONCE)
        self._not_ready: dict[DeliveryId, deque[EnqueueChunk]] = {}

    @property
    def num_not_ready(self) -> int:
        """Chunks that wait for a device, or for a chunk of their delivery that does."""
        return sum(len(line) for line in self._not_ready.values())

    @property
    def num_queued(self) -> int:
        """Chunks that wait here, for whatever reason."""
        return sum(self._num_queued.values())

    def is_full(self, peer: PeerId) -> bool:
        """As many chunks wait for this peer as may."""
        return self._num_queued.get(peer, 0) >= self._context.config.limits.queued_chunks

    def put(self, effect: EnqueueChunk) -> None:
        """Take in a part of a chunk; chunks of a delivery go in order, whatever their devices do."""
        self._num_queued[effect.delivery.peer] += 1
        if effect.delivery in self._not_ready:
            self._not_ready[effect.delivery].append(effect)
        elif effect.chunk.ready is None:
            self._push(effect)
        else:
            line = self._not_ready[effect.delivery] = deque([effect])
            self._context.start_task(self._wait_for_devices, effect.delivery, line)

    def drop(self, delivery: DeliveryId) -> None:
        """Forget what waits for a delivery that has ended."""
        num_dropped = self.queue.drop(delivery) + len(self._not_ready.pop(delivery, ()))
        self._leave(delivery.peer, num_dropped)
        self._on_change()

    def end(self, job: ChunkJob, how: JobEnd = JobEnd.DROPPED) -> None:
        """Give a job's credit back: its post has ended, or it will never be posted."""
        self.queue.end(job, how)
        self._on_change()

    def has_room(self, peers: Iterable[PeerId]) -> bool:
        """Say whether `wait_for_room` would not wait."""
        return not any(peer in self._gates or self.is_full(peer) for peer in peers)

    def offer_slots(self, peer: PeerId) -> None:
        """Look at what waits for a staging slot of a peer: one is free again."""
        self.queue.offer_slots(peer)
        self._on_change()

    def without_slots(self, job: ChunkJob) -> ChunkJob:
        """Give the slots of a job back that is not packed after all."""
        rest = self.queue.without_slots(job)
        self._on_change()
        return rest

    async def wait_for_room(self, peers: Callable[[], Iterable[PeerId]]) -> None:
        """Wait while too many chunks wait for some peer: the pressure that reaches the engine.

        Whoever waits for a peer is let in before anybody who comes later.

        Args:
            peers: Gives the peers that matter; called anew whenever one of them has room.
        """
        passed: list[PeerId] = []
        while True:
            closed = [peer for peer in peers() if self.is_full(peer) or (peer in self._gates and peer not in passed)]
            if not closed:
                return
            await self._stand_in_line(closed[0])
            passed.append(closed[0])

    def next_job(self) -> ChunkJob | None:
        """Take the job whose turn it is; None if every one waits for its device or its credit."""
        now = self._context.now()
        job = self.queue.pop(now)
        if job is not None:
            self._leave(job.delivery.peer, 1)
            self._context.times.add(Stage.ENQUEUE, now - job.enqueued_at)
        return job

    def _leave(self, peer: PeerId, count: int) -> None:
        """Note that chunks do not wait any more, and let the next room in."""
        self._num_queued[peer] -= count
        if not self._num_queued[peer]:
            del self._num_queued[peer]
        if peer in self._gates and not self.is_full(peer):
            self._gates[peer].has_room.set()

    async def _stand_in_line(self, peer: PeerId) -> None:
        gate = self._gates.setdefault(peer, _Gate())
        gate.num_waiting += 1
        try:
            async with gate.line:
                while self.is_full(peer):
                    gate.has_room = anyio.Event()
                    await gate.has_room.wait()
        finally:
            gate.num_waiting -= 1
            if not gate.num_waiting:
                del self._gates[peer]

    async def _wait_for_devices(self, delivery: DeliveryId, line: deque[EnqueueChunk]) -> None:
        """Push the chunks of a delivery one after another as they get ready, unless it is dropped meanwhile."""
        while self._not_ready.get(delivery) is line:
            self._device_answered(delivery, line, await self._wait_for_device(line[0].chunk.ready))

    def _device_answered(self, delivery: DeliveryId, line: deque[EnqueueChunk], failure: Failure | None) -> None:
        """Take the first of a line that is ready, or will never be, unless its delivery was dropped meanwhile."""
        if self._not_ready.get(delivery) is not line:
            return
        effect = line.popleft()
        if not line:
            del self._not_ready[delivery]
        if failure is None:
            self._push(effect)
        else:
            self._leave(delivery.peer, 1)
            self._context.dispatch(PlanFailed(delivery, effect.seq, failure))

    async def _wait_for_device(self, ready: ReadyEvent | None) -> Failure | None:
        if ready is None:
            return None
        try:
            # A device event can only be waited for by blocking, so this one wait takes a worker thread.
            await anyio.to_thread.run_sync(ready.synchronize, abandon_on_cancel=True, limiter=self._device_waits)
        except Exception as error:  # noqa: BLE001 - it is the engine's object; only this transfer suffers
            detail = f"{type(error).__name__}: {error}"
            return self._context.failure(FailureReason.NOT_READY, Stage.ENQUEUE, detail)
        return None

    def _push(self, effect: EnqueueChunk) -> None:
        cost = self._cost(effect)
        job = ChunkJob(
            delivery=effect.delivery,
            seq=effect.seq,
            ranges=effect.ranges,
            layers=effect.layers,
            pages=effect.chunk.pages,
            grant=effect.grant,
            cost=cost,
            is_last=effect.chunk.last,
            enqueued_at=self._context.now(),
            wants_slot=self._slots.wants(effect.delivery.peer, cost),
        )
        self.queue.push(job)
        self._on_change()
