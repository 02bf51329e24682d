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

    Args:
        agent: NIXL's.
        peer: Whose endpoint it is.
    """

    def __init__(self, agent: Any, peer: str) -> None:
        self._agent = agent
        self._peer = peer
        self._lists: BlockLists | None = None
        self._handles: list[Any] = []

    def of(self, lists: BlockLists, kinds: tuple[str, str], release: Callable[..., object]) -> tuple[Any, Any]:
        """Give the handles of both lists.

        Args:
            lists: What is counted.
            kinds: Of memory, here and at the peer.
            release: Makes the call that gives up former handles.
        """
        if self._lists is not lists:
            self.drop(release)
            self._handles.append(self._agent.prep_xfer_dlist(MY_LISTS, lists.src, kinds[0]))
            self._handles.append(self._agent.prep_xfer_dlist(self._peer, lists.dst, kinds[1]))
            self._lists = lists
        src, dst = self._handles
        return src, dst

    def drop(self, release: Callable[..., object]) -> None:
        """Give the handles up."""
        self._lists = None
        for handle in self._handles:
            release(self._agent.release_dlist_handle, handle)
        self._handles.clear()
