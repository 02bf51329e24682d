"""Pages that nobody has proved quiet: how many there are, and whether there may be more. Pure."""

from collections.abc import Hashable
from typing import Final, NamedTuple

from kvflow.config import Limits
from kvflow.errors import CapacityExceeded

__all__ = ["NO_MEMORY", "Footprint", "Quarantine"]


class Footprint(NamedTuple):
    """How much memory something holds.

    Attributes:
        num_pages: Pages, a page of each component counted as one.
        num_bytes: Their bytes in this rank's pools.
    """

    num_pages: int = 0
    num_bytes: int = 0

    def plus(self, other: "Footprint") -> "Footprint":
        """Both together."""
        return Footprint(self.num_pages + other.num_pages, self.num_bytes + other.num_bytes)


NO_MEMORY: Final = Footprint()


class Quarantine:
    """Counts what is held back. When it is full, nothing new is admitted; nothing is ever let go early.

    Attributes:
        total: What is held back now.
    """

    def __init__(self, limits: Limits) -> None:
        self.total = NO_MEMORY
        self._limits = limits
        self._held: dict[Hashable, Footprint] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, key: Hashable, footprint: Footprint) -> None:
        """Note that a transfer's pages are held back; noting it again changes nothing."""
        if key not in self._held:
            self._held[key] = footprint
            self.total = self.total.plus(footprint)

    def remove(self, key: Hashable) -> None:
        """Note that a transfer's pages are free, if they were held back."""
        held = self._held.pop(key, None)
        if held is not None:
            self.total = self.total.plus(Footprint(-held.num_pages, -held.num_bytes))

    def check_admission(self) -> None:
        """Refuse new work while too much is held back.

        Raises:
            CapacityExceeded: It is.
        """
        pages, num_bytes = self.total
        if pages >= self._limits.quarantined_pages or num_bytes >= self._limits.quarantined_bytes:
            raise CapacityExceeded(
                "too much memory is in quarantine", transfers=len(self), pages=pages, num_bytes=num_bytes
            )
