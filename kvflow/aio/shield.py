"""Runs work to its end, even if the waiting task is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

__all__ = ["run_shielded"]

Result = TypeVar("Result")


async def run_shielded(work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work that must not be left halfway; a cancellation is raised once the work has ended.

    anyio's shielded scopes block only anyio's own cancellation, not `asyncio.Task.cancel`, which `asyncio.timeout` and
    many servers use. So the work runs in its own task.
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
