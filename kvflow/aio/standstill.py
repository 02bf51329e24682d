"""Threads that are still there when the interpreter ends.

Nobody has to close what runs in a thread before the process ends. But an interpreter that is being torn down unwinds
each thread that comes back to it, and if a native call is what the thread comes back from, that ends the process with
SIGABRT. So before anything is torn down, a thread is brought to where it stays for ever, outside of any call. What it
refers to is not destroyed then, as it would be if the thread ended: native libraries abort over that too.
"""

import atexit
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Standstill"]

TIMEOUT_S: Final = 5.0
"""How long the end of the process waits for a call to return: longer than any that does not hang."""


class Standstill:
    """Where a daemon thread stays once the interpreter ends.

    Args:
        thread: The thread.
        interrupt: Makes it call `stand_still` as soon as it can.
    """

    def __init__(self, thread: threading.Thread, interrupt: Callable[[], object]) -> None:
        self._thread = thread
        self._interrupt = interrupt
        self._is_reached = threading.Event()
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        """Forget the thread, which is about to end by itself."""
        atexit.unregister(self._at_exit)

    def stand_still(self) -> None:
        """Stay here for ever. Call it on the thread, and only once it was interrupted."""
        self._is_reached.set()
        threading.Event().wait()

    def _at_exit(self) -> None:
        if self._thread.is_alive():  # a fork has none of its parent's threads
            self._interrupt()
            self._is_reached.wait(TIMEOUT_S)
