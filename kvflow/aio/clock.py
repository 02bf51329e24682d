"""A task that wakes when the earliest of changing deadlines is reached."""

import math
import time
from collections.abc import Callable

import anyio

__all__ = ["Clock", "now"]


now = time.monotonic
"""Monotonic seconds. Asking the event loop for its own costs more, and it is asked a dozen times for each transfer."""


class Clock:
    """Sleeps until the next deadline, whatever it is by then.

    Args:
        next_deadline: Gives the earliest deadline, in seconds of `now`, or None.
        on_due: Called, on the event loop, when it is reached.
    """

    def __init__(self, next_deadline: Callable[[], float | None], on_due: Callable[[], None]) -> None:
        self._next_deadline = next_deadline
        self._on_due = on_due
        self._sleeps_until = math.inf
        self._changed = anyio.Event()

    def check(self) -> None:
        """Call it after deadlines may have changed; costs nothing unless one is earlier than before."""
        deadline = self._next_deadline()
        if deadline is not None and deadline < self._sleeps_until:
            self._changed.set()

    async def run(self) -> None:
        """Wait for deadlines, for ever."""
        while True:
            deadline = self._next_deadline()
            self._sleeps_until = math.inf if deadline is None else deadline
            self._changed = anyio.Event()
            with anyio.move_on_after(self._sleeps_until - now()):
                await self._changed.wait()
            deadline = self._next_deadline()
            if deadline is not None and now() >= deadline:
                self._on_due()
