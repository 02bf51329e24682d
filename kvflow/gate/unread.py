"""Which connections send more than is read, or nothing any more, and are cut. Pure: the kernel's counts are passed in.

A connection is known by its descriptor while it exists, and what is left of it when it has ended by its routing id,
because descriptors are reused.
"""

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

    Args:
        is_listener: Whether the connections are to a listener, or one that this process has opened.

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
        """Note how many bytes of a connection the kernel has received, which may include heartbeats.

        Returns:
            Whether the connection has been silent for too long, given the time since it received data.
        """
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
