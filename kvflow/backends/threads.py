"""Threads of a transport: starting them, and letting the process exit while they run."""

import atexit
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from kvflow.errors import BackendError, BackendUnavailable

__all__ = ["ExitBarrier", "run_in_thread", "start_thread"]

Result = TypeVar("Result")

TIMEOUT_S: Final = 5.0
"""How long process exit waits for a native call to return: longer than any call that does not hang."""


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        BackendUnavailable: The system allows no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise BackendUnavailable(
            "cannot start a thread; raise the process limit (`ulimit -u`, or the container's pids limit)",
            thread=thread.name,
        ) from error


async def run_in_thread(
    function: Callable[[], Result], *, limiter: anyio.CapacityLimiter | None = None, abandon_on_cancel: bool = False
) -> Result:
    """Run a blocking function in a worker thread, as `anyio.to_thread.run_sync` does.

    Args:
        function: Its result is returned, and its exception is raised.
        limiter: Limits how many run at once; anyio's own by default.
        abandon_on_cancel: Do not wait for the function when the caller is cancelled.

    Raises:
        BackendError: The system allows no more threads; the function was not called.
    """
    has_begun = False

    def run() -> Result:
        nonlocal has_begun
        has_begun = True
        return function()

    try:
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    except RuntimeError as error:
        if has_begun:
            raise
        raise BackendError("cannot start a thread", detail=str(error)) from error


class ExitBarrier:
    """The point at which a daemon thread waits when the interpreter exits.

    Callers need not close a transport before the process exits. But during teardown, the interpreter unwinds every
    thread that returns to it, and if the thread returns from a native call, that ends the process with SIGABRT. So
    before teardown begins, the thread is made to wait outside of any native call. It must not end either: that would
    destroy the objects it refers to, and native libraries abort then too.

    Args:
        thread: The thread.
        interrupt: Makes the thread check `is_due` soon.

    Attributes:
        is_due: True if the thread has to call `wait` now.
    """

    def __init__(self, thread: threading.Thread, interrupt: Callable[[], object]) -> None:
        self.is_due = False
        self._thread = thread
        self._interrupt = interrupt
        self._is_reached = threading.Event()
        self._is_lifted = threading.Event()
        atexit.register(self._at_exit)

    def wait(self) -> None:
        """Wait until `lift` is called, possibly forever. Call it on the thread."""
        self._is_reached.set()
        self._is_lifted.wait()

    def lift(self) -> None:
        """Let the waiting thread continue, because a function that runs at exit still has work for it."""
        if self.is_due:
            self.is_due = False
            self._is_lifted.set()

    def cancel(self) -> None:
        """Stop tracking the thread, because it is about to end or was never started."""
        self.lift()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if self._thread.is_alive():  # in a forked process, the parent's threads are not alive
            self.is_due = True
            self._interrupt()
            self._is_reached.wait(TIMEOUT_S)
