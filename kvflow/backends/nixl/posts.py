"""Connections of a NIXL agent, the writes that are waiting for them, and the notices that travel with these.

A native write costs several calls, each of which takes the GIL, however small the write is. Small writes to one peer
that were queued while the owner thread was busy are therefore joined: they start, end and fail as one.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvflow.backends.observed_path import ObservedPath
from kvflow.errors import RemoteProtocolError
from kvflow.geometry.blocks import BlockLists, Blocks
from kvflow.geometry.memory import MemoryKind
from kvflow.geometry.plan import Descriptors

__all__ = ["MAX_NOTICES", "NativeEndpoint", "PostQueue", "Write", "joined", "pack_notices", "unpack_notices"]

MAX_JOINED: Final = 16
"""Maximum number of writes joined into one."""

MAX_JOINED_BYTES: Final = 16 * 2**20
"""Maximum total size of joined writes. The first is reported as ended only when all have ended, so keep it small."""

MAX_SMALL_BYTES: Final = 4 * 2**20
"""Larger writes are not joined: their calls are cheap compared with their bytes, and they would delay the others."""

LENGTH_BYTES: Final = 4
MAX_NOTICES: Final = 64
"""Maximum number of notices in a payload, more than are ever joined. Limits the memory a hostile payload can take."""

MY_LISTS: Final = "NIXL_INIT_AGENT"
"""NIXL's name for lists of the agent's own memory."""


@dataclass(eq=False)
class Write:
    """A post that has not started, with the memory kinds here and at the peer, and an empty notice for none."""

    post_id: int
    moves: Descriptors | Blocks
    kinds: tuple[MemoryKind, MemoryKind]
    notice: bytes

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes to move."""
        return self.moves.num_bytes

    def goes_with(self, other: "Write") -> bool:
        """Return whether two writes to one peer may be joined."""
        mine, theirs = (write.moves.lists if isinstance(write.moves, Blocks) else None for write in (self, other))
        return mine is theirs and self.kinds == other.kinds and max(self.num_bytes, other.num_bytes) <= MAX_SMALL_BYTES


class PostQueue:
    """Writes that wait to start, for one connection of a peer. One thread puts, and one takes."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._waiting: deque[Write] = deque()

    def add_write(self, write: Write) -> None:
        """Queue a write."""
        self._waiting.append(write)

    def take_writes(self) -> list[Write]:
        """Take the next write and the ones after it that can be joined with it; empty if none is waiting."""
        if not self._waiting:
            return []
        taken = [self._waiting.popleft()]
        while self._waiting and self._fits(taken):
            taken.append(self._waiting.popleft())
        return taken

    def _fits(self, taken: Sequence[Write]) -> bool:
        """Return whether the next write may be joined with those already taken."""
        num_bytes = sum(write.num_bytes for write in (*taken, self._waiting[0]))
        return len(taken) < MAX_JOINED and num_bytes <= MAX_JOINED_BYTES and self._waiting[0].goes_with(taken[0])


def joined(writes: Sequence[Write]) -> Descriptors | Blocks:
    """Concatenate the descriptors or blocks of writes that are joined."""
    first = writes[0].moves
    if len(writes) == 1:
        return first
    src = np.concatenate([write.moves.src for write in writes])
    dst = np.concatenate([write.moves.dst for write in writes])
    if isinstance(first, Blocks):
        return Blocks(first.lists, src, dst, sum(write.num_bytes for write in writes))
    return Descriptors(src, dst)


def pack_notices(notices: Iterable[bytes]) -> bytes:
    """Encode up to `MAX_NOTICES` notices in order, each after its length. Empty ones stand for none and are skipped."""
    return b"".join(len(notice).to_bytes(LENGTH_BYTES, "little") + notice for notice in notices if notice)


def unpack_notices(payload: bytes) -> list[bytes]:
    """Decode the notices of a payload, in order.

    If one is truncated or empty, or there are too many, it is not from `pack_notices`: raise RemoteProtocolError.
    """
    notices: list[bytes] = []
    start = 0
    while start < len(payload):
        body = start + LENGTH_BYTES
        end = body + int.from_bytes(payload[start:body], "little")
        if not body < end <= len(payload) or len(notices) == MAX_NOTICES:
            raise RemoteProtocolError("notices are malformed", num_bytes=len(payload), offset=start)
        notices.append(payload[body:end])
        start = end
    return notices


@dataclass(eq=False)
class NativeEndpoint:
    """One native endpoint to a peer. Used on the owner thread.

    Attributes:
        agent: The NIXL agent that owns the endpoint.
        blob: The metadata it was created from.
        is_used: A post over it has succeeded.
        has_erred: A post over it has failed or could not be started.
        has_failed: Every further post over it raises.
        opened: Remote addresses of the TCP connections opened for it, by inode.
        opened_at: Monotonic seconds.
        is_written: True if the peer has written here.
    """

    peer: str
    agent: Any
    blob: bytes
    opened: Mapping[int, tuple[bytes, int]] = field(default_factory=dict)
    opened_at: float = 0.0
    is_used: bool = False
    has_erred: bool = False
    has_failed: bool = False
    is_written: bool = False
    path: ObservedPath = field(default_factory=ObservedPath)
    _lists: BlockLists | None = None
    _handles: list[Any] = field(default_factory=list)

    def prepare(self, lists: BlockLists, kinds: tuple[str, str], release: Callable[..., object]) -> tuple[Any, Any]:
        """Return NIXL's handles of both lists, preparing them unless they are those of the last post.

        Preparing a list takes microseconds, however long its runs are, and the library merges neighbouring positions.
        The handles end with the endpoint; a write made with them does not need them any more. The calls that release
        the previous ones are run by `release`.
        """
        if self._lists is not lists:
            self.drop_lists(release)
            self._handles.append(self.agent.prep_xfer_dlist(MY_LISTS, lists.src, kinds[0]))
            self._handles.append(self.agent.prep_xfer_dlist(self.peer, lists.dst, kinds[1]))
            self._lists = lists
        src, dst = self._handles
        return src, dst

    def drop_lists(self, release: Callable[..., object]) -> None:
        """Release the handles of prepared lists."""
        self._lists = None
        for handle in self._handles:
            release(self.agent.release_dlist_handle, handle)
        self._handles.clear()
