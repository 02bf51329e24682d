"""Ends a listener that native code waits on.

Mooncake's destructor waits until its listener next wakes up, up to a second, and no Python runs meanwhile. A listener
that is shut down wakes up at once.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["stop_listening"]


def stop_listening(port: int) -> None:
    """Shut down this process's listening TCP socket on a port, if there is one."""
    for found in _sockets():
        with found, contextlib.suppress(OSError):
            is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if found.family == socket.AF_INET and is_listening and found.getsockname()[1] == port:
                found.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Second handles of this process's sockets."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                yield socket.socket(fileno=os.dup(int(entry.name)))
