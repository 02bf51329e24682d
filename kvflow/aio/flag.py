"""Something that becomes true once, and that anybody can wait for."""

import asyncio

import anyio.lowlevel

__all__ = ["Flag"]


class Flag:
    """Like `anyio.Event`, but costs an event only while somebody waits: there is one for every open transfer.

    Attributes:
        is_set: It is true.
    """

    __slots__ = ("_event", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._event: asyncio.Event | None = None

    def set(self) -> None:
        """Make it true, and wake whoever waits."""
        self.is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Wait until it is true."""
        if self.is_set:
            await anyio.lowlevel.checkpoint()
            return
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()
