"""An event loop in a thread of its own."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from types import TracebackType

import anyio
from anyio.from_thread import BlockingPortal
from typing_extensions import Self

from kvflow.aio.standstill import Standstill

__all__ = ["LoopThread"]


class LoopThread:
    """An event loop in a thread, which several ranks of a process can share. Use it as a context manager.

    One that is left open stands still when the process ends, and holds nothing up.
    """

    portal: BlockingPortal

    def __enter__(self) -> Self:
        self._running: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = Thread(target=self._run, name="kvflow-loop", daemon=True)
        self._thread.start()
        self._loop = self._running.result()
        self._standstill = Standstill(self._thread, self._interrupt)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._standstill.cancel()
        with suppress(RuntimeError):  # it is not running any more
            self.portal.call(self.portal.stop, exc_type is not None)
        self._thread.join()

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
        except Exception as error:
            if self._running.done():
                raise
            self._running.set_exception(error)

    async def _serve(self) -> None:
        async with BlockingPortal() as self.portal:
            self._running.set_result(asyncio.get_running_loop())
            await self.portal.sleep_until_stopped()

    def _interrupt(self) -> None:
        self._loop.call_soon_threadsafe(self._standstill.stand_still)
