"""The context that all stages of a rank share, and the transport agents of its peers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvflow.aio.pulse import Pulse
from kvflow.config import RankConfig
from kvflow.control.reading import ReadingContext
from kvflow.errors import BackendError, FailureReason, Stage
from kvflow.observe.times import StageTimes
from kvflow.wire.messages import Failure, PeerId

__all__ = ["PeerAgents", "StageContext", "agent_name"]

Event = TypeVar("Event")


@dataclass(frozen=True)
class StageContext(ReadingContext, Generic[Event]):
    """What the stages of one rank share, besides what its connections do.

    Attributes:
        now: Returns monotonic time in seconds, as `ports.now`.
        dispatch: Passes an event to the core. Never raises.
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


class PeerAgents:
    """The agents that the transport is connected to or connecting to, and the peers that use them."""

    def __init__(self) -> None:
        self._of: dict[PeerId, str] = {}
        self._users: dict[str, dict[PeerId, bytes]] = {}

    def find_name(self, peer: PeerId) -> str:
        """Return the name of a peer's agent."""
        return self._of.get(peer) or agent_name(peer)

    def add(self, peer: PeerId, shared: str | None, metadata: bytes) -> str:
        """Record a peer's agent, which may be shared, and return its name.

        Raises:
            BackendError: The peer already has a different agent, or another peer has this one with different metadata.
        """
        agent = shared or agent_name(peer)
        if self._of.get(peer, agent) != agent:
            raise BackendError("peer previously had a different transport agent", peer=str(peer), agent=agent)
        users = self._users.get(agent, {})
        if any(other != peer and known != metadata for other, known in users.items()):
            raise BackendError(
                "another peer has the same transport agent, with different memory", peer=str(peer), agent=agent
            )
        self._of[peer] = agent
        self._users.setdefault(agent, {})[peer] = metadata
        return agent

    def remove(self, peer: PeerId) -> str | None:
        """Remove a peer, and return its agent, to be disconnected; None if the peer has none or others share it."""
        agent = self._of.pop(peer, None)
        if agent is None:
            return None
        users = self._users[agent]
        del users[peer]
        if users:
            return None
        del self._users[agent]
        return agent
