"""Task groups for commands, benchmarks and tests, and the loop of commands that serve."""

import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from anyio.abc import TaskGroup

__all__ = ["open_tasks", "serving"]


@asynccontextmanager
async def open_tasks() -> AsyncIterator[TaskGroup]:
    """Open a task group that raises its first error alone; the others are consequences of it."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise _first_leaf(group) from group


def _first_leaf(group: "BaseExceptionGroup[BaseException]") -> BaseException:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def serving(name: str, opened: AbstractAsyncContextManager[str]) -> Callable[[], int]:
    """Return the function of a command that serves until SIGINT or SIGTERM, which may also come while it starts.

    Args:
        name: Prefix of the line on standard error that names the signal.
        opened: What is served, and closed at the signal in a cancelled scope. Yields what to print once it is open.
    """

    async def serve() -> int:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with open_tasks() as tasks:
                tasks.start_soon(keep_open)
                received = await anext(signals)
                print(f"{name}: stopped by {received.name}", file=sys.stderr)
                tasks.cancel_scope.cancel()
        return 0

    async def keep_open() -> None:
        async with opened as line:
            print(line, flush=True)
            await anyio.sleep_forever()

    return lambda: anyio.run(serve)
