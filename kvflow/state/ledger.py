"""What became of past generations, so that late messages of them are recognised. Pure."""

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Ledger"]

Ending = TypeVar("Ending")


class Ledger(Generic[Ending]):
    """A bounded memory of ended generations that never mistakes an old one for a new one.

    The oldest entries are dropped when there are too many; every generation up to the highest dropped one counts as
    over from then on.

    Args:
        limit: Endings that are remembered.
        floor: Every generation below it counts as over from the start.
    """

    def __init__(self, limit: int, floor: int = 0) -> None:
        self._limit = limit
        self._endings: OrderedDict[int, Ending] = OrderedDict()
        self._floor = floor

    def __len__(self) -> int:
        return len(self._endings)

    def end(self, generation: int, ending: Ending) -> None:
        """Note how a generation ended; the first word counts."""
        self._endings.setdefault(generation, ending)
        while len(self._endings) > self._limit:
            oldest, _ = self._endings.popitem(last=False)  # a plain dict would look for its first entry ever longer
            self._floor = max(self._floor, oldest + 1)

    def find(self, generation: int) -> Ending | None:
        """How a generation ended, if that is remembered."""
        return self._endings.get(generation)

    def is_over(self, generation: int) -> bool:
        """Say whether a generation has ended, or is so old that it must have."""
        return generation in self._endings or generation < self._floor
