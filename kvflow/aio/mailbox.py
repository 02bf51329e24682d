"""From any thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items that any thread puts in and one task takes out. Create it on the event loop that takes.

    Args:
        call_soon: Has something called on that event loop, from any thread; its own way by default.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._items: deque[Item] = deque()
        self._loop = asyncio.get_running_loop()
        self._call_soon = call_soon or self._loop.call_soon_threadsafe
        self._is_waking = False
        self._taker: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Iterable[Item]) -> None:
        """Add items and wake the taker. Callable from any thread, also after the loop has ended."""
        self._items.extend(items)
        self.wake()

    def fail(self, error: Exception) -> None:
        """Raise this to the taker from now on: nothing will come any more. Callable from any thread."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Wake the taker without an item. Callable from any thread, also after the loop has ended."""
        if self._is_waking and not self._loop.is_closed():  # the taker has not seen yet what came before this
            return
        self._is_waking = True
        try:
            self._call_soon(self._set)
        except RuntimeError:  # the loop is closed: nobody will take anything any more
            self._items.clear()

    async def wait(self) -> None:
        """Wait for items, or for the next `wake`. One caller at a time.

        Raises:
            The error that `fail` was called with.
        """
        if self._error is not None:
            raise self._error
        if not self._items:
            self._taker = self._loop.create_future()
            try:
                await self._taker
            finally:
                self._taker = None

    def take_nowait(self) -> list[Item]:
        """Take all there is."""
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken

    async def take(self) -> list[Item]:
        """Wait until there is something, and take all of it.

        Raises:
            The error that `fail` was called with.
        """
        while not self._items:
            await self.wait()
        return self.take_nowait()

    def _set(self) -> None:
        self._is_waking = False
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)
