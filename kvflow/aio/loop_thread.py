"""An event loop in a thread of its own."""

import os
import sys
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from types import TracebackType
from typing import Self

import anyio
from anyio.from_thread import BlockingPortal

from kvflow.errors import ConfigError

__all__ = ["LoopThread"]


class LoopThread:
    """An event loop in a thread, which several ranks of a process can share. Use it as a context manager.

    One that is left open holds nothing up when the process ends.

    Args:
        affinity: CPUs that it may run on, and with it the threads that it starts: those of the transport and of libzmq.
            By default they are those of the thread that enters the context. An engine that has pinned its thread to one
            CPU names others here, or kvflow's threads wait whenever that one computes.

    Raises:
        ConfigError: On entry: the system does not know these CPUs, or has no affinity.
    """

    portal: BlockingPortal

    def __init__(self, affinity: Collection[int] | None = None) -> None:
        self._affinity = affinity

    def __enter__(self) -> Self:
        self._running: Future[None] = Future()
        self._thread = Thread(target=self._run, name="kvflow-loop", daemon=True)
        self._thread.start()
        self._running.result()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(RuntimeError):  # it is not running any more
            self.portal.call(self.portal.stop, exc_type is not None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._pin()
            anyio.run(self._serve)
        except Exception as error:
            if self._running.done():
                raise
            self._running.set_exception(error)

    def _pin(self) -> None:
        if self._affinity is None:
            return
        if sys.platform != "linux":
            raise ConfigError("threads cannot be given CPUs on this system", affinity=self._affinity)
        try:
            os.sched_setaffinity(0, self._affinity)  # of this thread
        except (OSError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError("affinity must name CPUs of this machine", affinity=self._affinity) from error

    async def _serve(self) -> None:
        async with BlockingPortal() as self.portal:
            self._running.set_result(None)
            await self.portal.sleep_until_stopped()
