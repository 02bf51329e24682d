"""Threads that are still there when the interpreter ends.

Nobody has to close what runs in a thread before the process ends. But an interpreter that is being torn down unwinds
each thread that comes back to it, and if a native call is what the thread comes back from, that ends the process with
SIGABRT. So before anything is torn down, a thread is brought to where it waits, outside of any call. What it refers to
is not destroyed then, as it would be if the thread ended: native libraries abort over that too.
"""

import atexit
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Standstill"]

TIMEOUT_S: Final = 5.0
"""How long the end of the process waits for a call to return: longer than any that does not hang."""


class Standstill:
    """Where a daemon thread waits once the interpreter ends.

    Args:
        thread: The thread.
        interrupt: Makes it look at `is_due` soon.

    Attributes:
        is_due: The thread is to call `stand_still`.
    """

    def __init__(self, thread: threading.Thread, interrupt: Callable[[], object]) -> None:
        self.is_due = False
        self._thread = thread
        self._interrupt = interrupt
        self._is_reached = threading.Event()
        self._is_over = threading.Event()
        atexit.register(self._at_exit)

    def stand_still(self) -> None:
        """Wait here, for ever if nobody wants anything any more. Call it on the thread."""
        self._is_reached.set()
        self._is_over.wait()

    def go_on(self) -> None:
        """Let the thread go on if it stands still: a function that is called at exit may still have work for it."""
        if self.is_due:
            self.is_due = False
            self._is_over.set()

    def cancel(self) -> None:
        """Forget the thread, which is about to end by itself."""
        self.go_on()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if self._thread.is_alive():  # a fork has none of its parent's threads
            self.is_due = True
            self._interrupt()
            self._is_reached.wait(TIMEOUT_S)
