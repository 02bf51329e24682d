"""The context that all stages of a rank share."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvflow.aio.pulse import Pulse
from kvflow.config import RankConfig
from kvflow.control.reading import ReadingContext
from kvflow.errors import FailureReason, Stage
from kvflow.observe.times import StageTimes
from kvflow.wire.messages import Failure, PeerId

__all__ = ["StageContext", "agent_name"]

Event = TypeVar("Event")


@dataclass(frozen=True)
class StageContext(ReadingContext, Generic[Event]):
    """What the stages of one rank share, besides what its connections do.

    Attributes:
        me: This incarnation of this rank.
        config: The rank's settings.
        now: Returns monotonic time in seconds, as `ports.now`.
        dispatch: Passes an event to the core. Never raises.
        times: Records how long the stages take.
        pulse: Measures how long the event loop is held up while transfers are open.
    """

    me: PeerId
    config: RankConfig
    now: Callable[[], float]
    dispatch: Callable[[Event], None]
    times: StageTimes
    pulse: Pulse

    def failure(self, reason: FailureReason, stage: Stage, detail: str) -> Failure:
        """Return a Failure that this rank was the first to detect."""
        return Failure(reason, stage, str(self.me.rank), detail)


@functools.lru_cache(maxsize=4096)
def agent_name(peer: PeerId) -> str:
    """Return the transport's name for an incarnation of a rank."""
    return str(peer)
