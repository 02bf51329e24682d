"""Where a NIXL agent writes to, what waits to be written there, and what it has begun to write.

A native write costs several calls, and the interpreter's lock for each, however small it is. So small writes to one
peer that have come to wait while the owner thread was busy are joined: they begin, end and fail as one.
"""

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvflow.backends.base import PostEnded, PostInDoubt
from kvflow.backends.nixl_lists import PreparedLists
from kvflow.geometry.blocks import Blocks
from kvflow.geometry.plan import Descriptors

__all__ = ["Connection", "Outbox", "Post", "Write", "joined"]

MAX_JOINED: Final = 16
"""Writes that are joined into one."""

MAX_JOINED_BYTES: Final = 16 * 2**20
"""Their bytes. The first of them is told to have ended when all of them have, so they must not be many."""

MAX_SMALL_BYTES: Final = 4 * 2**20
"""A larger write goes alone: beside its bytes its calls are cheap, and others would only wait for it."""


@dataclass(eq=False)
class Write:
    """A post that has not begun.

    Attributes:
        notice: Empty for none.
    """

    post_id: int
    moves: Descriptors | Blocks
    notice: bytes

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes that it moves."""
        return self.moves.num_bytes

    def goes_with(self, other: "Write") -> bool:
        """Whether two writes to one peer may be joined."""
        mine, theirs = (write.moves.lists if isinstance(write.moves, Blocks) else None for write in (self, other))
        return mine is theirs and max(self.num_bytes, other.num_bytes) <= MAX_SMALL_BYTES


class Outbox:
    """What waits to be written to a peer, as long as it stays connected. One thread puts in, and one takes out.

    Args:
        peer: Its agent name.
        kind: Of the memory that it has registered.
    """

    def __init__(self, peer: str, kind: str) -> None:
        self.peer = peer
        self.kind = kind
        self._waiting: deque[Write] = deque()

    def put(self, write: Write) -> None:
        """Let a write wait behind all others."""
        self._waiting.append(write)

    def take(self) -> list[Write]:
        """Give the write whose turn it is, with those behind it that are joined with it; nothing if none waits."""
        if not self._waiting:
            return []
        taken = [self._waiting.popleft()]
        while self._waiting and self._fits(taken):
            taken.append(self._waiting.popleft())
        return taken

    def _fits(self, taken: Sequence[Write]) -> bool:
        """Whether what is next may be joined with what was taken."""
        num_bytes = sum(write.num_bytes for write in (*taken, self._waiting[0]))
        return len(taken) < MAX_JOINED and num_bytes <= MAX_JOINED_BYTES and self._waiting[0].goes_with(taken[0])


def joined(writes: Sequence[Write]) -> Descriptors | Blocks:
    """Give what some writes that go together move, one after the other."""
    first = writes[0].moves
    if len(writes) == 1:
        return first
    src = np.concatenate([write.moves.src for write in writes])
    dst = np.concatenate([write.moves.dst for write in writes])
    if isinstance(first, Blocks):
        return Blocks(first.lists, src, dst, sum(write.num_bytes for write in writes))
    return Descriptors(src, dst)


@dataclass(eq=False)
class Connection:
    """One endpoint to a peer.

    Attributes:
        blob: The metadata that it was made of.
        lists: For writes that name blocks.
        has_erred: Some post over it could not be begun or carried out.
        has_failed: Every post over it raises from now on.
    """

    peer: str
    blob: bytes
    lists: PreparedLists
    has_erred: bool = False
    has_failed: bool = False


@dataclass(eq=False)
class Post:
    """A native write that has begun, of one post or of several that were joined.

    Attributes:
        number: How many began before it on this agent.
        fence: Once in doubt: the number of the first one that can prove that this one has ended.
    """

    post_ids: tuple[int, ...]
    connection: Connection
    handle: Any
    number: int
    fence: int = 0
    error: str = ""

    def in_doubt(self) -> list[PostInDoubt]:
        """Say of each post that it may or may not have ended."""
        return [PostInDoubt(post_id, self.error) for post_id in self.post_ids]

    def ended(self, error: str | None, *, lingers: bool = False) -> list[PostEnded]:
        """Say of each post that it has ended."""
        return [PostEnded(post_id, error, lingers) for post_id in self.post_ids]
