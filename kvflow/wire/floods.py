"""Finds connections that send without ever ending a message.

libzmq keeps the parts of a message that has not ended, however many they are, and shows them to nobody. What it has
taken from a connection is known to the kernel, though. On a host whose kernel does not say it, nothing is found.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

__all__ = ["Floods"]

CHECK_S: Final = 0.25

IDLE_BYTES: Final = 256
"""What heartbeats may take between two checks."""

BYTES_RECEIVED: Final = 128
"""Where Linux says in its `tcp_info` how many bytes have come, as a uint64."""


class Floods:
    """Watches the connections of a listener, and breaks those that send too much without ending a message.

    Messages that the event loop has not taken yet count as well.

    Args:
        port: Of the listener; nothing else is touched, since libzmq may have closed a descriptor by now.
        max_bytes: What may come without the end of a message.
        on_cut: Told of each connection that is broken.
    """

    def __init__(self, port: int, max_bytes: int, on_cut: Callable[[], None]) -> None:
        self._port = port
        self._max_bytes = max_bytes
        self._on_cut = on_cut
        self._loop = asyncio.get_running_loop()
        self._bases: dict[int, int] = {}
        self._suspects: dict[int, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_suspects(self) -> bool:
        """Some connection has sent much since it was last heard; `heard` is of interest."""
        return bool(self._suspects)

    def accepted(self, fd: int) -> None:
        """Watch a connection, by its descriptor."""
        self._bases[fd] = 0
        if self._timer is None:
            self._timer = self._loop.call_later(CHECK_S, self._check)

    def gone(self, fd: int) -> None:
        """Watch it no longer."""
        self._bases.pop(fd, None)
        self._suspects.pop(fd, None)

    def heard(self, fd: int) -> None:
        """Note that a message of a connection was taken."""
        if self._suspects.pop(fd, 0) is None and (received := self._received(fd)) is not None:
            self._bases[fd] = received

    def cut(self, fd: int) -> None:
        """Break a connection; libzmq forgets what has come of its message."""
        own = self._open(fd)
        if own is not None:
            with own, suppress(OSError):  # its other end may be gone by now
                own.shutdown(socket.SHUT_RDWR)
            self.gone(fd)
            self._on_cut()

    def close(self) -> None:
        """Watch nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._bases.clear()
        self._suspects.clear()

    def _check(self) -> None:
        for fd, base in list(self._bases.items()):
            received = self._received(fd)
            if received is None:
                continue
            unheard = received - base
            if fd in self._suspects and unheard > self._max_bytes:
                self.cut(fd)
            elif unheard > self._max_bytes // 4:
                self._suspects[fd] = None
            elif fd not in self._suspects:
                self._bases[fd] = min(base + IDLE_BYTES, received)
        self._timer = self._loop.call_later(CHECK_S, self._check) if self._bases else None

    def _received(self, fd: int) -> int | None:
        own = self._open(fd)
        if own is None:
            return None
        with own:
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
        return struct.unpack_from("=Q", info, BYTES_RECEIVED)[0] if len(info) >= BYTES_RECEIVED + 8 else None

    def _open(self, fd: int) -> socket.socket | None:
        """Open a connection by its descriptor once more; None if it is none of the listener any more."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            own = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        try:
            own.getpeername()
            if own.getsockname()[1] == self._port:
                return own
        except (OSError, IndexError):
            pass
        own.close()
        return None
