"""A queue that processes bursts of items in small batches."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["YieldingQueue"]

Item = TypeVar("Item")


class YieldingQueue(Generic[Item]):
    """Processes items in the order in which they arrive, a few in each turn of the event loop.

    Args:
        on_error: Called with exceptions from `take`; processing continues with the next item.
        at_once: Maximum number of items processed before other callbacks of the event loop get their turn.

    Attributes:
        take: Called for each item; for the first ones from inside `put_items`. Set it before there are any.
    """

    take: Callable[[Item], None]

    def __init__(self, on_error: Callable[[Exception], None], at_once: int) -> None:
        self._on_error = on_error
        self._at_once = at_once
        self._waiting: deque[Item] = deque()
        self._is_scheduled = False

    def put_items(self, items: Iterable[Item]) -> None:
        """Add items, and process some at once unless others are waiting. Call it on the event loop."""
        self._waiting.extend(items)
        if not self._is_scheduled:
            self._take_some()

    def take_all(self) -> None:
        """Process all waiting items."""
        while self._waiting:
            self._take_some()

    def _take_some(self) -> None:
        for _ in range(min(self._at_once, len(self._waiting))):
            try:
                self.take(self._waiting.popleft())
            except Exception as error:  # noqa: BLE001 - passed on
                self._on_error(error)
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._take_some)
