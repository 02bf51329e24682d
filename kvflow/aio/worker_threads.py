"""Runs blocking functions in worker threads."""

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from kvflow.errors import ThreadShortage

__all__ = ["run_in_thread"]

Result = TypeVar("Result")


async def run_in_thread(
    function: Callable[[], Result], *, limiter: anyio.CapacityLimiter | None = None, abandon_on_cancel: bool = False
) -> Result:
    """Run a function and return its result or raise its exception, as `anyio.to_thread.run_sync` does.

    Raises:
        ThreadShortage: No thread could be started; the function was not called.
    """
    is_started = False

    def run() -> Result:
        nonlocal is_started
        is_started = True
        return function()

    try:
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    except RuntimeError as error:  # also raised if a thread cannot be started
        if is_started:
            raise
        raise ThreadShortage("cannot start a thread", detail=str(error)) from error
