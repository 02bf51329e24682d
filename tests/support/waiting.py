"""Waiting for what no event tells."""

from collections.abc import Callable

import anyio

__all__ = ["POLL_S", "until"]

POLL_S = 0.001


async def until(condition: Callable[[], object]) -> None:
    """Look again and again; a condition that never comes true ends in the test's own time limit."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread, process or library
        await anyio.sleep(POLL_S)
