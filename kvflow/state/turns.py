"""Places for attempts to reach somebody who may not exist, shared fairly. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Turns"]

Key = TypeVar("Key", bound=Hashable)
Waiting = TypeVar("Waiting", bound=Hashable)


class Turns(Generic[Key]):
    """Attempts in progress. None of their owners, such as hosts, may have more than is left for the others.

    Whoever answers ends its turn at once. When no place is left, an attempt that has lasted for longer than a turn
    makes way for one whose owner would not have more places than the loser's has. Owners wait in a line, and the
    attempts of each in another one. So those that never answer delay the others by a turn or a few, and do not keep
    them out.

    Args:
        places: Maximum number of attempts at the same time.
        turn_s: How long an attempt keeps its place in any case. Who does not ask for a place for so long waits no more.
    """

    def __init__(self, places: int, turn_s: float) -> None:
        self._places = places
        self._turn_s = turn_s
        self._held: OrderedDict[Key, tuple[tuple[str, ...], float]] = OrderedDict()
        self._taken: dict[tuple[int, str], int] = {}
        self._owners: OrderedDict[str, float] = OrderedDict()
        self._waiting: dict[str, OrderedDict[Key, float]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take_place(self, key: Key, owners: tuple[str, ...], now: float) -> tuple[bool, Key | None]:
        """Return whether an attempt has a place, and the attempt that has lost its place to it, if any.

        If it has none, ask again soon. Its owners are always as many and in the same order: each has its own share, and
        the first one waits.
        """
        if key in self._held:
            return True, None
        loser = None
        if max(map(self._number, enumerate(owners))) >= self._places - len(self._held):
            loser = self._make_way(key, owners, now)
            if loser is None:
                return False, None
            self.end_attempt(loser)
        self._wait_no_more(key, owners[0])
        self._held[key] = owners, now
        self._count(owners, 1)
        return True, loser

    def end_attempt(self, key: Key) -> None:
        """End an attempt, if it has a place."""
        if key in self._held:
            owners, _ = self._held.pop(key)
            self._count(owners, -1)

    def _make_way(self, key: Key, owners: tuple[str, ...], now: float) -> Key | None:
        """Return the oldest attempt that must make way for this one; None if it must wait."""
        line = self._waiting.setdefault(owners[0], OrderedDict())
        line[key] = self._owners[owners[0]] = now  # who waits already keeps the position
        lapsed = [other for other, (_, since) in self._held.items() if now >= since + self._turn_s]
        if not self._is_next(self._owners, owners[0], len(lapsed), now):
            return None
        own = sum(self._held[other][0][0] == owners[0] for other in lapsed)
        if not self._is_next(line, key, max(own, 1), now):
            return None
        return next((other for other in lapsed if self._is_fair(owners, self._held[other][0])), None)

    def _is_fair(self, owners: tuple[str, ...], losers: tuple[str, ...]) -> bool:
        left = set(enumerate(losers))
        most = max(self._number(owner) + 1 - (owner in left) for owner in enumerate(owners))
        return most <= max(map(self._number, left))

    def _is_next(self, line: OrderedDict[Waiting, float], key: Waiting, places: int, now: float) -> bool:
        """Return whether there are enough places for those that wait before a key, and for itself."""
        position, gone = 0, []
        for other, asked_at in line.items():
            if other == key or position >= places:
                break
            if now >= asked_at + self._turn_s:
                gone.append(other)
            else:
                position += 1
        for other in gone:
            del line[other]
            if line is self._owners:
                self._waiting.pop(str(other), None)
        return position < places

    def _wait_no_more(self, key: Key, owner: str) -> None:
        """Remove an attempt from its line; its owner goes to the end of the other one, or leaves it."""
        line = self._waiting.get(owner)
        if line is None:
            return
        line.pop(key, None)
        if line:
            self._owners.move_to_end(owner)
        else:
            del self._waiting[owner], self._owners[owner]

    def _number(self, owner: tuple[int, str]) -> int:
        return self._taken.get(owner, 0)

    def _count(self, owners: tuple[str, ...], change: int) -> None:
        for owner in enumerate(owners):
            taken = self._taken.pop(owner, 0) + change
            if taken:
                self._taken[owner] = taken
