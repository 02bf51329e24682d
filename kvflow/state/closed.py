"""Closed generations, remembered to recognise late messages. Pure."""

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["ClosedGenerations"]

Result = TypeVar("Result")


class ClosedGenerations(Generic[Result]):
    """A bounded memory of closed generations that never mistakes an old one for a new one.

    The oldest entries are dropped when there are too many; every generation up to the highest dropped one counts as
    closed from then on. So does each below `floor` from the start.
    """

    def __init__(self, limit: int, floor: int = 0) -> None:
        self._limit = limit
        self._results: OrderedDict[int, Result] = OrderedDict()
        self._floor = floor

    def __contains__(self, generation: int) -> bool:
        """Return whether a generation is closed, or so old that it must be."""
        return generation in self._results or generation < self._floor

    def close(self, generation: int, result: Result) -> None:
        """Record how a generation ended; only the first report counts."""
        self._results.setdefault(generation, result)
        while len(self._results) > self._limit:
            oldest, _ = self._results.popitem(last=False)  # a plain dict takes ever longer to find its first entry
            self._floor = max(self._floor, oldest + 1)

    def result(self, generation: int) -> Result | None:
        """Return how a generation ended; None if that is not remembered."""
        return self._results.get(generation)
