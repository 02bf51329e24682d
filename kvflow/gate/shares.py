"""The division of a bounded resource among takers. Pure."""

__all__ = ["FairShares"]


class FairShares:
    """What each taker has. None may have more than is left for the others: a single one gets at most half.

    Args:
        most: Total that all takers may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._taken: dict[str, int] = {}

    def has_place(self, taker: str, amount: int) -> bool:
        """Return whether a taker may have `amount` more."""
        return amount == 0 or self._taken.get(taker, 0) + amount <= self._most - self._total

    def add(self, taker: str, amount: int) -> None:
        """Count what a taker has taken, or returned if `amount` is negative."""
        self._total += amount
        taken = self._taken.get(taker, 0) + amount
        if taken:
            self._taken[taker] = taken
        else:
            self._taken.pop(taker, None)
