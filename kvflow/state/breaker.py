"""Whether a peer is worth another try. Pure."""

import math

from kvflow.state.tables import BREAKER, BreakerSignal, BreakerState

__all__ = ["Breaker"]

FAILURES_TO_OPEN = 3
"""In a row. One failure is no reason to avoid a peer."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0

STRIKE_S = 0.5
"""Failures within this time of one that counted have its cause, however many transfers they end."""


class Breaker:
    """Stops asking a peer that fails again and again, and tries it again after a pause, one transfer at a time.

    Each probe that fails doubles the pause.
    """

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0
        self._last_strike = -math.inf

    def admits(self, now: float) -> bool:
        """Say whether a transfer may be tried now; the first one after the pause is the probe."""
        if self.state is not BreakerState.CLOSED and now >= self._open_until:
            self._apply(BreakerSignal.PROBED)
            self._open_until = now + LONGEST_PAUSE_S  # a probe that never ends must not close the door for good
            return True
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """A transfer got through."""
        self._apply(BreakerSignal.SUCCEEDED)
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S

    def undecided(self, now: float) -> None:
        """The probe ended for a reason that says nothing about the peer, so the next transfer is one.

        Where several ranks avoid a peer, each from a time of its own, the probe of one ends because of the others.
        """
        if self.state is BreakerState.PROBING:
            self._open_until = now
        self._apply(BreakerSignal.UNDECIDED)

    def failed(self, now: float) -> None:
        """A transfer failed, and the peer is the reason."""
        if now < self._last_strike + STRIKE_S:
            return
        self._last_strike = now
        self._num_failures += 1
        was_open = self.state is BreakerState.OPEN
        is_tripped = self._num_failures >= FAILURES_TO_OPEN
        self._apply(BreakerSignal.TRIPPED if is_tripped else BreakerSignal.FAILED)
        if self.state is BreakerState.OPEN and not was_open:
            self._open_until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _apply(self, signal: BreakerSignal) -> None:
        self.state = BREAKER[self.state, signal]
