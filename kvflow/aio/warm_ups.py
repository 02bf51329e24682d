"""Runs the code paths of waiting items in advance, so that they are fast when needed."""

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["WarmUps"]

TRIES: Final = 8
"""Maximum number of items tried in one turn until one has something to warm up."""

Item = TypeVar("Item")


class WarmUps(Generic[Item]):
    """Warms up one item at a time, in rotation, after each interval without activity. Use it on the event loop.

    Args:
        warm_up: Warms up an item; returns whether there was something to do.
        interval_s: Seconds between two warm-ups; None for none.
    """

    def __init__(self, warm_up: Callable[[Item], bool], interval_s: float | None) -> None:
        self._warm_up = warm_up
        self._interval_s = interval_s
        self._items: dict[Item, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_warm = False

    def add(self, item: Item) -> None:
        """Warm up an item until it is removed."""
        self._items[item] = None
        if self._timer is None:
            self._schedule()

    def remove(self, item: Item) -> None:
        """Stop warming up an item. Does nothing if it was not added."""
        self._items.pop(item, None)
        if not self._items:
            self.close()

    def skip(self) -> None:
        """Skip the next warm-up, because the real code path has just run."""
        self._is_warm = True

    def close(self) -> None:
        """Stop all warm-ups. May be called twice."""
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        if self._interval_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._take_turn)

    def _take_turn(self) -> None:
        self._schedule()
        is_warm, self._is_warm = self._is_warm, False
        if is_warm:
            return
        for _ in range(min(TRIES, len(self._items))):
            item = next(iter(self._items))
            del self._items[item]
            self._items[item] = None  # move it to the end
            if self._warm_up(item):
                return
