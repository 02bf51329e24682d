"""When prefill takes back blocks of finished requests, because others cannot run without them. Pure.

Blocks of a finished request are pinned until decode has read them. Two rules keep pinned blocks from stopping prefill:
those that no decode server has asked for, which may be dead, take at most a share of the pool; and if decode already
holds blocks for a request that cannot run here, prefill gives up requests for which decode has none. Otherwise each
server would wait for blocks of the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["RECLAIM_S", "BlockShortage"]

UNASKED_SHARE: Final = 0.5
"""Share of the pool for finished requests that no decode server has asked for, while others lack blocks."""

RECLAIM_S: Final = 1.0
"""How long a decode server may take to ask, and two servers may wait for each other."""

ROUND_S: Final = 0.1
"""Time for the blocks that were just reclaimed to come back."""


@dataclass
class _Pinned:
    """A finished request whose blocks are pinned.

    Attributes:
        num_blocks: Number of its blocks.
        since: When it finished.
        is_tried: It was ordered to be given up if no decode server has asked for it.
    """

    num_blocks: int
    since: float
    is_tried: bool = False


class BlockShortage:
    """Tracks which requests lack blocks, and which finished ones could be given up."""

    def __init__(self) -> None:
        self._short: dict[str, None] = {}
        self._pinned: dict[str, _Pinned] = {}
        self._asked: dict[str, None] = {}
        self._crossed_at: float | None = None
        self._num_next = 1

    @property
    def is_short(self) -> bool:
        """Whether requests have looked for blocks in this step, and found none."""
        return bool(self._short)

    def wants_blocks(self, request_id: str) -> None:
        """Note that vLLM looks for blocks for a request."""
        self._short[request_id] = None

    def has_blocks(self, request_id: str) -> None:
        """Note that it has found them."""
        self._short.pop(request_id, None)

    def note_asked(self, request_ids: Iterable[str]) -> None:
        """Note that decode has blocks for requests."""
        self._asked.update(dict.fromkeys(request_ids))

    def pin(self, request_id: str, num_blocks: int, now: float) -> None:
        """Note that a request has finished, and its blocks wait for decode."""
        self._pinned[request_id] = _Pinned(num_blocks, now)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have no blocks any more."""
        for request_id in request_ids:
            self._pinned.pop(request_id, None)
            self._asked.pop(request_id, None)
            self._short.pop(request_id, None)

    def reclaim(self, num_blocks: int, now: float) -> dict[str, bool]:
        """Return the finished requests to give up, after each attempt of vLLM to schedule; oldest first.

        The value is whether one is given up even if a decode server waits for it, without blocks. The pool has
        `num_blocks`.
        """
        short, self._short = self._short, {}
        is_crossed = any(request_id in self._asked for request_id in short)
        unasked = {it: one for it, one in self._pinned.items() if it not in self._asked}
        if not is_crossed:
            self._crossed_at, self._num_next = None, 1
        elif self._crossed_at is None:
            self._crossed_at = now
        elif now >= self._crossed_at + RECLAIM_S:
            found = dict.fromkeys(list(unasked)[: self._num_next], True)
            self._crossed_at, self._num_next = now - RECLAIM_S + ROUND_S, 2 * self._num_next
            return found
        return self._over_share(unasked, num_blocks, now) if short else {}

    def _over_share(self, unasked: dict[str, _Pinned], num_blocks: int, now: float) -> dict[str, bool]:
        excess = sum(one.num_blocks for one in unasked.values()) - num_blocks * UNASKED_SHARE
        found = {}
        for request_id, one in unasked.items():
            if excess > 0 and now >= one.since + RECLAIM_S:
                excess -= one.num_blocks
                if not one.is_tried:
                    one.is_tried = True
                    found[request_id] = False
        return found
