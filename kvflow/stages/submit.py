"""Fourth stage: posts planned pieces to the transport, and tracks each post until it has ended."""

from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from kvflow.backends.base import Backend, BackendEvent, PostEnded, PostInDoubt
from kvflow.errors import BackendError, FailureReason, Stage
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.plan import Descriptors
from kvflow.observe.totals import WriteTotals
from kvflow.stages.context import PeerAgents, StageContext
from kvflow.state import events as ev
from kvflow.state.events import DeliveryId
from kvflow.statistics import PostCounts
from kvflow.wire.codec import encode
from kvflow.wire.messages import MAX_ENDS, Message, Notice, PeerId, Pong, Stamps

__all__ = ["Submit", "TimedPlan"]


class TimedPlan(NamedTuple):
    """A plan, and the stamps of its piece until it was made, without `posted_at`."""

    moves: Descriptors | Blocks
    before: tuple[float, float, float, float]


class _Post(NamedTuple):
    delivery: DeliveryId
    seq: int
    num_bytes: int
    num_descriptors: int
    stamps: Stamps
    late_s: float


@dataclass(slots=True)
class PathTotals:
    """Totals of posts to pages, or to staging slots."""

    num_posts: int = 0
    num_bytes: int = 0


class Submit:
    """Posts planned pieces."""

    def __init__(self, context: StageContext[ev.PrefillEvent], backend: Backend, agents: PeerAgents) -> None:
        self._context = context
        self._backend = backend
        self._agents = agents
        self._in_band = backend.capabilities.in_band_notices
        self._posts: dict[int, _Post] = {}
        self._num_posts = 0
        self._has_lingered = False
        self.direct, self.packed = PathTotals(), PathTotals()
        self.totals = WriteTotals()

    @property
    def num_posted(self) -> int:
        """Number of posts in flight."""
        return len(self._posts)

    @property
    def may_still_land(self) -> bool:
        """Whether a post is in flight or has lingered, so that bytes may still land. Also valid for a broken rank."""
        return self._has_lingered or bool(self._posts)

    def counts(self) -> PostCounts:
        """Count what was posted so far."""
        return PostCounts(
            posted=len(self._posts),
            packed_posts=self.packed.num_posts,
            packed_bytes=self.packed.num_bytes,
            direct_posts=self.direct.num_posts,
            direct_bytes=self.direct.num_bytes,
            writes=self.totals.copied(),
        )

    def with_ends(self, peer: PeerId | None, message: Message) -> Message:
        """Add the sound connections to the peer to a Pong that must list them."""
        if peer is None or not isinstance(message, Pong) or not message.asks_ends:
            return message
        return replace(message, ends=self._backend.ends_to(self._agents.find_name(peer))[:MAX_ENDS])

    def post(self, delivery: DeliveryId, seq: int, plan: TimedPlan, notice: Notice) -> None:
        """Post a piece, with its notice if the transport delivers those in band, and dispatch PostEnded at its end."""
        moves = plan.moves
        post_id = self._num_posts
        self._num_posts += 1
        totals = self.direct if notice.staged is None else self.packed
        totals.num_posts += 1
        totals.num_bytes += notice.num_bytes
        stamps = Stamps(*plan.before, self._context.now())
        late_s = self._context.pulse.late_s
        self._posts[post_id] = _Post(delivery, seq, notice.num_bytes, len(moves.src), stamps, late_s)
        payload = encode(replace(notice, stamps=stamps)) if self._in_band else b""
        post = self._backend.post_blocks if isinstance(moves, Blocks) else self._backend.post
        try:
            post(post_id, self._agents.find_name(delivery.peer), moves, payload)  # type: ignore[arg-type] # distinguished above
        except BackendError as error:
            self.handle_event(PostEnded(post_id, str(error)))

    def handle_event(self, event: BackendEvent) -> None:
        """Handle a transport event. Events of unknown or ended posts are only counted."""
        match event:
            case PostEnded(post_id, error, lingers):
                post = self._posts.pop(post_id, None)
                if post is None:
                    self._context.anomalies.count("end_of_unknown_post", post_id=post_id, detail=error)
                    return
                self._has_lingered |= lingers
                delivery, seq, num_bytes, num_descriptors, stamps, late_s = post
                held_s = self._context.pulse.late_s - late_s  # by the engine, not by the transport
                now = self._context.now()
                took_s = max(0.0, now - stamps.posted_at - held_s)
                self._context.times.stages[Stage.SUBMIT].add(took_s)
                self.totals.descriptors.add(num_descriptors)
                failure = None
                if error is not None:
                    failure = self._context.failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, error)
                elif num_bytes and took_s:
                    self.totals.bytes_per_second.add(num_bytes / took_s)
                if not self._in_band:
                    stamps = replace(stamps, written_at=now)
                self._context.dispatch(ev.PostEnded(delivery, seq, failure, lingers, stamps))
            case PostInDoubt(post_id, error):
                post = self._posts.get(post_id)
                if post is None:
                    self._context.anomalies.count("doubt_of_unknown_post", post_id=post_id, detail=error)
                    return
                delivery, seq, *_ = post
                failure = self._context.failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, error)
                self._context.dispatch(ev.PostInDoubt(delivery, seq, failure))
            case _:
                self._context.anomalies.count("notice_on_prefill_rank")
