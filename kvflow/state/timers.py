"""Timers by key, earliest first. Pure: the caller passes the time."""

import heapq
from collections.abc import Hashable, Iterator, Mapping
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["EXPIRED_AT_ONCE", "NextTimer", "Timers"]

EXPIRED_AT_ONCE: Final = 128
"""Number of timers that one event handles: retransmitting thousands of grants takes a second."""

MOVED_AT_ONCE: Final = 8
"""Number of entries of the old heap that each stale entry moves or drops."""

Key = TypeVar("Key", bound=Hashable)


class NextTimer(Protocol):
    """Timers of any keys."""

    def next(self) -> float | None:
        """Return when the earliest timer is due; None if no timer is set."""


class Timers(Generic[Key]):
    """A heap of timers in which setting and clearing need no search.

    A replaced or cleared timer stays in the heap until it comes up, or until the stale entries outnumber the others.
    The others then move to a new heap, a few with each stale entry: all at once would take tens of milliseconds.
    """

    def __init__(self) -> None:
        self._due: dict[Key, tuple[float, int, Key]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._old: list[tuple[float, int, Key]] = []  # a heap, too, as only its last entries are taken
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: Key) -> bool:
        return key in self._due

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
        """Clear the timer of `key`; return whether it was set."""
        if self._due.pop(key, None) is None:
            return False
        self._prune()
        return True

    def sync(self, before: Mapping[Key, float], wanted: Mapping[Key, float]) -> dict[Key, float]:
        """Clear the timers of `before` that are not wanted any more, and set those that are new.

        Return the wanted timers, and when each was due when it was set.
        """
        for key in before:
            if key not in wanted:
                self.clear(key)
        for key, when in wanted.items():
            if key not in before:
                self.set(key, when)
        return {key: before.get(key, when) for key, when in wanted.items()}

    def next(self) -> float | None:
        """Return when the earliest timer is due; None if no timer is set."""
        heap = self._next_heap()
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> Key | None:
        """Remove and return the earliest key that is due at `now`; None if none is."""
        heap = self._next_heap()
        if not heap or heap[0][0] > now:
            return None
        *_, key = heapq.heappop(heap)
        del self._due[key]
        return key

    def expire(self, now: float) -> Iterator[tuple[Key, float]]:
        """Take due timers one after another, and how many seconds late each is, including those set meanwhile.

        Only `EXPIRED_AT_ONCE` are taken. The others stay due, so that the event loop gets its turn before.
        """
        for _ in range(EXPIRED_AT_ONCE):
            due = self.next()
            key = self.pop_due(now)
            if due is None or key is None:
                break
            yield key, now - due

    def _next_heap(self) -> list[tuple[float, int, Key]]:
        """Drop stale entries from the top of both heaps, and return the one with the earliest timer."""
        for heap in (self._heap, self._old):
            while heap and self._due.get(heap[0][2]) is not heap[0]:
                heapq.heappop(heap)
        return self._old if self._old and (not self._heap or self._old[0] < self._heap[0]) else self._heap

    def _prune(self) -> None:
        """Bound the number of stale entries; called after each new one."""
        if not self._old and len(self._heap) > 2 * len(self._due) + 64:
            self._old, self._heap = self._heap, self._old
        for _ in range(min(len(self._old), MOVED_AT_ONCE)):
            entry = self._old.pop()
            if self._due.get(entry[2]) is entry:
                heapq.heappush(self._heap, entry)
