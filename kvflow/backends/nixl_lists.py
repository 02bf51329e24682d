"""Block lists as NIXL prepares them, for one endpoint.

A list is prepared in microseconds, however long its runs are, and neighbouring positions are merged by the library. Its
handles end with the endpoint, and a write that was made with them does not need them any more.

Source: nixl 1.5.1 (UCX 1.23) on Linux, host memory.
"""

from collections.abc import Callable
from typing import Any

from kvflow.geometry.blocks import BlockLists

__all__ = ["PreparedLists"]

MY_LISTS = "NIXL_INIT_AGENT"
"""How NIXL calls lists of the agent's own memory."""


class PreparedLists:
    """The lists that the last post to a peer counted, prepared. Every method runs on the owner thread.

    NIXL's agent is given to each call and not kept: it is destroyed by letting go of it.

    Args:
        peer: Whose endpoint it is.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._lists: BlockLists | None = None
        self._handles: list[Any] = []

    def of(
        self, agent: Any, lists: BlockLists, kinds: tuple[str, str], release: Callable[..., object]
    ) -> tuple[Any, Any]:
        """Give the handles of both lists.

        Args:
            agent: NIXL's.
            lists: What is counted.
            kinds: Of memory, here and at the peer.
            release: Makes the call that gives up former handles.
        """
        if self._lists is not lists:
            self.drop(agent, release)
            self._handles.append(agent.prep_xfer_dlist(MY_LISTS, lists.src, kinds[0]))
            self._handles.append(agent.prep_xfer_dlist(self._peer, lists.dst, kinds[1]))
            self._lists = lists
        src, dst = self._handles
        return src, dst

    def drop(self, agent: Any, release: Callable[..., object]) -> None:
        """Give the handles up."""
        self._lists = None
        for handle in self._handles:
            release(agent.release_dlist_handle, handle)
        self._handles.clear()
