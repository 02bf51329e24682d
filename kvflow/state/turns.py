"""Places for attempts to reach somebody who may not exist, shared fairly. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Turns"]

Key = TypeVar("Key", bound=Hashable)


class Turns(Generic[Key]):
    """Attempts in progress. None of their owners, such as hosts, may have more than is left for the others.

    Whoever answers ends its turn at once. An attempt that has lasted for longer than a turn makes way for those that
    wait, in the order in which they came. So those that never answer delay the others by a turn or a few, and do not
    keep them out.

    Args:
        places: Maximum number of attempts at the same time.
        turn_s: How long an attempt keeps its place in any case. Who does not ask for a place for so long waits no more.
    """

    def __init__(self, places: int, turn_s: float) -> None:
        self._places = places
        self._turn_s = turn_s
        self._held: OrderedDict[Key, tuple[tuple[str, ...], float]] = OrderedDict()
        self._taken: dict[tuple[int, str], int] = {}
        self._line: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, key: Key, owners: tuple[str, ...], now: float) -> tuple[bool, Key | None]:
        """Return whether an attempt has a place, and the attempt that has lost its place to it, if any.

        Args:
            key: The attempt. If it has no place, ask again soon.
            owners: Its owners, always as many and in the same order: each has its own share.
            now: The time.
        """
        if key in self._held:
            return True, None
        loser = None
        if not self._has_place(owners, None):
            loser = self._make_way(key, owners, now)
            if loser is None:
                return False, None
            self.end(loser)
        self._line.pop(key, None)
        self._held[key] = owners, now
        self._count(owners, 1)
        return True, loser

    def end(self, key: Key) -> None:
        """End an attempt, whether it has a place or waits for one."""
        self._line.pop(key, None)
        if key in self._held:
            owners, _ = self._held.pop(key)
            self._count(owners, -1)

    def _make_way(self, key: Key, owners: tuple[str, ...], now: float) -> Key | None:
        """Return the oldest attempt that must make way for this one; None if it must wait."""
        self._line[key] = now  # a key that waits keeps its position
        lapsed = [other for other, (_, since) in self._held.items() if now >= since + self._turn_s]
        position, gone = 0, []
        for waiting, asked_at in self._line.items():
            if waiting == key or position >= len(lapsed):
                break
            if now >= asked_at + self._turn_s:
                gone.append(waiting)
            else:
                position += 1
        for waiting in gone:
            del self._line[waiting]
        if position >= len(lapsed):
            return None
        return next((other for other in lapsed if self._has_place(owners, self._held[other][0])), None)

    def _count(self, owners: tuple[str, ...], change: int) -> None:
        for owner in enumerate(owners):
            taken = self._taken.pop(owner, 0) + change
            if taken:
                self._taken[owner] = taken

    def _has_place(self, owners: tuple[str, ...], leaving: tuple[str, ...] | None) -> bool:
        """Return whether there is a place for an attempt, once one of other owners has left."""
        left = set(enumerate(leaving or ()))
        free = self._places - len(self._held) + bool(left)
        return all(self._taken.get(owner, 0) - (owner in left) < free for owner in enumerate(owners))
