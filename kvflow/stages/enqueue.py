"""Second stage: granted chunks wait here for their data, their turn and their credit.

A chunk becomes a job when the core says that a decode rank wants it. It waits until the device has computed it
(`ready`), until its transfer's turn comes among the transfers to the same peer, and until the peer's window has room.
Full windows fill this queue, and a full queue makes the engine's `chunk()` wait.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectSendStream

from kvflow.config import Limits
from kvflow.errors import FailureReason, Stage
from kvflow.geometry.pages import PageTable
from kvflow.geometry.tokens import TokenRange
from kvflow.stages.context import StageContext
from kvflow.state.effects import EnqueueChunk
from kvflow.state.events import DeliveryId, PlanFailed, ReadyEvent
from kvflow.state.window import Window
from kvflow.wire.messages import Failure, Grant, PeerId

__all__ = ["ChunkJob", "ChunkQueue", "Enqueue"]

DEVICE_WAITS_AT_ONCE = 64
"""Threads that wait for devices; they have a bound of their own, so that nothing else has to wait for them."""


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A part of a chunk on its way to one decode rank.

    Attributes:
        ranges: For each component, what of the chunk the decode rank wants; none is empty.
        pages: Source pages of the chunk, for each component.
        grant: Whose pages to write.
        num_bytes: What the job will move.
        is_last: No job of this delivery follows.
        enqueued_at: On the event loop's clock, in seconds.
    """

    delivery: DeliveryId
    seq: int
    ranges: Mapping[str, TokenRange]
    pages: Mapping[str, PageTable]
    grant: Grant
    num_bytes: int
    is_last: bool
    enqueued_at: float


class ChunkQueue:
    """Jobs by peer and by delivery. Peers take turns, and so do the deliveries to one peer."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._jobs: OrderedDict[PeerId, OrderedDict[DeliveryId, deque[ChunkJob]]] = OrderedDict()
        self._windows: dict[PeerId, Window] = {}
        self._num_jobs = 0

    def __len__(self) -> int:
        return self._num_jobs

    def push(self, job: ChunkJob) -> None:
        """Put a job at the end of its delivery's line."""
        deliveries = self._jobs.setdefault(job.delivery.peer, OrderedDict())
        deliveries.setdefault(job.delivery, deque()).append(job)
        self._num_jobs += 1

    def pop(self) -> ChunkJob | None:
        """Take the job whose turn it is and open its credit; None if no peer with jobs has room."""
        for peer, deliveries in self._jobs.items():
            delivery, jobs = next(iter(deliveries.items()))
            window = self._window(peer)
            if not window.admits(jobs[0].num_bytes):
                continue
            job = jobs.popleft()
            window.begin(job.num_bytes)
            self._num_jobs -= 1
            self._jobs.move_to_end(peer)
            deliveries.move_to_end(delivery)
            if not jobs:
                self._remove(delivery)
            return job
        return None

    def end(self, job: ChunkJob) -> None:
        """Close the credit of a job that `pop` gave."""
        window = self._window(job.delivery.peer)
        window.end(job.num_bytes)
        if window.num_posts == 0:
            del self._windows[job.delivery.peer]

    def drop(self, delivery: DeliveryId) -> None:
        """Forget the jobs of a delivery that have not been taken."""
        jobs = self._jobs.get(delivery.peer, OrderedDict()).get(delivery)
        if jobs is not None:
            self._num_jobs -= len(jobs)
            self._remove(delivery)

    def _remove(self, delivery: DeliveryId) -> None:
        del self._jobs[delivery.peer][delivery]
        if not self._jobs[delivery.peer]:
            del self._jobs[delivery.peer]

    def _window(self, peer: PeerId) -> Window:
        if peer not in self._windows:
            self._windows[peer] = Window(self._limits.posts_per_peer, self._limits.bytes_per_peer)
        return self._windows[peer]


