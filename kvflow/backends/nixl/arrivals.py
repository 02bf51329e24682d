"""Detects that data has arrived for an agent, without polling the agent.

NIXL can only be polled, so a notice that arrives between two polls waits for the next one. For TCP, which carries all
notices on one host, UCX adds its sockets to an epoll instance, which is readable while one of them is. The event loop
watches that instance and polls at once. This is only an optimisation: data that arrives over other paths (RDMA) is
found by the owner thread, which keeps polling.

Source: nixl 1.5.1 (UCX 1.23): one epoll instance for each TCP device of an agent, and one for UCX's own thread, which
watches those.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["Arrivals", "find_epolls"]

Made = TypeVar("Made")

DESCRIPTORS: Final = Path("/proc/self/fd")
DETAILS: Final = Path("/proc/self/fdinfo")
EPOLL: Final = "anon_inode:[eventpoll]"

PAUSE_S: Final = 1e-3
"""Pause after a poll that found nothing, in case a descriptor stays readable."""


class Arrivals:
    """Calls a function as soon as data has arrived. Create it on the event loop.

    Args:
        epolls: Descriptors from `find_epolls`; close them only after this object.
        poll: Called on the event loop; returns whether it found anything.
    """

    def __init__(self, epolls: Iterable[int], poll: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._poll = poll
        self._pauses: dict[int, asyncio.TimerHandle | None] = dict.fromkeys(epolls)
        for fd in self._pauses:
            self._loop.add_reader(fd, self._look, fd)

    def close(self) -> None:
        """Stop watching. May be called twice."""
        while self._pauses:
            fd, pause = self._pauses.popitem()
            if pause is not None:
                pause.cancel()
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)

    def _look(self, fd: int) -> None:
        if not self._poll() and fd in self._pauses:
            self._loop.remove_reader(fd)
            self._pauses[fd] = self._loop.call_later(PAUSE_S, self._go_on, fd)

    def _go_on(self, fd: int) -> None:
        self._pauses[fd] = None
        self._loop.add_reader(fd, self._look, fd)


def find_epolls(make: Callable[[], Made]) -> tuple[Made, tuple[int, ...]]:
    """Create an agent, and find the epoll instances that it has created for its sockets.

    Returns:
        The agent, and duplicated descriptors of the instances, owned by the caller; none if the system does not list
        them. An instance created by another thread at the same time may be included.
    """
    if sys.platform != "linux":
        return make(), ()
    before = _epolls()
    made = make()
    new = _epolls().keys() - before.keys()
    return made, tuple(os.dup(fd) for fd in sorted(new) if not _watched_by(fd) & new)


def _epolls() -> dict[int, None]:
    found: dict[int, None] = {}
    for entry in DESCRIPTORS.iterdir():
        try:
            if str(entry.readlink()) == EPOLL:
                found[int(entry.name)] = None
        except OSError:  # closed in the meantime
            continue
    return found


def _watched_by(fd: int) -> set[int]:
    """Return the descriptors watched by an epoll instance."""
    lines = (DETAILS / str(fd)).read_text().splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
