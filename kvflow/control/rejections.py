"""Limits how many rejected messages a peer may send before its connection is closed."""

from collections.abc import Callable
from typing import Final

from kvflow.errors import RemoteProtocolError
from kvflow.gate.rates import RateLimiter
from kvflow.trust import principal_of

__all__ = ["REJECTIONS_AT_ONCE", "RejectionLimiter"]

REJECTIONS_PER_S: Final = 64
"""Allowed rate of messages that are malformed or sent in the name of others. Ranks hardly ever send any."""

REJECTIONS_AT_ONCE: Final = 1_024
"""Allowed burst of such messages."""

BYTES_OF_ONE: Final = 16 * 2**10
"""A message counts once more per this many bytes: it was not parsed, but it was received."""


class RejectionLimiter:
    """Limits the rate of rejected messages per principal; without keys, per connection.

    Args:
        names_of: Returns the instances that the peer of a connection may act for.
        now: Returns monotonic time in seconds.
    """

    def __init__(self, names_of: Callable[[bytes], tuple[str, ...]], now: Callable[[], float]) -> None:
        self._names_of = names_of
        self._now = now
        self._limiter = RateLimiter[bytes | str](REJECTIONS_AT_ONCE, REJECTIONS_PER_S)

    def add(self, connection: bytes, num_bytes: int = 0, *, is_repeated: bool = False) -> None:
        """Count a rejected message.

        Args:
            connection: Connection that it arrived on.
            num_bytes: Its size.
            is_repeated: Whether honest peers repeat it until it is accepted, which all ranks of a principal may do at
                once. It counts for its connection only.

        Raises:
            RemoteProtocolError: The budget is exceeded, and the connection must be closed.
        """
        taker = connection if is_repeated else principal_of(self._names_of(connection)) or connection
        if not self._limiter.spend(taker, self._now(), 1 + num_bytes // BYTES_OF_ONE):
            raise RemoteProtocolError("too many rejected messages", at_once=REJECTIONS_AT_ONCE)
