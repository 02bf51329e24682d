"""What has changed on the event loop, for threads that look now and then."""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["Changes"]

Item = TypeVar("Item")


class Changes(Generic[Item]):
    """Items in the order in which they changed. Nothing here waits on the event loop, or for it.

    A thread can look (`take`), wait, or have a descriptor that becomes readable. Waking costs only where somebody waits
    or has asked for the descriptor.
    """

    def __init__(self) -> None:
        self._changed: deque[Item] = deque()
        self._condition = threading.Condition()
        self._num_waiting = 0
        self._pipe: tuple[int, int] | None = None
        self.is_closed = False

    def add(self, item: Item) -> None:
        """Note that an item has changed."""
        self._changed.append(item)
        self.notify()

    def notify(self) -> None:
        """Have whoever waits look again: an item that was not taken yet has changed once more."""
        if self._num_waiting or self._pipe is not None:
            self._wake()

    def take(self) -> list[Item]:
        """Return what has changed since the last call."""
        if self._pipe is not None:
            self._clear()  # before looking: what comes after that makes it readable again
        if not self._changed:
            return []
        taken: list[Item] = []
        with suppress(IndexError):  # another thread has taken them
            taken.extend(self._changed.popleft() for _ in range(len(self._changed)))
        return taken

    def wait(self, is_over: Callable[[], object], timeout_s: float | None) -> None:
        """Wait until a condition is true, or until the time is up; it is looked at whenever an item has changed."""
        with self._condition:
            self._num_waiting += 1
            try:
                self._condition.wait_for(is_over, timeout_s)
            finally:
                self._num_waiting -= 1

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to take. It stays the owner's.

        Raises:
            ValueError: It is closed.
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
        """Give the descriptor back, and let nobody wait any more."""
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
                except BlockingIOError:  # it is full, and so readable
                    return

    def _clear(self) -> None:
        with self._condition:
            if self._pipe is None:
                return
            try:
                os.read(self._pipe[0], 65_536)  # as much as a pipe holds
            except BlockingIOError:
                return
