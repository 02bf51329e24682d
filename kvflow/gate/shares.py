"""How much of a bounded resource each taker may have. Pure."""

from collections.abc import Hashable
from typing import Final, NamedTuple, Self

__all__ = ["DirectoryShares", "FairShares"]

MAX_RANKS: Final = 65_536
"""Maximum number of ranks in a directory. An instance has at most `MAX_RANKS_TOLD`."""

MAX_RECORD_BYTES: Final = 256 * 2**20
"""Maximum size of all records of a directory, in bytes."""

MAX_LOOKUPS: Final = 65_536
"""Maximum number of lookups that wait in a directory; further ones are answered immediately."""


class FairShares:
    """What each taker has of `most`. None may have more than is left for the others: a single one gets at most half."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.total = 0
        self._taken: dict[str, int] = {}
        self._held: dict[Hashable, tuple[str, int]] = {}

    def has_place(self, taker: str, amount: int, key: Hashable = None) -> bool:
        """Return whether a taker may have `amount` more, or in place of what is held under `key`."""
        more = amount - self._held.get(key, ("", 0))[1]
        return more <= 0 or self._taken.get(taker, 0) + more <= self._most - self.total

    def taker_of(self, key: Hashable) -> str | None:
        """Return who holds something under a key; None if nothing is held."""
        return self._held[key][0] if key in self._held else None

    def hold(self, key: Hashable, taker: str, amount: int) -> None:
        """Count what a taker holds under a key, in place of what was held there."""
        self.release(key)
        self._held[key] = taker, amount
        self._add(taker, amount)

    def release(self, key: Hashable) -> None:
        """Count nothing under a key any more."""
        taker, amount = self._held.pop(key, ("", 0))
        self._add(taker, -amount)

    def _add(self, taker: str, amount: int) -> None:
        self.total += amount
        taken = self._taken.get(taker, 0) + amount
        if taken:
            self._taken[taker] = taken
        else:
            self._taken.pop(taker, None)


class DirectoryShares(NamedTuple):
    """The shares of a directory: registered ranks, bytes of their records, and waiting lookups."""

    ranks: FairShares
    record_bytes: FairShares
    lookups: FairShares

    @classmethod
    def new(cls) -> Self:
        """Return the shares of an empty directory."""
        return cls(FairShares(MAX_RANKS), FairShares(MAX_RECORD_BYTES), FairShares(MAX_LOOKUPS))

    def refusal(self) -> str:
        """Return what a rank is told whose principal has used up its share."""
        most = f"at most {MAX_RANKS} with {MAX_RECORD_BYTES} bytes are kept, of which one principal has a share"
        return f"too many ranks are registered: {self.ranks.total}; {most}"
