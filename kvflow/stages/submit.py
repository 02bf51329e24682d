"""Fourth stage: what is planned is posted to the transport, and followed to its end.

A planned chunk asks the core for leave and is posted only if the core says so, so that nothing is posted for a
transfer that has ended in the meantime.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvflow.backends.base import Backend, PostEnded, PostInDoubt
from kvflow.errors import BackendError, FailureReason, Stage
from kvflow.geometry.blocks import Blocks
from kvflow.stages.context import StageContext
from kvflow.stages.planning import PlannedChunk
from kvflow.state.effects import DropPlan, PostPlan
from kvflow.state.events import DeliveryId, PlanFinished, PostDoubted, PostSettled
from kvflow.state.queue import ChunkJob, JobEnd
from kvflow.state.slots import RemoteSlots, SlotPool
from kvflow.statistics import StagingStatistics
from kvflow.wire.codec import encode
from kvflow.wire.messages import Notice, PeerId

__all__ = ["Submit"]


class _Post(msgspec.Struct, frozen=True):
    job: ChunkJob
    notice: Notice
    began: float


@dataclass(slots=True)
class PathTotals:
    """What has gone one way so far."""

    num_posts: int = 0
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Count a post."""
        self.num_posts += 1
        self.num_bytes += num_bytes


class Submit:
    """Posts planned chunks.

    Args:
        context: Of this rank.
        backend: Where to post.
        end_job: Gives a job's credit back, and says how it ended.
        send_notice: Delivers a notice over the control channel, for transports without notices of their own.

    Attributes:
        direct: What was posted to pages.
        packed: What was posted to staging slots.
    """

    def __init__(
        self,
        context: StageContext,
        backend: Backend,
        end_job: Callable[[ChunkJob, JobEnd], None],
        send_notice: Callable[[PeerId, Notice], None],
    ) -> None:
        self._context = context
        self._backend = backend
        self._end_job = end_job
        self._send_notice = send_notice
        self._waiting: dict[tuple[DeliveryId, int], PlannedChunk] = {}
        self._posts: dict[int, _Post] = {}
        self._doubtful: set[int] = set()
        self._num_posts = 0
        self.direct, self.packed = PathTotals(), PathTotals()

    @property
    def num_posted(self) -> int:
        """Posts that have begun and are not known to have ended."""
        return len(self._posts)

    def statistics(self, own: SlotPool, remote: RemoteSlots) -> StagingStatistics:
        """What has gone either way, and what there is of slots: own ones, and those of decode ranks."""
        return StagingStatistics(
            packed_posts=self.packed.num_posts,
            packed_bytes=self.packed.num_bytes,
            direct_posts=self.direct.num_posts,
            direct_bytes=self.direct.num_bytes,
            slots_taken=own.num_slots - own.num_free - own.num_lost,
            slots_lost=own.num_lost + remote.num_lost,
        )

    def offer(self, chunk: PlannedChunk) -> None:
        """Ask the core whether a planned chunk may still be posted; it answers with `post` or `drop`."""
        job = chunk.job
        self._waiting[job.delivery, job.seq] = chunk
        self._context.dispatch(PlanFinished(job.delivery, job.seq, job.cost.num_bytes, chunk.digests, chunk.staged))

    def post(self, effect: PostPlan) -> None:
        """Post a planned chunk, as the core said."""
        chunk = self._waiting.pop((effect.delivery, effect.seq))
        post_id = self._num_posts
        self._num_posts += 1
        (self.direct if effect.notice.staged is None else self.packed).add(effect.notice.num_bytes)
        self._posts[post_id] = _Post(chunk.job, effect.notice, self._context.now())
        payload = encode(effect.notice) if self._backend.capabilities.in_band_notices else b""
        peer = agent_name(effect.delivery.peer)
        try:
            if isinstance(chunk.moves, Blocks):
                self._backend.post_blocks(post_id, peer, chunk.moves, payload)
            else:
                self._backend.post(post_id, peer, chunk.moves, payload)
        except BackendError as error:
            self.ended(PostEnded(post_id, str(error)))

    def drop(self, effect: DropPlan) -> None:
        """Forget a planned chunk, as the core said."""
        chunk = self._waiting.pop((effect.delivery, effect.seq))
        self._end_job(chunk.job, JobEnd.DROPPED)

    def ended(self, event: PostEnded) -> None:
        """Take in that a post has ended."""
        post = self._posts.pop(event.post_id)
        if event.post_id in self._doubtful:
            self._doubtful.remove(event.post_id)
            self._end_job(post.job, JobEnd.ENDED_AFTER_DOUBT)
        else:
            self._end_job(post.job, JobEnd.ENDED)
        self._context.times.add(Stage.SUBMIT, self._context.now() - post.began)
        failure = None
        if event.error is not None:
            failure = self._context.failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, event.error)
        elif not self._backend.capabilities.in_band_notices:
            self._send_notice(post.job.delivery.peer, post.notice)
        self._context.dispatch(PostSettled(post.job.delivery, post.job.seq, failure, event.lingers))

    def in_doubt(self, event: PostInDoubt) -> None:
        """Take in that a post may or may not have ended."""
        job = self._posts[event.post_id].job
        if event.post_id not in self._doubtful:  # it may never end, and must not hold up others until then
            self._doubtful.add(event.post_id)
            self._end_job(job, JobEnd.DOUBTED)
        failure = self._context.failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, event.error)
        self._context.dispatch(PostDoubted(job.delivery, job.seq, failure))


@functools.lru_cache(maxsize=4096)
def agent_name(peer: PeerId) -> str:
    """The name under which a life of a rank is known to the transport."""
    return str(peer)
