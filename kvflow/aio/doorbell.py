"""Waking the event loop from a thread that has more to do.

`call_soon_threadsafe` writes to a socket and releases the GIL for that moment. The event loop, just woken, takes it,
and the thread waits for all that the event loop then does before it can go on: an owner thread with the long native
call that it was about to make, a scheduler with its step. Ringing holds the GIL: the event loop wakes just as soon, but
runs when the thread releases the GIL itself.
"""

import asyncio
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Doorbell"]


class Doorbell:
    """Like `call_soon_threadsafe`, but holds the GIL. Create, and close, it on the event loop.

    Many calls that come at once wake the event loop once. Where the system has no such descriptors (they are Linux's),
    `call_soon_threadsafe` wakes it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_rung = False
        self._is_closed = False
        self._lock = threading.RLock()  # a signal handler may ring in the middle of it
        self._fd = -1
        if sys.platform == "linux":
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._write = ctypes.PyDLL(None).eventfd_write
            self._write.argtypes = (ctypes.c_int, ctypes.c_uint64)
            self._loop.add_reader(self._fd, self._answer)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have something called on the event loop, after what was asked for before. Callable from any thread.

        Raises:
            RuntimeError: It is closed, or the event loop is.
        """
        with self._lock:  # once it is closed, the number of the descriptor may be that of another file
            if self._is_closed or self._loop.is_closed():
                raise RuntimeError("event loop is closed")
            self._calls.append(call)
            if self._is_rung:  # the event loop has not seen yet what came before this
                return
            try:
                self._is_rung = True
                if self._fd < 0 or self._write(self._fd, 1) != 0:
                    self._loop.call_soon_threadsafe(self._make_all)
            except BaseException:  # a signal handler has raised: the next call rings again
                self._is_rung = False
                raise

    def close(self) -> None:
        """Make what is still to be called, and give the descriptor back."""
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
        """Make calls in order; those that come meanwhile ring again, so that the event loop has its turn.

        An error is the event loop's, and ends no other call.
        """
        self._is_rung = False
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            try:
                call()
            except Exception as error:  # noqa: BLE001 - as the event loop does it: the other calls are still made
                self._loop.call_exception_handler({"message": "a call from a thread failed", "exception": error})
