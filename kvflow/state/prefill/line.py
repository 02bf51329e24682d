"""The order in which calls of `chunk()` that wait for capacity go on. Pure.

When too many pieces are queued for one decode rank, calls for its rooms wait. This is how backpressure reaches the
engine.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvflow.room import RoomId
from kvflow.state.effects import AdmitChunk
from kvflow.wire.messages import PeerId

__all__ = ["CapacityLine"]


@dataclass(slots=True)
class _WaitingCall:
    """A call that waits. Later calls whose rooms go to one of `peers` wait behind it."""

    room: RoomId
    peers: tuple[PeerId, ...] = ()
    is_admitted: bool = False


class CapacityLine:
    """Calls that wait to offer a chunk, first in, first out among rooms for the same decode ranks.

    Args:
        full: Decode ranks for which no more chunks may be queued now.
        peers_of: Returns the decode ranks that have requested a room.
    """

    def __init__(self, full: Collection[PeerId], peers_of: Callable[[RoomId], Iterable[PeerId]]) -> None:
        self._full = full
        self._peers_of = peers_of
        self._calls: dict[int, _WaitingCall] = {}
        self._num_waiting: dict[PeerId, int] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def is_open(self, room: RoomId) -> bool:
        """Return whether a chunk of a room may be offered without waiting."""
        if not self._full and not self._calls:
            return True
        return not any(peer in self._full or peer in self._num_waiting for peer in self._peers_of(room))

    def add_call(self, number: int, room: RoomId) -> None:
        """Let a call wait for its turn."""
        self._calls[number] = call = _WaitingCall(room)
        self._update_peers(call)

    def remove_call(self, number: int) -> list[AdmitChunk]:
        """Forget a call that has gone on, with or without its turn, and admit the next one."""
        self._count(self._calls.pop(number).peers, -1)
        return self.admit()

    def admit(self) -> list[AdmitChunk]:
        """Admit the first call that has capacity, unless one was admitted that has not gone on yet."""
        before: set[PeerId] = set()
        for number, call in self._calls.items():
            if call.is_admitted:
                break
            self._update_peers(call)
            if not any(peer in self._full or peer in before for peer in call.peers):
                call.is_admitted = True
                return [AdmitChunk(call.room, number)]
            before.update(call.peers)
        return []

    def _update_peers(self, call: _WaitingCall) -> None:
        """Update the decode ranks that have requested a room; more may do so while it waits."""
        peers = tuple(self._peers_of(call.room))
        if peers != call.peers:
            self._count(call.peers, -1)
            self._count(peers, 1)
            call.peers = peers

    def _count(self, peers: Iterable[PeerId], by: int) -> None:
        for peer in peers:
            count = self._num_waiting.pop(peer, 0) + by
            if count:
                self._num_waiting[peer] = count
