"""Counts messages that a listener refuses, until their sender has said too many."""

from collections.abc import Callable
from typing import Final

from kvflow.errors import RemoteProtocolError
from kvflow.state.budgets import Budgets
from kvflow.wire.principals import principal_of

__all__ = ["REFUSALS_AT_ONCE", "Refusals"]

REFUSALS_PER_S: Final = 64
"""Messages that are malformed or in the name of others. Ranks hardly send any."""

REFUSALS_AT_ONCE: Final = 1_024
"""Such messages that may come together."""

BYTES_OF_ONE: Final = 16 * 2**10
"""A longer one counts as several: it is not read, but it was received."""


class Refusals:
    """What each sender may still say: all together who may speak for the same instances, each by itself without keys.

    Args:
        names_of: Gives the instances that the other end of a connection may speak for.
        now: Gives monotonic seconds.
    """

    def __init__(self, names_of: Callable[[bytes], tuple[str, ...]], now: Callable[[], float]) -> None:
        self._names_of = names_of
        self._now = now
        self._budgets = Budgets[bytes | str](REFUSALS_AT_ONCE, REFUSALS_PER_S)

    def add(self, connection: bytes, num_bytes: int = 0) -> None:
        """Note a message of so many bytes.

        Raises:
            RemoteProtocolError: It is one too many, and its connection is to be broken.
        """
        taker = principal_of(self._names_of(connection)) or connection
        if not self._budgets.take(taker, self._now(), 1 + num_bytes // BYTES_OF_ONE):
            raise RemoteProtocolError("too many rejected messages", at_once=REFUSALS_AT_ONCE)