class Enqueue:
    """Runs the queue.

    Args:
        context: Of this rank.
        jobs: Where jobs go when their turn has come.
        num_bytes: What a part of a chunk costs on its way; 0 for a peer that is gone.
    """

    def __init__(
        self,
        context: StageContext,
        jobs: MemoryObjectSendStream[ChunkJob],
        num_bytes: Callable[[EnqueueChunk], int],
    ) -> None:
        self.queue = ChunkQueue(context.config.limits)
        self._context = context
        self._jobs = jobs
        self._num_bytes = num_bytes
        self._changed = anyio.Event()
        self._got_room = anyio.Event()
        self._is_running = True
        self._device_waits = anyio.CapacityLimiter(DEVICE_WAITS_AT_ONCE)
        self._put: list[EnqueueChunk] = []
        self._not_ready: dict[DeliveryId, deque[EnqueueChunk]] = {}

    @property
    def num_not_ready(self) -> int:
        """Chunks that wait for a device, or for a chunk of their delivery that does."""
        return sum(len(line) for line in self._not_ready.values())

    @property
    def num_queued(self) -> int:
        """Chunks that wait here, for whatever reason."""
        return len(self._put) + self.num_not_ready + len(self.queue)

    def put(self, effect: EnqueueChunk) -> None:
        """Take in a part of a chunk."""
        self._put.append(effect)
        self._changed.set()

    def drop(self, delivery: DeliveryId) -> None:
        """Forget what waits for a delivery that has ended."""
        self.queue.drop(delivery)
        self._not_ready.pop(delivery, None)
        self._got_room.set()

    def end(self, job: ChunkJob) -> None:
        """Give a job's credit back: its post has ended, or it will never be posted."""
        self.queue.end(job)
        self._changed.set()

    async def wait_for_room(self) -> None:
        """Wait while the queue is full: the pressure that reaches the engine. Nobody waits for a broken rank."""
        while self._is_running and self.num_queued >= self._context.config.limits.queued_chunks:
            if self._got_room.is_set():
                self._got_room = anyio.Event()
            await self._got_room.wait()

    def stop(self) -> None:
        """Let everybody go who waits for room; nothing will be passed on any more."""
        self._is_running = False
        self._got_room.set()

    async def run(self) -> None:
        """Pass jobs on, for ever."""
        while True:
            job = self.next_job()
            if job is not None:
                await self._jobs.send(job)
            elif not self._put:
                self._changed = anyio.Event()
                await self._changed.wait()

    def next_job(self) -> ChunkJob | None:
        """Take the job whose turn it is; None if every one waits for its device or its credit."""
        for effect in self._take_put():
            self._line_up(effect)
        job = self.queue.pop()
        if job is not None:
            self._got_room.set()
            self._context.times.add(Stage.ENQUEUE, self._context.now() - job.enqueued_at)
        return job

    def _take_put(self) -> list[EnqueueChunk]:
        taken, self._put = self._put, []
        return taken

    def _line_up(self, effect: EnqueueChunk) -> None:
        """Queue a chunk, or let it wait: chunks of a delivery go in order, whatever their devices do."""
        if effect.delivery in self._not_ready:
            self._not_ready[effect.delivery].append(effect)
        elif effect.chunk.ready is None:
            self.queue.push(self._job(effect))
        else:
            line = self._not_ready[effect.delivery] = deque([effect])
            self._context.start_task(self._wait_for_devices, effect.delivery, line)

    async def _wait_for_devices(self, delivery: DeliveryId, line: deque[EnqueueChunk]) -> None:
        """Push the chunks of a delivery one after another as they get ready, unless it is dropped meanwhile."""
        while self._not_ready.get(delivery) is line:
            failure = await self._wait_for_device(line[0].chunk.ready)
            if self._not_ready.get(delivery) is not line:
                return
            effect = line.popleft()
            if not line:
                del self._not_ready[delivery]
            if failure is None:
                self.queue.push(self._job(effect))
            else:
                self._context.dispatch(PlanFailed(delivery, effect.seq, failure))
            self._changed.set()

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

    def _job(self, effect: EnqueueChunk) -> ChunkJob:
        return ChunkJob(
            delivery=effect.delivery,
            seq=effect.seq,
            ranges=effect.ranges,
            pages=effect.chunk.pages,
            grant=effect.grant,
            num_bytes=self._num_bytes(effect),
            is_last=effect.chunk.last,
            enqueued_at=self._context.now(),
        )
