"""The threads that contact peers. A peer may leave such a thread hanging for a minute."""

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio

from kvflow.aio.worker_threads import run_in_thread
from kvflow.errors import BackendError, ThreadShortage
from kvflow.gate.shares import FairShares

__all__ = ["ContactThreads"]

Result = TypeVar("Result")


class ContactThreads:
    """Runs blocking calls in threads, and limits how many run at once, in total and for each principal.

    A call whose caller has given up still counts until it returns. No principal can have more calls than are still free
    for others, so a single one gets at most half.
    """

    def __init__(self, at_once: int) -> None:
        self._shares = FairShares(at_once)
        self._limiter = anyio.CapacityLimiter(at_once)  # never waits, as the shares are not larger
        self._resources: set[object] = set()
        self._freed = anyio.Event()

    async def run(
        self,
        principal: str,
        function: Callable[[], Result],
        *,
        resource: object = None,
        on_abandoned: Callable[[], None],
    ) -> Result:
        """Run a function in a thread once the limits permit; return its result or raise its exception.

        Args:
            principal: Counts the call against the share of this principal.
            function: Continues after the caller was cancelled, unless it has not begun yet.
            resource: Only one call runs at a time for each resource other than None.
            on_abandoned: Called in the thread when the function has ended after its caller was cancelled.

        Raises:
            BackendError: The system allows no more threads.
        """
        while not self._shares.has_place(principal, 1) or resource in self._resources:
            await self._freed.wait()
        place = object()
        self._shares.hold(place, principal, 1)
        if resource is not None:
            self._resources.add(resource)
        call = _Call(function, functools.partial(self._free, place, resource), on_abandoned)
        try:
            return await run_in_thread(call.run, limiter=self._limiter, abandon_on_cancel=True)
        except ThreadShortage as error:
            raise BackendError(error.message, **error.values) from error
        finally:
            call.leave()

    def _free(self, place: object, resource: object) -> None:
        self._shares.release(place)
        self._resources.discard(resource)
        freed, self._freed = self._freed, anyio.Event()
        freed.set()


class _Call(Generic[Result]):
    """A call that the thread and the caller can leave in any order. The later one frees its place."""

    def __init__(
        self, function: Callable[[], Result], free: Callable[[], None], on_abandoned: Callable[[], None]
    ) -> None:
        self._function = function
        self._free = free
        self._on_abandoned = on_abandoned
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._is_running = False
        self._is_abandoned = False

    def run(self) -> Result:
        """Call the function in the thread; raise BackendError if the caller has given up already."""
        with self._lock:
            if self._is_abandoned:
                raise BackendError("peer was given up before it was contacted")
            self._is_running = True
        try:
            return self._function()
        finally:
            self._end_call()

    def _end_call(self) -> None:
        with self._lock:
            self._is_running = False
            is_abandoned = self._is_abandoned
        if is_abandoned:
            self._on_abandoned()
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._free)

    def leave(self) -> None:
        """Give up the call unless it has ended. Called on the event loop."""
        with self._lock:
            self._is_abandoned = True
            is_running = self._is_running
        if not is_running:
            self._free()
