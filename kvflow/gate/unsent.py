"""Which connections do not read what they are sent, and are cut. Pure: the kernel's counts are passed in.

libzmq limits its send queues in messages only, and a message may have 64 MiB. So the bytes sent over each connection
are counted; the kernel knows how many of them the peer has acknowledged. It is asked only when a limit would be
exceeded if nothing had been acknowledged since the last time.
"""

from collections.abc import Callable
from typing import Final

from kvflow.gate.sizes import MAX_MESSAGE_BYTES
from kvflow.gate.verdict import Cut

__all__ = ["UnsentBytes"]

MAX_UNSENT_BYTES: Final = MAX_MESSAGE_BYTES
"""Limit for one connection, not counting the message that is about to be sent."""

MAX_UNSENT_IN_ALL_BYTES: Final = 4 * MAX_MESSAGE_BYTES
"""Limit for all connections of a socket. When it is exceeded, the connections with the most unsent bytes are closed
until half of the limit is left, so that not all of them are checked for every message."""


class UnsentBytes:
    """Counts the unsent bytes of each connection of a socket.

    Args:
        acked_of: Returns how many bytes the peer of a connection has acknowledged, given its descriptor; None if that
            is unknown, in which case all are.

    Attributes:
        waiting: Unsent bytes of each connection, by descriptor, as far as known.
    """

    def __init__(self, acked_of: Callable[[int], int | None]) -> None:
        self._acked_of = acked_of
        self._sent: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self._in_all = 0

    def excessive(self, fd: int) -> list[Cut]:
        """Return the connections to close before another message is sent over one, and forget them."""
        cuts: list[Cut] = []
        if self.waiting.get(fd, 0) > MAX_UNSENT_BYTES and self._measure(fd) > MAX_UNSENT_BYTES:
            cuts.append(self._cut(fd))
        if self._in_all > MAX_UNSENT_IN_ALL_BYTES:
            for one in sorted(self.waiting, key=self._measure, reverse=True):
                if self._in_all <= MAX_UNSENT_IN_ALL_BYTES // 2:
                    break
                cuts.append(self._cut(one))
        return cuts

    def note_sent(self, fd: int, num_bytes: int) -> None:
        """Note that a message was queued, which takes `num_bytes` on the wire."""
        self._sent[fd] += num_bytes
        self.waiting[fd] += num_bytes
        self._in_all += num_bytes

    def watch(self, fd: int) -> None:
        """Start counting for a new connection."""
        self._sent[fd] = self.waiting[fd] = 0

    def forget(self, fd: int) -> None:
        """Stop counting for a connection."""
        self._sent.pop(fd, None)
        self._in_all -= self.waiting.pop(fd, 0)

    def _measure(self, fd: int) -> int:
        """Return the unsent bytes. Acknowledged heartbeats and handshakes give no credit."""
        acked = self._acked_of(fd)
        waiting = 0
        if acked is not None:
            self._sent[fd] = max(self._sent[fd], acked)
            waiting = self._sent[fd] - acked
        self._in_all += waiting - self.waiting[fd]
        self.waiting[fd] = waiting
        return waiting

    def _cut(self, fd: int) -> Cut:
        waiting = self.waiting[fd]
        self.forget(fd)
        return fd, f"{waiting} bytes for it were waiting to be sent"
