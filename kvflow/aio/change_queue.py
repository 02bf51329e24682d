"""Reports changes from the event loop to threads that poll for them."""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["ChangeQueue"]

Item = TypeVar("Item")


class ChangeQueue(Generic[Item]):
    """Items in the order in which they changed. It never blocks the event loop, and never waits for it.

    A thread can poll (`take`), wait, or watch a file descriptor. A notification costs something only if a thread is
    waiting or has asked for the descriptor.
    """

    def __init__(self) -> None:
        self._changed: deque[Item] = deque()
        self._condition = threading.Condition()
        self._num_waiting = 0
        self._pipe: tuple[int, int] | None = None
        self.is_closed = False

    def add(self, item: Item) -> None:
        """Record that an item has changed."""
        self._changed.append(item)
        self.notify()

    def notify(self) -> None:
        """Wake the waiting threads, because an item that has not been taken yet has changed again."""
        if self._num_waiting or self._pipe is not None:
            self._wake()

    def take_changes(self) -> list[Item]:
        """Return the items that have changed since the last call."""
        if self._pipe is not None:
            self._clear()  # first, so that later changes make the descriptor readable again
        if not self._changed:
            return []
        taken: list[Item] = []
        with suppress(IndexError):  # another thread has taken the rest
            taken.extend(self._changed.popleft() for _ in range(len(self._changed)))
        return taken

    def wait(self, is_over: Callable[[], object], timeout_s: float | None) -> None:
        """Wait until a condition is true or the timeout expires. Check the condition whenever an item changes."""
        with self._condition:
            self._num_waiting += 1
            try:
                self._condition.wait_for(is_over, timeout_s)
            finally:
                self._num_waiting -= 1

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are changes to take; raise ValueError if it is closed.

        It is owned by this object.
        """
        with self._condition:
            if self.is_closed:
                raise ValueError("descriptor is closed")
            if self._pipe is None:
                self._pipe = os.pipe()
                for end in self._pipe:
                    os.set_blocking(end, False)
                if self._changed:
                    os.write(self._pipe[1], b"\0")
            return self._pipe[0]

    def close(self) -> None:
        """Close the descriptor, and end all waits."""
        with self._condition:
            self.is_closed = True
            pipe, self._pipe = self._pipe, None
            self._condition.notify_all()
        for end in pipe or ():
            os.close(end)

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()
            if self._pipe is not None:
                try:
                    os.write(self._pipe[1], b"\0")
                except BlockingIOError:  # the pipe is full, and thus readable
                    return

    def _clear(self) -> None:
        with self._condition:
            if self._pipe is None:
                return
            try:
                os.read(self._pipe[0], 65_536)  # the capacity of a pipe
            except BlockingIOError:
                return
