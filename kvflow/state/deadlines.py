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
        is_replaced = key in self._due
        entry = self._due[key] = (when, self._count, key)
        heapq.heappush(self._heap, entry)
        if is_replaced:
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
        entry = self._first()
        return None if entry is None else entry[0]

    def pop_due(self, now: float) -> Key | None:
        """Remove and return one key whose deadline is not after `now`, earliest first, or None."""
        entry = self._first()
        if entry is None or entry[0] > now:
            return None
        heapq.heappop(self._heap)
        del self._due[entry[2]]
        return entry[2]

    def _first(self) -> tuple[float, int, Key] | None:
        """The earliest living entry; dead ones before it are dropped."""
        while self._heap:
            entry = self._heap[0]
            if self._due.get(entry[2]) is entry:
                return entry
            heapq.heappop(self._heap)
        return None

    def _prune(self) -> None:
        """Keep the dead from outnumbering the living by far; to be called when there is one more of them."""
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = list(self._due.values())
            heapq.heapify(self._heap)
