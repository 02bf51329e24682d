"""A cheap one-shot event."""

import asyncio

import anyio.lowlevel
import msgspec

__all__ = ["Flag"]


class Flag(msgspec.Struct, eq=False):
    """Like `anyio.Event`, but cheaper to create and to wait for: each open transfer has several flags.

    Attributes:
        is_set: True after `set`.
    """

    is_set: bool = False
    _waiters: tuple[asyncio.Future[None], ...] = ()

    def set(self) -> None:
        """Set the flag, and wake all waiting tasks."""
        self.is_set = True
        for waiter in self._waiters:
            if not waiter.done():  # cancelled, or set before
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the flag is set."""
        if self.is_set:
            await anyio.lowlevel.checkpoint()
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters = (*self._waiters, waiter)
        try:
            await waiter
        finally:
            self._waiters = tuple(one for one in self._waiters if one is not waiter)
