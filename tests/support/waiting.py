"""Polling for conditions without an event."""

from collections.abc import Callable

import anyio

__all__ = ["POLL_S", "until"]

POLL_S = 0.001


async def until(condition: Callable[[], object]) -> None:
    """Poll until a condition is true; the time limit of the test applies."""
    while not condition():  # noqa: ASYNC110 - the condition depends on another thread, process or library
        await anyio.sleep(POLL_S)
