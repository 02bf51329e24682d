"""Calls from threads, made on the event loop one after another."""

import threading
from collections.abc import Callable

from kvflow.aio.mailbox import Mailbox

__all__ = ["Calls"]


class Calls:
    """What any thread wants done on the event loop. Create it on the event loop.

    One of it serves all transfers of a rank, so that one that waits needs no task of its own.

    Attributes:
        done: To be notified by what has been done, and to be waited for by threads.
    """

    def __init__(self) -> None:
        self.done = threading.Condition()
        self._calls: Mailbox[Callable[[], None]] = Mailbox()

    def put(self, call: Callable[[], None]) -> None:
        """Have something done. Callable from any thread."""
        self._calls.put([call])

    async def run(self) -> None:
        """Do it, for ever."""
        while True:
            for call in await self._calls.take():
                call()
