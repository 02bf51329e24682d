"""Staging memory of a decode rank: which window belongs to which life of a prefill rank. Pure.

A window belongs to one life, so whatever that life writes late lands in a window of its own, and never in pages. It is
given to another life only when it is proved that nothing of the first one can land any more; until then it is out of
use, and whoever comes when all are gets none and writes to pages directly.
"""

from collections import deque

from kvflow.wire.messages import PeerId, StagingWindow

__all__ = ["StagingArea"]


class StagingArea:
    """Cut into windows of equal size.

    Args:
        address: Of the first byte.
        num_bytes: Size of all of it.
        slot_bytes: Size of a slot.
        num_slots: Slots of a window.
    """

    def __init__(self, address: int, num_bytes: int, *, slot_bytes: int, num_slots: int) -> None:
        self._address = address
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self.num_windows = num_bytes // (slot_bytes * num_slots)
        self._free = deque(range(self.num_windows))
        self._owners: dict[PeerId, int] = {}
        self._gone: dict[PeerId, None] = {}

    @property
    def num_taken(self) -> int:
        """Windows that belong to somebody."""
        return len(self._owners)

    @property
    def has_windows_of_dead(self) -> bool:
        """There is something to `reclaim`."""
        return bool(self._gone)

    def window(self, peer: PeerId) -> StagingWindow | None:
        """The window of a life of a prefill rank, which gets one if any is left."""
        if peer not in self._owners:
            if not self._free:
                return None
            self._owners[peer] = self._free.popleft()
        start = self._address + self._owners[peer] * self._slot_bytes * self._num_slots
        return StagingWindow(start, self._slot_bytes, self._num_slots)

    def owner(self, address: int) -> PeerId | None:
        """Whose window an address is in."""
        window = (address - self._address) // (self._slot_bytes * self._num_slots)
        return next((peer for peer, number in self._owners.items() if number == window), None)

    def gone(self, peer: PeerId) -> None:
        """Note the proof that nothing of a life can land any more."""
        if peer in self._owners:
            self._gone[peer] = None

    def reclaim(self, busy: "dict[PeerId, None]") -> None:
        """Take back windows of the dead, but for those that are still being read."""
        for peer in [peer for peer in self._gone if peer not in busy]:
            del self._gone[peer]
            self._free.append(self._owners.pop(peer))
