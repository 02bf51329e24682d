"""A task group for objects that are opened and closed like files."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any

import anyio
from anyio.abc import TaskGroup

__all__ = ["OwnedTasks"]


class OwnedTasks:
    """A task group that runs in its own task.

    A plain task group must be left by the task that entered it, in reverse order of all others. Owners of this one may
    be opened and closed by any task in any order, as engines do in their start-up and shut-down hooks. Cancelling the
    code that uses the owner does not cancel these tasks either, because the owner needs them to close properly.

    Args:
        on_crash: Called once, when a task fails; the other tasks are then cancelled.
    """

    def __init__(self, on_crash: Callable[[Exception], None]) -> None:
        self._on_crash = on_crash
        self._has_crashed = False
        self._group: TaskGroup
        self._is_open = False
        self._waiting: list[tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]] = []
        self._is_over = False
        self._failure: Exception | None = None
        self._host: asyncio.Task[None]

    async def open(self) -> None:
        """Start the host task."""
        opened = anyio.Event()
        self._home = copy_context()
        self._host = asyncio.create_task(self._hold(opened))
        try:
            await opened.wait()
        except BaseException:
            self._host.cancel()
            raise

    def start(self, run: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task that runs until it ends or `close` ends it; if the group is not open yet, start it then.

        Sockets of the owner may be read before the host task has run for the first time.

        Does nothing after a crash, or after the event loop has cancelled the host task because it is ending.

        The caller may be a callback that another thread has scheduled, with that thread's context: if sniffio is
        installed, anyio would not find its event loop there.
        """
        if not self._is_open:
            self._waiting.append((run, args))
        elif not self._has_crashed and not self._is_over:
            self._home.copy().run(self._group.start_soon, self._run, run, args)

    def fail(self, error: Exception) -> None:
        """Crash with an error from outside the tasks; if the group is not open yet, do so once it is."""
        self._failure = self._failure or error
        self.start(self._raise_failure)

    async def close(self) -> None:
        """Cancel every task and wait for them. Call it once, shielded. Raises what tasks have raised."""
        self._group.cancel_scope.cancel()
        await asyncio.wait([self._host])
        self._host.result()

    async def _hold(self, opened: anyio.Event) -> None:
        async with anyio.create_task_group() as self._group:
            opened.set()
            self._is_open = True
            for run, args in self._waiting:
                self.start(run, *args)
            try:
                await anyio.sleep_forever()
            finally:
                self._is_over = True

    async def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _run(self, run: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        try:
            await run(*args)
        except Exception as error:
            if not self._has_crashed:
                self._has_crashed = True
                self._on_crash(error)
            raise
