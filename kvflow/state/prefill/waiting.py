"""What decode ranks have asked for before the engine has opened its room. Pure."""

from collections.abc import Hashable

import msgspec

from kvflow.room import RoomId
from kvflow.state.timers import Timers
from kvflow.wire.messages import Grant, PeerId

__all__ = ["RoomUnopened", "WaitingGrants"]


class RoomUnopened(msgspec.Struct, frozen=True):
    """Timer: the engine must open this room before the grant runs out."""

    room: RoomId
    peer: PeerId


class WaitingGrants:
    """Grants by room and decode rank; each has a timer."""

    def __init__(self, timers: Timers[Hashable]) -> None:
        self._grants: dict[RoomId, dict[PeerId, Grant]] = {}
        self._timers = timers
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, room: RoomId) -> bool:
        return room in self._grants

    def find(self, room: RoomId, peer: PeerId) -> Grant | None:
        """Find what a decode rank has asked for."""
        return self._grants.get(room, {}).get(peer)

    def put(self, room: RoomId, peer: PeerId, grant: Grant, until: float) -> None:
        """Keep a grant, instead of an earlier one of the same decode rank."""
        grants = self._grants.setdefault(room, {})
        self._count += peer not in grants
        grants[peer] = grant
        self._timers.set(RoomUnopened(room, peer), until)

    def take(self, room: RoomId, peer: PeerId) -> Grant:
        """Take out what a decode rank has asked for."""
        self._timers.clear(RoomUnopened(room, peer))
        grant = self._grants[room].pop(peer)
        self._count -= 1
        if not self._grants[room]:
            del self._grants[room]
        return grant

    def peers(self, room: RoomId) -> list[PeerId]:
        """Decode ranks that wait for a room."""
        return list(self._grants.get(room, ()))

    def rooms_of(self, peer: PeerId) -> list[RoomId]:
        """Rooms that a decode rank waits for."""
        return [room for room, grants in self._grants.items() if peer in grants]

    def all(self) -> list[tuple[RoomId, PeerId]]:
        """Everything that is kept."""
        return [(room, peer) for room, grants in self._grants.items() for peer in grants]
