"""Deadlines by key, the earliest first. Pure: time is a number that the caller brings."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Deadlines"]

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """A heap of deadlines in which setting and clearing cost no search.

    A replaced or cleared deadline stays in the heap until it comes up, or until the dead outnumber the living.
    """

    def __init__(self) -> None:
        self._due: dict[Key, tuple[float, int, Key]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: Key, when: float) -> None:
        """Make `key` due at `when`, instead of whenever it was due before."""
        self._count += 1
        entry = self._due[key] = (when, self._count, key)
        heapq.heappush(self._heap, entry)
        self._prune()

    def set_once(self, key: Key, when: float) -> None:
        """Make `key` due at `when`, unless it is due already."""
        if key not in self._due:
            self.set(key, when)

    def clear(self, key: Key) -> bool:
        """Make `key` never due; say whether it was."""
        if self._due.pop(key, None) is None:
            return False
        self._prune()
        return True

    def next(self) -> float | None:
        """When the earliest deadline is due, or None."""
        self._drop_dead()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Key | None:
        """Remove and return one key whose deadline is not after `now`, earliest first, or None."""
        self._drop_dead()
        if not self._heap or self._heap[0][0] > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key

    def _drop_dead(self) -> None:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)

    def _prune(self) -> None:
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[float, int, Key]) -> bool:
        return self._due.get(entry[2]) is entry
