"""Staging windows of a decode rank, and the prefill incarnations that own them. Pure.

A window belongs to one incarnation, so a late write of that incarnation lands in its own window, never in pages. The
window is assigned to another incarnation only after a proof that no write of the first can land any more. Until then it
is out of use. A rank that finds no free window gets none, and writes to pages directly.
"""

from collections import deque
from collections.abc import Callable

from kvflow.state.settings import WindowSettings
from kvflow.wire.messages import PeerId, StagingWindow

__all__ = ["StagingWindows"]


class StagingWindows:
    """Staging memory, divided into windows of equal size."""

    def __init__(self, settings: WindowSettings | None) -> None:
        self._settings = settings or WindowSettings(0, 0, 1, 1)
        self._window_bytes = self._settings.slot_bytes * self._settings.num_slots
        self.num_windows = self._settings.num_bytes // self._window_bytes
        self._free = deque(range(self.num_windows))
        self._owners: dict[PeerId, int] = {}
        self._fenced: dict[PeerId, None] = {}
        self._used: dict[PeerId, None] = {}

    @property
    def num_taken(self) -> int:
        """Number of windows that have an owner."""
        return len(self._owners)

    @property
    def owners(self) -> list[PeerId]:
        """Incarnations that own a window."""
        return list(self._owners)

    def assign(self, peer: PeerId) -> StagingWindow | None:
        """Return the staging window of a prefill incarnation, or assign a free one; None if none is free."""
        if peer not in self._owners:
            if not self._free:
                return None
            self._owners[peer] = self._free.popleft()
        start = self._settings.address + self._owners[peer] * self._window_bytes
        return StagingWindow(start, self._settings.slot_bytes, self._settings.num_slots)

    def use(self, peer: PeerId) -> None:
        """Note that an incarnation has accepted its Hello: from now on it may be granted pages, and write."""
        if peer in self._owners:
            self._used[peer] = None

    def take_back_unused(self, peer: PeerId) -> None:
        """Take a window back from an incarnation that has never accepted a Hello, and so was granted nothing."""
        if peer in self._owners and peer not in self._used:
            self._fenced.pop(peer, None)
            self._free.append(self._owners.pop(peer))

    def fenced(self, peer: PeerId) -> None:
        """Record the proof that no write of an incarnation can land any more."""
        if peer in self._owners:
            self._fenced[peer] = None

    def awaits_fence(self, peer: PeerId) -> bool:
        """Return whether the window of an incarnation still needs a proof that none of its writes can land."""
        return peer in self._owners and peer not in self._fenced

    def reclaim(self, is_read: Callable[[PeerId], bool]) -> None:
        """Take back fenced windows, except those that are still being read."""
        for peer in [peer for peer in self._fenced if not is_read(peer)]:
            del self._fenced[peer]
            self._used.pop(peer, None)
            self._free.append(self._owners.pop(peer))
