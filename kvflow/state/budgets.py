"""How often somebody may do something: so many times at once, and more as time passes. Pure."""

from typing import Final, Generic, TypeVar

from kvflow.errors import RemoteProtocolError

__all__ = ["REFUSALS_AT_ONCE", "Budgets", "Refusals"]

MAX_BUDGETS: Final = 4_096

REFUSALS_PER_S: Final = 64
"""Messages that are refused, of all who may speak for the same instances; without keys, of all. Ranks hardly send
any."""

REFUSALS_AT_ONCE: Final = 1_024
"""Such messages that may come together, as from decode ranks that do not know yet that this process is a new one."""

Taker = TypeVar("Taker")


class Budgets(Generic[Taker]):
    """What each taker has left.

    Args:
        at_once: What may be taken together.
        per_s: What comes back in a second.
    """

    def __init__(self, at_once: int, per_s: float) -> None:
        self._at_once = float(at_once)
        self._per_s = per_s
        self._left: dict[Taker, tuple[float, float]] = {}

    def take(self, taker: Taker, now: float) -> bool:
        """Take one; False if there is none left."""
        left, since = self._left.get(taker, (self._at_once, now))
        left = min(self._at_once, left + (now - since) * self._per_s)
        has_one = left >= 1
        if taker not in self._left and len(self._left) >= MAX_BUDGETS:
            self._left.clear()
        self._left[taker] = (left - has_one, now)
        return has_one


class Refusals:
    """Counts messages that a listener refuses."""

    def __init__(self) -> None:
        self._budgets = Budgets[tuple[str, ...]](REFUSALS_AT_ONCE, REFUSALS_PER_S)

    def add(self, names: tuple[str, ...], now: float) -> None:
        """Note one.

        Args:
            names: Instances that its sender may speak for.
            now: Monotonic seconds.

        Raises:
            RemoteProtocolError: It is one too many, and its connection is to be broken.
        """
        if not self._budgets.take(names, now):
            raise RemoteProtocolError("too many messages that are refused", at_once=REFUSALS_AT_ONCE)
