"""Delivers events from any thread to a rank, on its event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable

from kvflow.backends.base import BackendEvent, OnBroken, OnEvents
from kvflow.errors import BackendError

__all__ = ["EventDelivery"]


class EventDelivery:
    """Implements the guarantees of `Backend.open` about its callbacks.

    Events are collected until the event loop runs, and are then delivered together. Create it on that event loop.

    Args:
        call_soon: Schedules a call on the event loop from any thread; `call_soon_threadsafe` by default.
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
        """Return the number of events not delivered yet."""
        return len(self._waiting)

    def deliver_soon(self, events: Iterable[BackendEvent]) -> None:
        """Deliver events soon. Can be called from any thread; after `close`, or on a closed event loop, drop them."""
        self._waiting.extend(events)
        self._schedule()

    def fail(self, error: BackendError) -> None:
        """Report that the backend is broken, after all events put before. Can be called from any thread."""
        self._error = self._error or error
        self._schedule()

    def deliver(self) -> None:
        """Deliver the collected events now. Call it only on the event loop, not from inside a call into the backend."""
        self._is_due = False
        if self._is_broken or self._is_closed:
            return
        self._deliver_events()
        if self._error is not None:
            self._is_broken = True
            self._on_broken(self._error)

    def close(self) -> None:
        """Deliver the collected events, and none after them. Call it on the event loop, while no thread calls `put`."""
        if not self._is_closed:
            self._is_closed = True
            self._deliver_events()

    def cancel(self) -> None:
        """Drop the collected events, and deliver no more."""
        self._waiting.clear()
        self._is_closed = True

    def _deliver_events(self) -> None:
        events = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if events:
            self._on_events(events)

    def _schedule(self) -> None:
        if self._is_due and not self._loop.is_closed():
            return  # a delivery is already scheduled
        self._is_due = True
        call_soon = self._loop.call_soon if threading.get_ident() == self._loop_thread else self._call_soon
        try:
            call_soon(self.deliver)
        except RuntimeError:  # the event loop is closed
            self._waiting.clear()
