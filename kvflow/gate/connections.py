"""Which connections are cut: they send more than is read, or nothing any more, or do not read. Pure.

The kernel's counts are passed in. A connection is known by its descriptor while it exists, and what is left of it when
it has ended by its routing id, because descriptors are reused.
"""

from collections.abc import Callable
from typing import Final

from kvflow.gate.sizes import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from kvflow.gate.verdict import Cut

__all__ = [
    "GRACE_S",
    "MAX_ANSWERS_BYTES",
    "MAX_PAUSE_S",
    "MAX_SILENCE_MS",
    "MAX_WAITING_BYTES",
    "MUCH_BYTES",
    "UnreadBytes",
    "UnsentBytes",
]

MAX_WAITING_BYTES: Final = 8 * MAX_REQUEST_BYTES
"""Limit of unread bytes of one connection to a listener. A decode rank that grants 16,384 rooms at once sends less than
half of it (`kvflow.state.decode.room.PAGES_INLINE_IN_ALL`)."""

MAX_WAITING_IN_ALL_BYTES: Final = 32 * MAX_REQUEST_BYTES
"""Limit of unread bytes of all connections to a listener."""

MAX_ANSWERS_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Limit of unread bytes of a connection that this process has opened."""

COMMAND_BYTES: Final = 256
"""Allowance for heartbeats and the end of a handshake between two checks."""

MAX_SILENCE_MS: Final = 1_600
"""Maximum silence of a connection to a listener after its first message, when its handshake is done and heartbeats
follow: their interval, and the time that an answer to one may take (`kvflow.control.sockets`)."""

GRACE_S: Final = 0.02
"""How long messages may wait after a connection has ended before no further connection is accepted, in seconds."""

MUCH_BYTES: Final = 2**20
"""If a connection that has ended left more unread than this, no further connection is accepted from now on."""

MAX_PAUSE_S: Final = 2.0
"""How long no connection is accepted at most while messages of connections that have ended are being read, in seconds.
"""


class UnreadBytes:
    """Compares the bytes that were read from each connection of a socket with those that the kernel has received.

    A connection is cut if it exceeds the limits at two checks in a row. What is left of a connection that has ended
    counts as well, and is dropped first.

    Attributes:
        num_read: Bytes read from each connection that exists, by descriptor.
        ended: What is left of connections that have ended, as far as known, by routing id.
    """

    def __init__(self, *, is_listener: bool) -> None:
        self._is_listener = is_listener
        self._most = MAX_WAITING_BYTES if is_listener else MAX_ANSWERS_BYTES
        self._most_in_all = MAX_WAITING_IN_ALL_BYTES if is_listener else MAX_ANSWERS_BYTES
        self.num_read: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._unheard: set[int] = set()
        self._suspects: set[int | bytes] = set()
        self.ended: dict[bytes, int] = {}

    def watch(self, fd: int) -> None:
        """Start counting for a new connection."""
        self.num_read[fd] = self._left[fd] = 0
        self._unheard.add(fd)

    def forget(self, fd: int) -> int:
        """Stop counting for a connection; return how many bytes of it are unread, as far as known."""
        self._unheard.discard(fd)
        self._suspects.discard(fd)
        self.num_read.pop(fd, None)
        return self._left.pop(fd, 0)

    def is_unheard(self, fd: int) -> bool:
        """Return whether a connection exists and no message of it was read."""
        return fd in self._unheard

    def keep_left(self, fd: int, num_bytes: int) -> None:
        """Remember how much is unread of a connection that was cut, until `forget` is called at its end."""
        self._left[fd] = num_bytes

    def note_read(self, fd: int, num_bytes: int) -> None:
        """Note that a message of a connection was read."""
        self._unheard.discard(fd)
        self.num_read[fd] += num_bytes

    def note_received(self, fd: int, num_bytes: int, silence_ms: int) -> bool:
        """Note what the kernel has received, with heartbeats; return whether the connection is silent for too long."""
        self.num_read[fd] = min(self.num_read[fd], num_bytes)
        self._left[fd] = num_bytes - self.num_read[fd]
        return self._is_listener and silence_ms > MAX_SILENCE_MS and fd not in self._unheard

    def allow_commands(self, fd: int) -> None:
        """Allow for heartbeats, which are received but not read, since the last check."""
        self.num_read[fd] += COMMAND_BYTES

    def excessive(self) -> list[Cut]:
        """Return what is over the limits now and was at the last check."""
        waiting: dict[int | bytes, int] = {fd: self._left[fd] for fd in self.num_read if self._left[fd]} | self.ended
        in_all = sum(waiting.values())
        suspects: dict[int | bytes, None] = {}
        for one in sorted(waiting, key=lambda one: (one in self.ended, waiting[one]), reverse=True):
            if waiting[one] > self._most or in_all > self._most_in_all:
                suspects[one] = None
                in_all -= waiting[one]
        before, self._suspects = self._suspects, set(suspects)
        return [(one, f"{waiting[one]} of its bytes were waiting to be read") for one in suspects if one in before]


MAX_UNSENT_BYTES: Final = MAX_MESSAGE_BYTES
"""Limit for one connection, not counting the message that is about to be sent."""

MAX_UNSENT_IN_ALL_BYTES: Final = 4 * MAX_MESSAGE_BYTES
"""Limit for all connections of a socket. When it is exceeded, the connections with the most unsent bytes are closed
until half of the limit is left, so that not all of them are checked for every message."""


class UnsentBytes:
    """Counts the unsent bytes of each connection of a socket.

    libzmq limits its send queues in messages only, and a message may have 64 MiB. So the bytes sent over each
    connection are counted; the kernel knows how many of them the peer has acknowledged. It is asked only when a limit
    would be exceeded if nothing had been acknowledged since the last time.

    `acked_of` returns how many bytes the peer of a connection has acknowledged, given its descriptor; None if that is
    unknown, in which case all are.
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
