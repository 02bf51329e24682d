"""Maps decode ranks to their transport agents. Ranks of one process may share an agent."""

from kvflow.errors import BackendError
from kvflow.stages.context import agent_name
from kvflow.wire.messages import PeerId

__all__ = ["PeerAgents"]


class PeerAgents:
    """The agents that the transport is connected to or connecting to, and the peers that use them."""

    def __init__(self) -> None:
        self._of: dict[PeerId, str] = {}
        self._users: dict[str, dict[PeerId, bytes]] = {}

    def find_name(self, peer: PeerId) -> str:
        """Return the name of a peer's agent."""
        return self._of.get(peer) or agent_name(peer)

    def add(self, peer: PeerId, shared: str | None, metadata: bytes) -> str:
        """Record a peer's agent.

        Args:
            peer: A decode rank.
            shared: Name of its agent, if it shares one.
            metadata: The agent's metadata. A peer that shares the agent of another peer must send the same metadata.

        Returns:
            The name of the agent.

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
