"""What the handshake of a decode rank may take from a prefill rank's transport. Pure."""

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

__all__ = ["HELLOS_AT_ONCE", "MAX_CONNECT_S", "UnclosedAgents", "agent_denial"]

HELLOS_AT_ONCE: Final = 8
"""Hellos that a prefill rank handles concurrently for one principal; further ones wait.

Some transports wait seconds for a peer that does not answer. With a limit per principal, others are not delayed.
"""

MAX_CONNECT_S: Final = 120.0
"""Longest time that connecting the transport may take, in seconds, however long the peer would wait."""

MAX_UNCLOSED: Final = 256
"""Maximum number of disconnected agents that still hold file descriptors, until their processes end. One instance may
have as many as are left for all others."""

MAX_GONE: Final = 4_096
"""Maximum number of disconnected agents whose instance is remembered."""


def agent_denial(agent: str, own: Collection[str], *, is_ours: bool) -> str:
    """Return why a peer must not have a transport agent; empty if it may.

    Its data would be written to this process's own pools. Knowing the metadata of an agent of this process proves
    nothing, because peers receive it. `own` are these agents; a transport may append "#" and a number. If `is_ours`,
    the peer is a rank of this process that shares the agent.
    """
    if is_ours or not any(agent == name or agent.startswith(f"{name}#") for name in own):
        return ""
    return "Hello names a transport agent of this process"


class UnclosedAgents:
    """The instances of disconnected agents, some of which still hold file descriptors."""

    def __init__(self) -> None:
        self._instances: OrderedDict[str, str] = OrderedDict()

    def note_gone(self, agent: str, instance: str) -> None:
        """Note that an agent was disconnected."""
        self._instances[agent] = instance
        self._instances.move_to_end(agent)
        if len(self._instances) > MAX_GONE:
            self._instances.popitem(last=False)

    def denial(self, agent: str, instance: str, unclosed: Collection[str]) -> str:
        """Return why another agent of an instance must not be connected; empty if it may.

        `unclosed` are the disconnected agents that still hold file descriptors.
        """
        num_taken = sum(self._instances.get(one) == instance for one in unclosed)
        if not unclosed or agent in unclosed or num_taken + 1 <= MAX_UNCLOSED - len(unclosed):
            return ""
        return f"too many disconnected transport agents still hold connections: {num_taken} of {len(unclosed)} in all"
