"""Measures how long an event loop is kept from running, while that matters."""

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["PULSE_S", "Pulse"]

PULSE_S: Final = 0.1


class Pulse:
    """A timer that runs while it is needed, and notes each time the event loop was late for it.

    A hold-up begins anywhere between two beats, so it is longer than the timer is late, by `PULSE_S` / 2 on average.
    Use it on the event loop.

    Args:
        now: Returns monotonic seconds.
        is_needed: Whether to go on measuring; asked at each beat.
        on_held: Called at each beat with how long the loop was held up before it, to within `PULSE_S` / 2, in seconds.
    """

    def __init__(
        self, now: Callable[[], float], is_needed: Callable[[], bool], on_held: Callable[[float], None]
    ) -> None:
        self._now = now
        self._is_needed = is_needed
        self._on_held = on_held
        self._before_s = 0.0
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Whether the loop is being observed now."""
        return self._timer is not None

    @property
    def late_s(self) -> float:
        """Sum of the time for which the loop was late, until now. Only differences while it runs have a meaning."""
        return self._before_s if self._timer is None else self._before_s + max(0.0, self._now() - self._due_at)

    def start(self) -> None:
        """Start to measure, until a beat at which it is not needed. Does nothing if it is running."""
        if self._timer is None:
            self._set()

    def close(self) -> None:
        """Stop at once. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._due_at = self._now() + PULSE_S
        self._timer = asyncio.get_running_loop().call_later(PULSE_S, self._beat)

    def _beat(self) -> None:
        late_s = max(0.0, self._now() - self._due_at)
        self._before_s += late_s
        self._timer = None
        if self._is_needed():
            self._set()
        self._on_held(late_s + PULSE_S / 2)
