"""Connections of a NIXL agent, the writes that wait for one, and the writes that have begun.

A native write costs several calls, and the interpreter's lock for each, however small it is. So small writes to one
peer that have queued up while the owner thread was busy are joined: they begin, end and fail as one.
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvflow.backends.base import PostEnded, PostInDoubt
from kvflow.geometry.blocks import BlockLists, Blocks
from kvflow.geometry.layout import MemoryKind
from kvflow.geometry.plan import Descriptors

__all__ = ["Connection", "Post", "PostQueue", "PreparedLists", "Write", "joined"]

MAX_JOINED: Final = 16
"""Most writes that are joined into one."""

MAX_JOINED_BYTES: Final = 16 * 2**20
"""Their bytes. The first of them is reported to have ended only when all of them have, so they must not be many."""

MAX_SMALL_BYTES: Final = 4 * 2**20
"""A larger write goes alone: compared with its bytes its calls are cheap, and others would only wait for it."""

MY_LISTS: Final = "NIXL_INIT_AGENT"
"""NIXL's name for lists of the agent's own memory."""


@dataclass(eq=False)
class Write:
    """A post that has not begun.

    Attributes:
        kinds: Of memory, here and at the peer.
        notice: Empty for none.
    """

    post_id: int
    moves: Descriptors | Blocks
    kinds: tuple[MemoryKind, MemoryKind]
    notice: bytes

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes that it moves."""
        return self.moves.num_bytes

    def goes_with(self, other: "Write") -> bool:
        """Return whether two writes to one peer may be joined."""
        mine, theirs = (write.moves.lists if isinstance(write.moves, Blocks) else None for write in (self, other))
        return mine is theirs and self.kinds == other.kinds and max(self.num_bytes, other.num_bytes) <= MAX_SMALL_BYTES


class PostQueue:
    """Writes that wait to begin, for as long as their peer stays connected. One thread puts in, and one takes out.

    Args:
        peer: Its agent name.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._waiting: deque[Write] = deque()

    def put(self, write: Write) -> None:
        """Queue a write."""
        self._waiting.append(write)

    def take(self) -> list[Write]:
        """Take the next write, with those behind it that are joined with it; empty if none waits."""
        if not self._waiting:
            return []
        taken = [self._waiting.popleft()]
        while self._waiting and self._fits(taken):
            taken.append(self._waiting.popleft())
        return taken

    def _fits(self, taken: Sequence[Write]) -> bool:
        """Return whether the next write may be joined with those that were taken."""
        num_bytes = sum(write.num_bytes for write in (*taken, self._waiting[0]))
        return len(taken) < MAX_JOINED and num_bytes <= MAX_JOINED_BYTES and self._waiting[0].goes_with(taken[0])


def joined(writes: Sequence[Write]) -> Descriptors | Blocks:
    """Concatenate what some writes that are joined move."""
    first = writes[0].moves
    if len(writes) == 1:
        return first
    src = np.concatenate([write.moves.src for write in writes])
    dst = np.concatenate([write.moves.dst for write in writes])
    if isinstance(first, Blocks):
        return Blocks(first.lists, src, dst, sum(write.num_bytes for write in writes))
    return Descriptors(src, dst)


class PreparedLists:
    """The block lists of the last post over a connection, as NIXL prepares them. Used on the owner thread.

    A list is prepared in microseconds, however long its runs are, and neighbouring positions are merged by the library.
    Its handles end with the endpoint, and a write that was made with them does not need them any more. NIXL's agent is
    passed to each call and not kept, because dropping the last reference is what destroys it.

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
        """Return the handles of both lists, which are prepared if they are not those of the last call.

        Args:
            agent: NIXL's.
            lists: To prepare.
            kinds: Of memory, here and at the peer.
            release: Makes the call that releases former handles.
        """
        if self._lists is not lists:
            self.drop(agent, release)
            self._handles.append(agent.prep_xfer_dlist(MY_LISTS, lists.src, kinds[0]))
            self._handles.append(agent.prep_xfer_dlist(self._peer, lists.dst, kinds[1]))
            self._lists = lists
        src, dst = self._handles
        return src, dst

    def drop(self, agent: Any, release: Callable[..., object]) -> None:
        """Release the handles."""
        self._lists = None
        for handle in self._handles:
            release(agent.release_dlist_handle, handle)
        self._handles.clear()


@dataclass(eq=False)
class Connection:
    """One native endpoint to a peer.

    Attributes:
        agent: The agent of NIXL that has it.
        blob: The metadata that it was made from.
        lists: For writes that name blocks.
        is_used: A post over it has ended well.
        has_erred: A post over it could not be begun or carried out.
        has_failed: Every post over it raises from now on.
        opened: Connections of TCP that were opened for it, and their other ends, by inode.
        opened_at: Monotonic seconds.
        is_written: The peer was heard to write here.
    """

    peer: str
    agent: Any
    blob: bytes
    lists: PreparedLists
    opened: Mapping[int, tuple[bytes, int]] = field(default_factory=dict)
    opened_at: float = 0.0
    is_used: bool = False
    has_erred: bool = False
    has_failed: bool = False
    is_written: bool = False


@dataclass(eq=False)
class Post:
    """A native write that has begun, of one post or of several that were joined.

    Attributes:
        number: Counts the posts of the agent in the order in which they began.
        fence: Once it is in doubt, the number of the first post that can prove that this one has ended.
    """

    post_ids: tuple[int, ...]
    connection: Connection
    handle: Any
    number: int
    fence: int = 0
    error: str = ""

    def in_doubt(self) -> list[PostInDoubt]:
        """Return the event for each post that nobody knows whether it has ended."""
        return [PostInDoubt(post_id, self.error) for post_id in self.post_ids]

    def ended(self, error: str | None, *, lingers: bool = False) -> list[PostEnded]:
        """Return the event for each post that it has ended."""
        return [PostEnded(post_id, error, lingers) for post_id in self.post_ids]
