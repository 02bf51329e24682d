"""Which agent of the transport each decode rank has. Ranks of one process may share one."""

from kvflow.errors import BackendError
from kvflow.stages.context import agent_name
from kvflow.wire.messages import PeerId

__all__ = ["PeerAgents"]


class PeerAgents:
    """Agents that the transport is connected to, or about to be, and for whom."""

    def __init__(self) -> None:
        self._of: dict[PeerId, str] = {}
        self._users: dict[str, dict[PeerId, bytes]] = {}

    def of(self, peer: PeerId) -> str:
        """Return the name of a peer's agent."""
        return self._of.get(peer) or agent_name(peer)

    def add(self, peer: PeerId, shared: str | None, metadata: bytes) -> str:
        """Note which agent a peer has.

        Args:
            peer: A decode rank.
            shared: Name of its agent, if it shares one.
            metadata: Of the agent. Whoever says that it has the agent of another rank must know what that has said.

        Returns:
            The name of the agent.

        Raises:
            BackendError: The peer has had another agent, or another peer has this one with other metadata.
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
        """Forget a peer, and give the name of its agent, to be disconnected; None if others have it, or it has none."""
        agent = self._of.pop(peer, None)
        if agent is None:
            return None
        users = self._users[agent]
        del users[peer]
        if users:
            return None
        del self._users[agent]
        return agent
