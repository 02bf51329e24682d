"""Closes connections whose peer does not read its messages.

libzmq limits its send queues in messages only, and a message may have 64 MiB. This module counts the bytes sent over
each connection; the kernel knows how many of them the peer has acknowledged. It queries the kernel only when the limit
would be exceeded if nothing had been acknowledged since the last query.
"""

from collections.abc import Callable
from typing import Final

from kvflow.control.tcp import Tcp
from kvflow.gate.sizes import MAX_MESSAGE_BYTES

__all__ = ["MAX_UNSENT_BYTES", "MAX_UNSENT_IN_ALL_BYTES", "Backlog"]

MAX_UNSENT_BYTES: Final = MAX_MESSAGE_BYTES
"""Limit for one connection, not counting the message that is about to be sent."""

MAX_UNSENT_IN_ALL_BYTES: Final = 4 * MAX_MESSAGE_BYTES
"""Limit for all connections of a socket. When it is exceeded, the connections with the most unsent bytes are closed
until half of the limit is left, so that not all of them are checked for every message."""


class Backlog:
    """Counts the unsent bytes of each connection of a socket.

    Args:
        tcp: The connections, as the kernel sees them.
        cut: Called with a descriptor and a reason to close a connection.
    """

    def __init__(self, tcp: Tcp, cut: Callable[[int, str], None]) -> None:
        self._tcp = tcp
        self._cut = cut
        self._sent: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._in_all = 0

    def admits(self, fd: int) -> bool:
        """Return whether another message may be sent over a connection. Closes it if its peer does not read."""
        if self._waiting.get(fd, 0) > MAX_UNSENT_BYTES and self._measure_unsent(fd) > MAX_UNSENT_BYTES:
            self._break(fd)
        if self._in_all > MAX_UNSENT_IN_ALL_BYTES:
            self._make_room()
        return fd in self._waiting

    def sent(self, fd: int, length: int) -> None:
        """Record that a message of `length` bytes was queued."""
        num_bytes = self._tcp.bytes_on_wire(length)
        self._sent[fd] += num_bytes
        self._waiting[fd] += num_bytes
        self._in_all += num_bytes

    def watch(self, fd: int) -> None:
        """Start counting for a new connection."""
        self.forget(fd)
        self._sent[fd] = self._waiting[fd] = 0

    def forget(self, fd: int) -> None:
        """Stop counting for a connection."""
        self._sent.pop(fd, None)
        self._in_all -= self._waiting.pop(fd, 0)

    def _measure_unsent(self, fd: int) -> int:
        """Query the kernel, and return the unsent bytes. Acknowledged heartbeats and handshakes give no credit."""
        counts = self._tcp.counts(fd)
        waiting = 0
        if counts is not None:
            self._sent[fd] = max(self._sent[fd], counts.acked)
            waiting = self._sent[fd] - counts.acked
        self._in_all += waiting - self._waiting[fd]
        self._waiting[fd] = waiting
        return waiting

    def _make_room(self) -> None:
        for fd in sorted(self._waiting, key=self._measure_unsent, reverse=True):
            if self._in_all <= MAX_UNSENT_IN_ALL_BYTES // 2:
                break
            self._break(fd)

    def _break(self, fd: int) -> None:
        waiting = self._waiting[fd]
        self.forget(fd)
        self._cut(fd, f"{waiting} bytes for it were waiting to be sent")
