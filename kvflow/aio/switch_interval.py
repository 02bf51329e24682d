"""Shortens the time that kvflow's threads wait for the GIL while an engine computes in Python.

A thread that wakes up waits for the running thread to release the GIL, and requests that only after the switch
interval, 5 ms by default. A handover wakes several threads in turn, so in a busy process it takes a multiple of that.
"""

import sys
import threading
from typing import Final

__all__ = ["SWITCHING", "SwitchInterval"]


ROUNDING_S: Final = 1e-7
"""Python rounds the interval down to whole microseconds."""


class SwitchInterval:
    """Shortens the process's switch interval while it is needed, then restores it.

    An interval that is already shorter is left unchanged, and so is one that other code sets in the meantime.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needs: list[float] = []
        self._before = 0.0
        self._ours = 0.0

    def shorten(self, interval_s: float) -> None:
        """Request this switch interval, until `restore` is called with the same value."""
        with self._lock:
            self._needs.append(interval_s)
            current = sys.getswitchinterval()
            if interval_s < current:
                if current != self._ours:
                    self._before = current
                self._set(interval_s)

    def restore(self, interval_s: float) -> None:
        """Withdraw a request."""
        with self._lock:
            self._needs.remove(interval_s)
            if sys.getswitchinterval() != self._ours:
                return
            if self._needs:
                self._set(min(self._before, *self._needs))
            else:
                self._set(self._before)
                self._ours = 0.0

    def _set(self, interval_s: float) -> None:
        sys.setswitchinterval(interval_s + ROUNDING_S)
        self._ours = sys.getswitchinterval()


SWITCHING: Final = SwitchInterval()
"""The switch interval of this process."""
