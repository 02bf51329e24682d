"""Waiting until nothing can come any more from processes that have ended."""

import functools
from contextlib import suppress
from typing import Final

import anyio

from kvflow.backends.sockets import Connections
from kvflow.backends.threads import run_in_thread
from kvflow.errors import BackendError

__all__ = ["SocketDrainCheck"]

LOOK_S: Final = 2e-3
MAX_LOOK_S: Final = 1.0
"""Between two looks at the connections, in seconds: twice as long each time. The kernel sends no event."""


class SocketDrainCheck:
    """Looks at the connections to this process for everybody who waits.

    Whoever asks has all connections looked at anew. That answers those who asked before as well: what is dry of the
    connections of now is dry of those that there were earlier.

    Args:
        of_domain: Look only at connections with processes of the same `kernel_domain`, see `Connections`.
    """

    def __init__(self, *, of_domain: bool = False) -> None:
        self._of_domain = of_domain
        self._looking = anyio.Lock()
        self._num_asked = 0
        self._num_answered = 0

    async def wait(self) -> None:
        """Wait until every connection that there is now has been dry once, or is closed. It may never be.

        Raises:
            OSError: The kernel does not show the connections.
        """
        self._num_asked += 1
        mine = self._num_asked
        async with self._looking:
            while self._num_answered < mine:
                self._num_answered = await self._wait_until_dry()

    async def _wait_until_dry(self) -> int:
        """Return how many had asked before the connections were looked at."""
        connections, asked, pause_s = None, 0, LOOK_S
        while True:
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_LOOK_S)
            with suppress(BackendError):  # there was no thread for this look, there may be one for the next
                if connections is None or asked != self._num_asked:
                    now_asked = self._num_asked
                    connections = await run_in_thread(functools.partial(Connections, of_domain=self._of_domain))
                    asked, pause_s = now_asked, LOOK_S
                if await run_in_thread(connections.are_dry):
                    return asked
