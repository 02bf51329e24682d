"""Detects that data has arrived for an agent, without polling the agent.

NIXL can only be polled, so a notice that arrives between two polls waits for the next one. For TCP, which carries all
notices on one host, UCX adds its sockets to an epoll instance, which is readable while one of them is. The event loop
watches that instance and polls at once. This is only an optimisation: data that arrives over other paths (RDMA) is
found by the owner thread, which keeps polling.

Source: nixl 1.5.1 (UCX 1.23): one epoll instance for each TCP device of an agent, and one for UCX's own thread, which
watches those.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

__all__ = ["Arrivals"]

PAUSE_S: Final = 1e-3
"""Pause after a poll that found nothing, in case a descriptor stays readable."""


class Arrivals:
    """Calls a function as soon as data has arrived. Create it on the event loop.

    Args:
        epolls: Descriptors from `kvflow.backends.library_sockets.find_epolls`; close them only after this object.
        poll: Called on the event loop; returns whether it found anything.
    """

    def __init__(self, epolls: Iterable[int], poll: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._poll = poll
        self._pauses: dict[int, asyncio.TimerHandle | None] = dict.fromkeys(epolls)
        try:
            for fd in self._pauses:
                self._loop.add_reader(fd, self._check_socket, fd)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Stop watching. May be called twice."""
        while self._pauses:
            fd, pause = self._pauses.popitem()
            if pause is not None:
                pause.cancel()
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)

    def _check_socket(self, fd: int) -> None:
        if not self._poll() and fd in self._pauses:
            self._loop.remove_reader(fd)
            self._pauses[fd] = self._loop.call_later(PAUSE_S, self._go_on, fd)

    def _go_on(self, fd: int) -> None:
        self._pauses[fd] = None
        self._loop.add_reader(fd, self._check_socket, fd)
