"""The real ports of a rank: ZMQ sockets, the system's monotonic clock, worker threads and secure random bytes."""

import secrets
import time
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from kvflow.control.channel import ZmqControl
from kvflow.errors import ThreadShortage
from kvflow.ports import Ports

__all__ = ["MAX_THREADS", "WorkerThreads", "system_ports"]

MAX_THREADS: Final = 64
"""Maximum number of functions in worker threads at once, most of which wait for a device. Others wait for a thread."""

Result = TypeVar("Result")


class WorkerThreads:
    """Runs functions in worker threads, with a limit separate from that of the engine's own use of anyio."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)

    async def __call__(self, function: Callable[[], Result], /) -> Result:
        """Run a function in a worker thread and wait for its result, even if the wait is cancelled.

        Raises:
            ThreadShortage: No thread could be started; the function was not called.
            BaseException: Whatever the function raised.
        """
        is_started = False

        def run() -> Result:
            nonlocal is_started
            is_started = True
            return function()

        try:
            return await anyio.to_thread.run_sync(run, abandon_on_cancel=False, limiter=self._limiter)
        except RuntimeError as error:  # also raised if a thread cannot be started
            if is_started:
                raise
            raise ThreadShortage("cannot start a thread", detail=str(error)) from error


def system_ports() -> Ports:
    """Return the ports of a real rank. Several ranks on one event loop may share them."""
    return Ports(
        control=ZmqControl(),
        now=time.monotonic,
        run_in_thread=WorkerThreads(),
        random_bytes=secrets.token_bytes,
        unix_time=time.time,  # noqa: TID251 - no deadline is derived from it
    )
