"""Waking the event loop from a thread that is about to make a long call.

`call_soon_threadsafe` writes to a socket and gives the interpreter away for that moment. The event loop, just woken,
takes it, and the thread waits for all that the event loop then does before it can make the call that it was about to.
Ringing keeps the interpreter: the event loop wakes just as soon, but runs during the long call.
"""

import asyncio
import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable

from kvflow.aio.calls import make_all

__all__ = ["Doorbell"]


class Doorbell:
    """Like `call_soon_threadsafe`, but keeps the interpreter. Create, and close, it on the event loop.

    Where the system has no such descriptors (they are Linux's), it is `call_soon_threadsafe`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self._fd = -1
        if sys.platform == "linux":
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._write = ctypes.PyDLL(None).eventfd_write
            self._write.argtypes = (ctypes.c_int, ctypes.c_uint64)
            self._loop.add_reader(self._fd, self._answer)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have something called on the event loop. Callable from any thread until it is closed.

        Raises:
            RuntimeError: The event loop is closed.
        """
        fd = self._fd
        if fd < 0 or self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)
            return
        self._calls.append(call)
        if self._write(fd, 1) != 0:
            self._loop.call_soon_threadsafe(self._call_all)

    def close(self) -> None:
        """Make what is still to be called, and give the descriptor back. No thread rings any more."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)
        os.close(fd)
        self._call_all()

    def _answer(self) -> None:
        os.eventfd_read(self._fd)
        self._call_all()

    def _call_all(self) -> None:
        make_all(self._calls, self._loop)
