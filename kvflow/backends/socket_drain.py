"""Waits until data in flight from ended processes can no longer arrive."""

import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

import anyio

from kvflow.backends.sockets import Connections, Elsewhere
from kvflow.backends.threads import run_in_thread
from kvflow.errors import BackendError, Shortage
from kvflow.resources import check_shortage

__all__ = ["SocketDrainCheck"]

Result = TypeVar("Result")

LOOK_S: Final = 2e-3
MAX_LOOK_S: Final = 1.0
"""Longest pause between two checks; the first is `LOOK_S`, and each is twice as long. The kernel sends no event."""


class SocketDrainCheck:
    """Checks the connections to this process on behalf of all callers of `wait`.

    Each call to `wait` makes the check start over with all current connections. Its result also answers earlier calls:
    once the current connections are dry, so are those that existed earlier.

    Args:
        of_domain: Check only connections with processes of the same `kernel_domain`; see `Connections`.
        find: Finds the connections to check instead, before they are listed; see `Connections`. A BackendError that it
            raises is a reason to try again.
    """

    def __init__(self, *, of_domain: bool = False, find: Callable[[], Awaitable[Elsewhere]] | None = None) -> None:
        self._of_domain = of_domain
        self._find = find
        self._looking = anyio.Lock()
        self._num_asked = 0
        self._num_answered = 0

    async def wait(self) -> None:
        """Wait until every connection that exists now has been dry once, or is closed. This may never happen.

        Raises:
            OSError: The kernel does not show the connections. A shortage of descriptors is waited out.
        """
        self._num_asked += 1
        mine = self._num_asked
        async with self._looking:
            while self._num_answered < mine:
                self._num_answered = await self._wait_until_dry()

    async def _wait_until_dry(self) -> int:
        """Wait until the connections are dry, and return how many callers had asked when they were last listed."""
        connections, asked, pause_s = None, 0, LOOK_S
        while True:
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_LOOK_S)
            with suppress(BackendError, Shortage):  # this time
                if connections is None or asked != self._num_asked:
                    now_asked = self._num_asked
                    elsewhere = None if self._find is None else await self._find()
                    connections = await _look(
                        functools.partial(Connections, of_domain=self._of_domain, elsewhere=elsewhere)
                    )
                    asked, pause_s = now_asked, LOOK_S
                if await _look(connections.are_dry):
                    return asked


async def _look(look: Callable[[], Result]) -> Result:
    """Call a function that reads the kernel's tables in a thread.

    Raises:
        BackendError, Shortage: There is no thread, or no descriptor.
        OSError: Any other error.
    """
    try:
        return await run_in_thread(look)
    except OSError as error:
        check_shortage(error.errno)
        raise
