"""Timers by key, earliest first. Pure: the caller passes the time."""

import heapq
from collections.abc import Hashable, Iterator, Mapping
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["EXPIRED_AT_ONCE", "NextTimer", "Timers"]

EXPIRED_AT_ONCE: Final = 128
"""Number of timers that one event handles: retransmitting thousands of grants takes a second."""

Key = TypeVar("Key", bound=Hashable)


class NextTimer(Protocol):
    """Timers of any keys."""

    def next(self) -> float | None:
        """Return when the earliest timer is due; None if no timer is set."""


class Timers(Generic[Key]):
    """A heap of timers in which setting and clearing need no search.

    A replaced or cleared timer stays in the heap until it comes up, or until the stale entries outnumber the others.
    """

    def __init__(self) -> None:
        self._due: dict[Key, tuple[float, int, Key]] = {}
        self._heap: list[tuple[float, int, Key]] = []
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

        Returns:
            The wanted timers, and when each was due when it was set.
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
        while self._heap:
            entry = self._heap[0]
            if self._due.get(entry[2]) is entry:
                return entry[0]
            heapq.heappop(self._heap)  # replaced or cleared
        return None

    def due(self) -> list[tuple[float, Key]]:
        """Return all timers, earliest first."""
        return [(when, key) for when, _, key in sorted(self._due.values(), key=lambda entry: entry[:2])]

    def pop_due(self, now: float) -> Key | None:
        """Remove and return the earliest key that is due at `now`; None if none is."""
        due = self.next()
        if due is None or due > now:
            return None
        *_, key = heapq.heappop(self._heap)
        del self._due[key]
        return key

    def expire(self, now: float) -> Iterator[tuple[Key, float]]:
        """Take due timers one after another, including those set meanwhile, but only `EXPIRED_AT_ONCE`.

        The others stay due, so that the event loop gets its turn before they are taken.

        Yields:
            The key, and how many seconds late it is.
        """
        for _ in range(EXPIRED_AT_ONCE):
            due = self.next()
            key = self.pop_due(now)
            if due is None or key is None:
                break
            yield key, now - due

    def _prune(self) -> None:
        """Bound the number of stale entries; called after each new one."""
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = list(self._due.values())
            heapq.heapify(self._heap)
