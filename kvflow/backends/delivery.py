"""Delivers events to a rank, on its event loop, from whichever thread they come."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable

from kvflow.backends.base import BackendEvent, OnBroken, OnEvents
from kvflow.errors import BackendError

__all__ = ["Delivery"]


class Delivery:
    """Keeps the promises of `Backend.open` about its callbacks.

    Events gather until the event loop gets to them, and are then delivered together. Create it on that event loop.

    Args:
        on_events: As in `Backend.open`.
        on_broken: As in `Backend.open`.
        call_soon: Has something called on the event loop, from any thread; `call_soon_threadsafe` by default.
    """

    def __init__(
        self,
        on_events: OnEvents,
        on_broken: OnBroken,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._on_events = on_events
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._call_soon = call_soon or self._loop.call_soon_threadsafe
        self._waiting: deque[BackendEvent] = deque()
        self._error: BackendError | None = None
        self._is_broken = False
        self._is_due = False
        self._is_closed = False

    def __len__(self) -> int:
        """How many events wait to be delivered."""
        return len(self._waiting)

    def put(self, events: Iterable[BackendEvent]) -> None:
        """Deliver events soon. Callable from any thread; what comes after `close`, or after the loop, is dropped."""
        self._waiting.extend(events)
        self._schedule()

    def fail(self, error: BackendError) -> None:
        """Report soon that the backend is broken, behind what was put before. Callable from any thread."""
        self._error = self._error or error
        self._schedule()

    def deliver(self) -> None:
        """Deliver now what waits. Only on the event loop, and not from inside a call into the backend."""
        self._is_due = False
        if self._is_broken or self._is_closed:
            return
        self._deliver_events()
        if self._error is not None:
            self._is_broken = True
            self._on_broken(self._error)

    def close(self) -> None:
        """Deliver what waits, and nothing more after it. On the event loop, while no thread puts anything in."""
        if not self._is_closed:
            self._is_closed = True
            self._deliver_events()

    def cancel(self) -> None:
        """Deliver nothing any more."""
        self._waiting.clear()
        self._is_closed = True

    def _deliver_events(self) -> None:
        events = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if events:
            self._on_events(events)

    def _schedule(self) -> None:
        if self._is_due and not self._loop.is_closed():
            return  # the event loop has not seen yet what came before this
        self._is_due = True
        call_soon = self._loop.call_soon if threading.get_ident() == self._loop_thread else self._call_soon
        try:
            call_soon(self.deliver)
        except RuntimeError:  # the event loop is closed
            self._waiting.clear()
