"""Wakes the event loop from a thread without handing it the GIL.

`call_soon_threadsafe` writes to a socket, and releases the GIL while it does. The event loop wakes up and takes the
GIL, and the thread must wait for everything the event loop then does before it can continue: an owner thread with its
next long native call, a scheduler with its step. This class holds the GIL: the event loop wakes up just as soon, but
runs when the thread next releases the GIL.
"""

import asyncio
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["ThreadWaker"]


class ThreadWaker:
    """Like `call_soon_threadsafe`, but holds the GIL. Create and close it on the event loop.

    Many simultaneous calls wake the event loop once. On systems without eventfd (all but Linux), it uses
    `call_soon_threadsafe`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_rung = False
        self._is_closed = False
        self._lock = threading.RLock()  # reentrant, because a signal handler may call `call_soon` while it is held
        self._fd = -1
        if sys.platform == "linux":
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._write = ctypes.PyDLL(None).eventfd_write
            self._write.argtypes = (ctypes.c_int, ctypes.c_uint64)
            self._loop.add_reader(self._fd, self._answer)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Schedule a call on the event loop, after all earlier ones, or raise RuntimeError if that or this is closed.

        Can be called from any thread.
        """
        with self._lock:  # after closing, the descriptor number may belong to another file
            if self._is_closed or self._loop.is_closed():
                raise RuntimeError("event loop is closed")
            self._calls.append(call)
            if self._is_rung:  # the event loop is already waking up
                return
            try:
                self._is_rung = True
                if self._fd < 0 or self._write(self._fd, 1) != 0:
                    self._loop.call_soon_threadsafe(self._make_all)
            except BaseException:  # a signal handler raised; the next call rings again
                self._is_rung = False
                raise

    def close(self) -> None:
        """Run the pending calls, and close the descriptor."""
        with self._lock:
            self._is_closed = True
            fd, self._fd = self._fd, -1
        if fd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)
            os.close(fd)
        self._make_all()

    def _answer(self) -> None:
        os.eventfd_read(self._fd)
        self._make_all()

    def _make_all(self) -> None:
        """Run the pending calls in order. Calls added meanwhile ring again, so that the event loop gets its turn.

        An exception is passed to the event loop's handler, and the other calls still run.
        """
        self._is_rung = False
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            try:
                call()
            except Exception as error:  # noqa: BLE001 - handled as the event loop does; the other calls still run
                self._loop.call_exception_handler({"message": "a call from a thread failed", "exception": error})
