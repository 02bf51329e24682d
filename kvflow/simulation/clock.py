"""Virtual time: what is to happen, in order. Nothing ever waits."""

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Schedule"]


class Schedule:
    """Calls by time, the earliest first; equal times go in the order in which they were asked for.

    Attributes:
        now: Virtual seconds since the run began.
        num_steps: Calls so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_steps = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call at a time, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call after a while."""
        self.at(self.now + delay_s, call, *args)

    def run_until(self, end: float) -> None:
        """Let everything happen that is due until then."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, call, args = heapq.heappop(heap)
            self.num_steps += 1
            call(*args)
        self.now = max(self.now, end)
