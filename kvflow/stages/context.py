"""The context that all stages of a rank share."""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvflow.aio.pulse import Pulse
from kvflow.config import RankConfig
from kvflow.errors import FailureReason, Stage, ThreadShortage
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import AnomalyLog
from kvflow.ports import Ports
from kvflow.wire.messages import Failure, PeerId

__all__ = ["StageContext", "agent_name"]

Event = TypeVar("Event")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StageContext(Generic[Event]):
    """What the stages of one rank share.

    Attributes:
        me: This incarnation of this rank.
        config: The rank's settings.
        ports: The rank's external dependencies.
        now: Returns monotonic time in seconds, as `ports.now`.
        dispatch: Passes an event to the core. Never raises.
        start_task: Starts a task that ends with the rank at the latest.
        times: Records how long the stages take.
        pulse: Measures how long the event loop is held up while transfers are open.
        anomalies: Counts and logs ignored messages.
    """

    me: PeerId
    config: RankConfig
    ports: Ports
    now: Callable[[], float]
    dispatch: Callable[[Event], None]
    start_task: Callable[..., None]
    times: StageTimes
    pulse: Pulse
    anomalies: AnomalyLog

    def failure(self, reason: FailureReason, stage: Stage, detail: str) -> Failure:
        """Return a Failure that this rank was the first to detect."""
        return Failure(reason, stage, str(self.me.rank), detail)

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Call a function in a worker thread, or on the event loop if no thread can be started.

        Raises:
            BaseException: Any exception of the function.
        """
        result: Awaitable[Result] = self.ports.run_in_thread(function)
        try:
            return await result
        except ThreadShortage as error:
            self.anomalies.count("thread_shortage", detail=str(error))
            return function()


@functools.lru_cache(maxsize=4096)
def agent_name(peer: PeerId) -> str:
    """Return the transport's name for an incarnation of a rank."""
    return str(peer)
