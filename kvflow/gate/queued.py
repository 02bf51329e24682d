"""How many messages of a principal may wait to be parsed. Pure."""

from collections import Counter, deque
from typing import Final

from kvflow.gate.sizes import Unread
from kvflow.gate.verdict import ACCEPTED, Action, Verdict

__all__ = ["QueuedMessages"]

MAX_QUEUED_BYTES: Final = 16 * 2**20
"""Limit per principal for queued messages: long ones, and those that arrived after them."""

OVERHEAD_BYTES: Final = 256
"""Counted for each queued message in addition to its bytes."""


class QueuedMessages:
    """The queued messages of one principal.

    Attributes:
        waiting: Messages with their connections; the first one is being parsed.
        connections: Number of queued messages by connection.
        num_bytes: Total size of the queued messages, including overhead.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[bytes, Unread]] = deque()
        self.connections: Counter[bytes] = Counter()
        self.num_bytes = 0

    def add_message(self, connection: bytes, unread: Unread) -> Verdict:
        """Queue a message if there is room."""
        if self.num_bytes + len(unread.data) > MAX_QUEUED_BYTES:
            return Verdict(Action.POSTPONE, "message_over_budget")
        self.waiting.append((connection, unread))
        self.connections[connection] += 1
        self.num_bytes += len(unread.data) + OVERHEAD_BYTES
        return ACCEPTED

    def drop_first(self) -> None:
        """Remove the first message, which was parsed."""
        connection, unread = self.waiting.popleft()
        self.connections[connection] -= 1
        self.num_bytes -= len(unread.data) + OVERHEAD_BYTES
