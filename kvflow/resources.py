"""Resources of this process that may run out: what is reserved, and which limit an error of the system means.

A shortage here must not look like a silent peer, and libzmq and other libraries abort the process if they meet one
while they start. So threads start when a rank opens, and some descriptors are kept for its first connections.
"""

import asyncio
import errno
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvflow.errors import Shortage, ThreadShortage

if sys.platform != "win32":
    import resource

__all__ = [
    "RESERVED",
    "Reserve",
    "check_shortage",
    "check_threads",
    "describe_shortage",
    "descriptors",
    "error_text",
    "find_shortage",
    "limit_of",
    "num_descriptors_left",
    "pinning_facts",
    "report_accept_shortages",
    "shared_memory_facts",
]

RESERVED: Final = 12
"""Descriptors kept open for the first contact with a peer: a lookup and a connection, each with its monitor."""

REPORT_AGAIN_S: Final = 60.0
DESCRIPTORS: Final = Path("/proc/self/fd")
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - it is only asked how full it is
LIMITS: Final = {errno.EMFILE: "RLIMIT_NOFILE", errno.ENOMEM: "RLIMIT_AS", errno.EAGAIN: "RLIMIT_NPROC"}
SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def check_shortage(number: int | None) -> None:
    """Raise a Shortage if the number of an error means that the system has refused a resource."""
    if number is not None and number in SHORTAGES:
        raise Shortage("this process is short of a resource", detail=describe_shortage(number))


def find_shortage() -> str:
    """Return that this process has no descriptors left, with the limit; empty if it has."""
    try:
        os.close(_open())
    except OSError as error:
        return describe_shortage(error.errno or 0)
    return ""


def error_text(error: Exception) -> str:
    """Return the type and text of a library's exception, and that this process has no descriptors left, if so."""
    text, found = f"{type(error).__name__}: {error}", find_shortage()
    return f"{text}; {found}" if found else text


def describe_shortage(number: int) -> str:
    """Describe an error number by its name, the limit it means, and how much of that is in use."""
    text = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
    limit = limit_of(LIMITS[number]) if number in LIMITS else ""
    if number == errno.EMFILE:
        return f"{text}: {limit}, {_num_open()} open"
    return f"{text}: {limit}" if limit else text


def limit_of(name: str) -> str:
    """Return a limit of this process like "RLIMIT_NOFILE is 1024"; empty if it is unknown."""
    if sys.platform == "win32" or not hasattr(resource, name):
        return ""
    soft, _ = resource.getrlimit(getattr(resource, name))
    return f"{name} is {'unlimited' if soft == resource.RLIM_INFINITY else soft}"


def pinning_facts() -> dict[str, object]:
    """Return what may forbid pinning memory, for an error; nothing if it is unlimited."""
    limit = limit_of("RLIMIT_MEMLOCK")
    return {} if not limit or limit.endswith("unlimited") else {"limit": f"{limit} bytes (raise it: ulimit -l)"}


def shared_memory_facts() -> dict[str, object]:
    """Return how much shared memory is free, for an error; nothing where it is unknown."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return {}
    return {"shared_memory": f"{SHARED_MEMORY} has {found.f_bavail * found.f_frsize} bytes free"}


def check_threads(number: int) -> None:
    """Start and end some threads; raise a ThreadShortage if this process may not."""
    is_checked = threading.Event()
    threads = [threading.Thread(target=is_checked.wait, daemon=True) for _ in range(number)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise ThreadShortage("cannot start a thread", detail=f"{error}: {limit_of('RLIMIT_NPROC')}") from error
    finally:
        is_checked.set()
        for thread in started:
            thread.join()


def report_accept_shortages(loop: asyncio.AbstractEventLoop, report: Callable[[str], None]) -> None:
    """Report that connections cannot be accepted; asyncio itself prints up to a hundred tracebacks a second.

    Args:
        loop: An event loop. Its exception handler is replaced; other exceptions go to the one before.
        report: Called with the error and the limit, once a minute at most.
    """
    before = loop.get_exception_handler()
    due = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal due
        try:
            if "socket" in context:
                check_shortage(getattr(context.get("exception"), "errno", None))
        except Shortage as shortage:
            if loop.time() >= due:
                due = loop.time() + REPORT_AGAIN_S
                report(f"connections cannot be accepted: {shortage.values['detail']}")
            return
        if before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    loop.set_exception_handler(handle)


class Reserve:
    """Descriptors kept open, so that they can be given up when others are needed. May be used from any thread.

    Args:
        size: How many to keep.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[int] = []
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def fill(self) -> None:
        """Keep as many as this object should, or raise a Shortage."""
        with self._lock:
            self._fill(self._size)

    def draw(self, number: int) -> None:
        """Make a number of descriptors available to libraries, if necessary from those kept, or raise a Shortage."""
        with self._lock:
            self._fill(number)
            for _ in range(number):
                os.close(self._kept.pop())

    def refill(self) -> None:
        """Keep as many as this object should again, once what was drawn is in use, but leave one to others."""
        with self._lock:
            self._fill(0)
            if 0 < len(self._kept) < self._size:
                os.close(self._kept.pop())

    def _fill(self, needed: int) -> None:
        """Keep as many as this object should, or at least as many as needed; otherwise as many as before."""
        taken: list[int] = []
        try:
            while len(self._kept) + len(taken) < max(self._size, needed):
                taken.append(_open())
        except OSError as error:
            if len(self._kept) + len(taken) < needed:
                for fd in taken:
                    os.close(fd)
                check_shortage(error.errno)
                raise
        self._kept += taken

    def _forget(self) -> None:
        for fd in self._kept:
            os.close(fd)
        self._kept.clear()
        self._lock = threading.Lock()


def _open() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def num_descriptors_left() -> int | None:
    """Return how many more descriptors this process may open; None if that is unknown or unlimited."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        return max(0, soft - len(list(DESCRIPTORS.iterdir())))
    except OSError as error:  # listing them takes one, too
        return 0 if error.errno == errno.EMFILE else None


def _num_open() -> str:
    try:
        return str(len(list(DESCRIPTORS.iterdir())))
    except OSError:  # listing them takes one, too
        return "all"


descriptors: Final = Reserve(RESERVED)
"""The reserve of this process."""
