"""Sees that something has come for an agent, without asking it.

NIXL can only be polled, and a notice that came between two polls waits for the next one. Where it comes over TCP, as
notices do on one host, UCX has its sockets in an epoll instance, which is readable while one of them is. So the event
loop watches that, and polls at once. Nothing depends on it: what comes another way (RDMA) is found by the owner thread,
which polls all the same.

Source: nixl 1.5.1 (UCX 1.23): one epoll instance for each TCP device of an agent, and one of a thread of UCX's own,
which has those in it.
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
"""After a poll that found nothing, so that a descriptor that stays readable takes little time."""


class Arrivals:
    """Calls a function as soon as something has come. Create it on the event loop.

    Args:
        epolls: From `find_epolls`; to be closed after it.
        poll: Called on the event loop; says whether it has found anything.
    """

    def __init__(self, epolls: Iterable[int], poll: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._poll = poll
        self._pauses: dict[int, asyncio.TimerHandle | None] = dict.fromkeys(epolls)
        for fd in self._pauses:
            self._loop.add_reader(fd, self._look, fd)

    def close(self) -> None:
        """Call nothing any more. May be called twice."""
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
    """Make an agent, and find the epoll instances that it has made for its sockets.

    Returns:
        The agent, and descriptors of the instances, which are the caller's; none where the system does not list them.
        An instance that another thread makes meanwhile may be among them.
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
        except OSError:  # it was closed meanwhile
            continue
    return found


def _watched_by(fd: int) -> set[int]:
    """Return the descriptors that an epoll instance watches."""
    lines = (DETAILS / str(fd)).read_text().splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
