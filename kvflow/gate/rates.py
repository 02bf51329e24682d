"""Token buckets that limit how often each taker may do something. Pure."""

from typing import Final, Generic, TypeVar

__all__ = ["RateLimiter"]

MAX_BUDGETS: Final = 4_096

Taker = TypeVar("Taker")


class RateLimiter(Generic[Taker]):
    """A token bucket for each taker.

    Args:
        at_once: Capacity of a bucket.
        per_s: Refill rate, per second.
    """

    def __init__(self, at_once: int, per_s: float) -> None:
        self._at_once = float(at_once)
        self._per_s = per_s
        self._left: dict[Taker, tuple[float, float]] = {}

    def spend(self, taker: Taker, now: float, amount: float = 1) -> bool:
        """Take `amount` from a taker's bucket; return False and take nothing if less is left."""
        left, since = self._left.get(taker, (self._at_once, now))
        left = min(self._at_once, left + (now - since) * self._per_s)
        has_enough = left >= amount
        if taker not in self._left and len(self._left) >= MAX_BUDGETS:
            self._left.clear()
        self._left[taker] = (left - has_enough * amount, now)
        return has_enough
