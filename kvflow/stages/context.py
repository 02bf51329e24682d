"""What every stage of a rank is given."""

from collections.abc import Callable
from dataclasses import dataclass

from kvflow.config import RankConfig
from kvflow.errors import FailureReason, Stage
from kvflow.observe.logs import BoundLogger
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import OddityLog
from kvflow.state.events import Event
from kvflow.wire.messages import Failure, PeerId

__all__ = ["StageContext"]


@dataclass(frozen=True)
class StageContext:
    """Shared by the stages of one rank.

    Attributes:
        me: This life of this rank.
        config: Its settings.
        dispatch: Tells the core what has happened, and carries out what follows from it.
        start_task: Starts a task that lives no longer than the rank.
        now: Gives monotonic seconds.
        times: Where to note how long things took.
        log: Where to say what happened.
        oddities: Where to say what was ignored.
    """

    me: PeerId
    config: RankConfig
    dispatch: Callable[[Event], None]
    start_task: Callable[..., None]
    now: Callable[[], float]
    times: StageTimes
    log: BoundLogger
    oddities: OddityLog

    def failure(self, reason: FailureReason, stage: Stage, detail: str) -> Failure:
        """A failure that this rank was the first to notice."""
        return Failure(reason, stage, str(self.me.rank), detail)
