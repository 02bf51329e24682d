"""A side of the demo in a thread of this process, for a transport that cannot leave the process."""

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal
from typing_extensions import Unpack, override

from kvflow.cli.demo.options import DemoOptions
from kvflow.cli.processes import Child, ChildSettings, Line, Report

__all__ = ["ThreadChild"]


class ThreadChild(Child):
    """A child in a thread. Use it as an async context manager.

    A thread cannot be cancelled, so the exit waits until it has ended: its next report or order raises EOFError there.

    Args:
        name: Name in errors.
        serve: The work of the thread.
        options: Options for `serve`.
        tasks: Task group that it runs in, which must outlive the thread. Errors of `serve` are raised there.
        settings: As in `Child`.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[DemoOptions, Line], None],
        options: DemoOptions,
        tasks: TaskGroup,
        **settings: Unpack[ChildSettings],
    ) -> None:
        super().__init__(name, **settings)
        self._serve = serve
        self._options = options
        self._tasks = tasks
        self._ended = anyio.Event()

    async def __aenter__(self) -> Self:
        self._orders, self._received = anyio.create_memory_object_stream[Report](8)
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._orders.close()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    @override
    async def tell(self, do: str, **values: Any) -> None:
        await self._orders.send({"do": do, **values})

    async def _run(self) -> None:
        try:
            with anyio.CancelScope(shield=True), self._received, suppress(EOFError):
                async with BlockingPortal() as portal:
                    line = _ThreadLine(self.report, self._received.receive, portal)
                    await anyio.to_thread.run_sync(self._serve, self._options, line)
        finally:
            self.end()
            self._ended.set()

    def report(self, report: Report) -> None:
        """Accept a report from the thread.

        Raises:
            EOFError: The block was left.
        """
        if self._orders.statistics().open_send_streams == 0:
            raise EOFError("the owner has stopped listening")
        self.take(report)


class _ThreadLine:
    """The thread's end of the connection."""

    def __init__(self, take: Callable[[Report], None], receive: Callable[[], Any], portal: BlockingPortal) -> None:
        self._take = take
        self._receive = receive
        self._portal = portal

    def report(self, event: str, **values: Any) -> None:
        self._portal.call(self._take, {"event": event, **values})

    def receive(self) -> Report:
        try:
            order: Report = self._portal.call(self._receive)
        except anyio.EndOfStream as error:
            raise EOFError("the coordinator has ended") from error
        return order
