"""Calls a function at the earliest of several changing deadlines."""

import asyncio
from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm:
    """Calls a function when the next deadline is reached, even if it has moved. Create it on the event loop.

    A postponed deadline costs one early wake-up and no call; setting one that is not the earliest costs nothing.

    Args:
        next_deadline: Returns the earliest deadline, on the clock of `now`, or None.
        on_due: Called on the event loop when a deadline is reached; it may change the deadlines. If it raises, the
            alarm stops until the next `check`.
        now: Returns monotonic seconds, not necessarily from the event loop's clock.
        on_lag: Called at each wake-up with its delay in seconds: the time for which the event loop was busy, or its
            thread was kept from running.
    """

    def __init__(
        self,
        next_deadline: Callable[[], float | None],
        on_due: Callable[[], None],
        now: Callable[[], float],
        on_lag: Callable[[float], None] | None = None,
    ) -> None:
        self._next_deadline = next_deadline
        self._on_due = on_due
        self._now = now
        self._on_lag = on_lag
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = self._due_at = 0.0
        self._is_closed = False

    def check(self) -> None:
        """Adapt to new deadlines. Call it whenever they may have changed."""
        deadline = self._next_deadline()
        if deadline is None or self._is_closed:
            return
        if self._timer is not None:
            if self._wakes_at <= deadline:
                return
            self._timer.cancel()
        now = self._now()
        self._wakes_at, self._due_at = deadline, max(deadline, now)
        self._timer = self._loop.call_later(self._due_at - now, self._wake)

    def close(self) -> None:
        """Stop the alarm. May be called twice, and from `on_due`."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._timer = None
        now = self._now()
        if self._on_lag is not None:
            self._on_lag(max(0.0, now - self._due_at))
        deadline = self._next_deadline()
        if deadline is not None and now >= deadline:
            self._on_due()
        self.check()
