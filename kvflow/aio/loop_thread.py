"""An event loop in a thread of its own."""

from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from types import TracebackType
from typing import Self

import anyio
from anyio.from_thread import BlockingPortal

__all__ = ["LoopThread"]


class LoopThread:
    """An event loop in a thread, which several ranks of a process can share. Use it as a context manager.

    One that is left open holds nothing up when the process ends.
    """

    portal: BlockingPortal

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
            anyio.run(self._serve)
        except Exception as error:
            if self._running.done():
                raise
            self._running.set_exception(error)

    async def _serve(self) -> None:
        async with BlockingPortal() as self.portal:
            self._running.set_result(None)
            await self.portal.sleep_until_stopped()
