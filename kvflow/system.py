"""The real world of a rank: ZMQ sockets, the system's monotonic clock, worker threads and unpredictable bytes."""

import secrets
import time
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from kvflow.errors import ThreadShortage
from kvflow.ports import Ports
from kvflow.wire.channel import ZmqControl

__all__ = ["MAX_THREADS", "WorkerThreads", "system_ports"]

MAX_THREADS: Final = 64
"""Functions that run beside the event loop at once, most of them waiting for a device; others wait for a thread."""

Result = TypeVar("Result")


class WorkerThreads:
    """Runs functions in worker threads, apart from those that the engine's own use of anyio takes."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)

    async def __call__(self, function: Callable[[], Result], /) -> Result:
        """Run a function in a worker thread and wait for its result, also when the wait is cancelled.

        Raises:
            ThreadShortage: No thread could be started; the function was not called.
            BaseException: What the function raised.
        """
        is_started = False

        def run() -> Result:
            nonlocal is_started
            is_started = True
            return function()

        try:
            return await anyio.to_thread.run_sync(run, abandon_on_cancel=False, limiter=self._limiter)
        except RuntimeError as error:  # which is what a thread that cannot be started raises
            if is_started:
                raise
            raise ThreadShortage("cannot start a thread", detail=str(error)) from error


def system_ports() -> Ports:
    """Return the ports of a real rank. One result may serve several ranks of one event loop."""
    return Ports(
        control=ZmqControl(),
        now=time.monotonic,
        run_in_thread=WorkerThreads(),
        random_bytes=secrets.token_bytes,
        unix_time=time.time,  # noqa: TID251 - no deadline here follows from it
    )
