"""Who may take how much of something that there is only so much of. Pure."""

__all__ = ["Shares"]


class Shares:
    """What each taker has. Nobody gets more in all than there is left: one alone gets half, and others find the rest.

    Args:
        most: What all may have together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._taken: dict[str, int] = {}

    def has_place(self, taker: str, amount: int) -> bool:
        """Return whether so much more can be given to somebody."""
        return amount == 0 or self._taken.get(taker, 0) + amount <= self._most - self._total

    def add(self, taker: str, amount: int) -> None:
        """Note what somebody has taken, or given back if it is negative."""
        self._total += amount
        taken = self._taken.get(taker, 0) + amount
        if taken:
            self._taken[taker] = taken
        else:
            self._taken.pop(taker, None)
