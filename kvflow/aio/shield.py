"""Work that has to be done to its end, even if its task is cancelled meanwhile."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

__all__ = ["to_the_end"]

Result = TypeVar("Result")


async def to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for something that must not be left halfway; if that is cancelled, raise it when the work has ended.

    A shielded scope of anyio keeps only anyio's own cancellation away. `asyncio.Task.cancel`, which `asyncio.timeout`
    and many servers use, reaches into it. The work runs in a task of its own.

    Raises:
        CancelledError: The caller was cancelled; the work has been done.
        BaseException: What the work raises.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
