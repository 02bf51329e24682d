"""Calls from threads, made on the event loop one after another."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Calls", "make_all"]


def make_all(calls: deque[Callable[[], None]], loop: asyncio.AbstractEventLoop) -> None:
    """Make calls in order, those that come meanwhile too; an error is one of the event loop and ends no other call."""
    while calls:
        call = calls.popleft()
        try:
            call()
        except Exception as error:  # noqa: BLE001 - as the event loop does it: the other calls are still made
            loop.call_exception_handler({"message": "a call from a thread failed", "exception": error})


class Calls:
    """What any thread wants done on the event loop. Create it on the event loop.

    One of it serves all transfers of a rank; many calls that come at once wake the event loop once.

    Attributes:
        done: To be notified by what has been done, and to be waited for by threads.
    """

    def __init__(self) -> None:
        self.done = threading.Condition()
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_waking = False

    def put(self, call: Callable[[], None]) -> None:
        """Have something done. Callable from any thread; forgotten if the event loop has ended."""
        self._calls.append(call)
        if self._is_waking and not self._loop.is_closed():  # the loop has not seen yet what came before this
            return
        self._is_waking = True
        try:
            self._loop.call_soon_threadsafe(self._call_all)
        except RuntimeError:  # the loop is closed
            self._calls.clear()

    def _call_all(self) -> None:
        self._is_waking = False
        make_all(self._calls, self._loop)
