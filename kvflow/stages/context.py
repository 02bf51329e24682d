"""What every stage of a rank is given."""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvflow.config import RankConfig
from kvflow.errors import FailureReason, Stage, ThreadShortage
from kvflow.observe.logs import BoundLogger
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import AnomalyLog
from kvflow.ports import Ports
from kvflow.wire.messages import Failure, PeerId

__all__ = ["StageContext", "agent_name"]

Event = TypeVar("Event")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StageContext(Generic[Event]):
    """Shared by the stages of one rank.

    Attributes:
        me: This incarnation of this rank.
        config: Its settings.
        ports: The world around it.
        now: Gives monotonic seconds, as its ports do.
        dispatch: Tells the core what has happened. Never raises.
        start_task: Starts a task that lives no longer than the rank.
        times: Where to note how long things took.
        log: Where to say what happened.
        anomalies: Where to say what was ignored.
    """

    me: PeerId
    config: RankConfig
    ports: Ports
    now: Callable[[], float]
    dispatch: Callable[[Event], None]
    start_task: Callable[..., None]
    times: StageTimes
    log: BoundLogger
    anomalies: AnomalyLog

    def failure(self, reason: FailureReason, stage: Stage, detail: str) -> Failure:
        """Describe a failure that this rank was the first to notice."""
        return Failure(reason, stage, str(self.me.rank), detail)

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Call a function beside the event loop, or on it if no thread can be had.

        Raises:
            BaseException: What the function raises.
        """
        result: Awaitable[Result] = self.ports.run_in_thread(function)
        try:
            return await result
        except ThreadShortage as error:
            self.anomalies.count("thread_shortage", detail=str(error))
            return function()


@functools.lru_cache(maxsize=4096)
def agent_name(peer: PeerId) -> str:
    """Return the name under which an incarnation of a rank is known to the transport."""
    return str(peer)
