"""A cheap one-shot event."""

import asyncio

import anyio.lowlevel

__all__ = ["Flag"]


class Flag:
    """Like `anyio.Event`, but allocates an event only while a task waits: each open transfer has several flags.

    Attributes:
        is_set: True after `set`.
    """

    __slots__ = ("_event", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._event: asyncio.Event | None = None

    def set(self) -> None:
        """Set the flag, and wake all waiting tasks."""
        self.is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Wait until the flag is set."""
        if self.is_set:
            await anyio.lowlevel.checkpoint()
            return
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()
