"""The threads that contact peers. A peer may leave such a thread hanging for a minute."""

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import anyio

from kvflow.backends.threads import start_thread
from kvflow.state.fair_shares import FairShares

__all__ = ["ContactThreads"]

Result = TypeVar("Result")

THREAD_NAME: Final = "kvflow-mooncake-contact"


class ContactThreads:
    """Runs blocking calls in threads, and limits how many run at once, in total and for each principal.

    A call whose caller has given up still counts until it returns. No principal can have more calls than are still free
    for others, so a single one gets at most half.

    Args:
        at_once: Limit for all principals together.
    """

    def __init__(self, at_once: int) -> None:
        self._shares = FairShares(at_once)
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
            BackendUnavailable: The system allows no more threads.
        """
        while not self._shares.has_place(principal, 1) or resource in self._resources:
            await self._freed.wait()
        self._shares.add(principal, 1)
        if resource is not None:
            self._resources.add(resource)
        free = functools.partial(self._free, principal, resource)
        loop = asyncio.get_running_loop()
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        awaited = asyncio.wrap_future(future)

        def run() -> None:
            try:
                _complete(future, function)
            finally:
                if awaited.cancelled():
                    on_abandoned()
                with suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(free)

        try:
            start_thread(threading.Thread(target=run, name=THREAD_NAME))
        except BaseException:
            free()
            raise
        return await awaited

    def _free(self, principal: str, resource: object) -> None:
        self._shares.add(principal, -1)
        self._resources.discard(resource)
        freed, self._freed = self._freed, anyio.Event()
        freed.set()


def _complete(future: "concurrent.futures.Future[Result]", function: Callable[[], Result]) -> None:
    """Complete a future with the result of a function, unless it was cancelled already."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - raised where the result is awaited
        future.set_exception(error)
    else:
        future.set_result(result)
