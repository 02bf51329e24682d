"""Measures how long an event loop is kept from running."""

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["Pulse"]

PULSE_S: Final = 0.05


class Pulse:
    """Adds up the time for which the event loop was kept from running, to within `PULSE_S`. Use it on the event loop.

    Args:
        now: Returns monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._before_s = 0.0
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_s(self) -> float:
        """Seconds for which the loop was held up while this was started, until now."""
        return self._before_s + self._overdue_s()

    def start(self) -> None:
        """Start to measure. Does nothing if it is started."""
        if self._timer is None:
            self._beat()

    def stop(self) -> None:
        """Stop measuring. May be called twice."""
        if self._timer is not None:
            self._before_s += self._overdue_s()
            self._timer.cancel()
            self._timer = None

    def _overdue_s(self) -> float:
        return 0.0 if self._timer is None else max(0.0, self._now() - self._due_at)

    def _beat(self) -> None:
        self._before_s += self._overdue_s()
        self._due_at = self._now() + PULSE_S
        self._timer = asyncio.get_running_loop().call_later(PULSE_S, self._beat)
