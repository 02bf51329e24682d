"""The tasks of an object that is an async context manager itself."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import TaskGroup

__all__ = ["OwnedTasks"]


class OwnedTasks:
    """A task group whose owner is entered and left like a file.

    It differs from a plain task group in two ways. Cancellation from outside does not reach its tasks, because the
    owner needs them to end in order; only `close` ends them. And an exception of the owner's block passes through as
    it is instead of inside a group.

    Args:
        on_crash: Called when a task fails, before the owner's block is cancelled.
    """

    def __init__(self, on_crash: Callable[[], None] | None = None) -> None:
        self._on_crash = on_crash
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._num_started = 0
        self._group: TaskGroup

    async def open(self) -> None:
        """Make the group; to be called from the owner's `__aenter__`."""
        self._group = await anyio.create_task_group().__aenter__()

    def start(self, run: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task that runs until it ends or `close` ends it."""
        self._num_started += 1
        scope = self._scopes[self._num_started] = anyio.CancelScope(shield=True)
        self._group.start_soon(self._run, self._num_started, scope, run, args)

    async def close(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """End every task, and give what the owner's `__aexit__` shall return.

        Raises:
            BaseExceptionGroup: Tasks had failed.
        """
        for scope in list(self._scopes.values()):
            scope.cancel()
        if isinstance(exc, anyio.get_cancelled_exc_class()):
            return await self._group.__aexit__(exc_type, exc, traceback)
        await self._group.__aexit__(None, None, None)
        return None

    async def _run(
        self, number: int, scope: anyio.CancelScope, run: Callable[..., Awaitable[None]], args: tuple[Any, ...]
    ) -> None:
        try:
            with scope:
                await run(*args)
        except BaseException:
            if self._on_crash is not None:
                self._on_crash()
            raise
        finally:
            del self._scopes[number]
