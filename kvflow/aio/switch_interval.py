"""How soon a thread of kvflow gets the interpreter from an engine that computes in Python.

A thread that wakes up waits until the one that runs gives the interpreter up, and asks for that only after the switch
interval, 5 ms by default. A handover wakes several threads in turn, so in a busy process it takes a multiple of that.
"""

import sys
import threading
from typing import Final

__all__ = ["SWITCHING", "SwitchInterval"]


ROUNDING_S: Final = 1e-7
"""Python keeps whole microseconds, rounded down."""


class SwitchInterval:
    """Shortens the switch interval of the process for as long as somebody needs it, and then puts it back.

    An interval that is shorter already stays as it is, and so does one that somebody else sets meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needs: list[float] = []
        self._before = 0.0
        self._ours = 0.0

    def shorten(self, interval_s: float) -> None:
        """Need switches after this time, until `restore` is called with the same one."""
        with self._lock:
            self._needs.append(interval_s)
            current = sys.getswitchinterval()
            if interval_s < current:
                if current != self._ours:
                    self._before = current
                self._set(interval_s)

    def restore(self, interval_s: float) -> None:
        """Need them no more."""
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
"""That of this process."""
