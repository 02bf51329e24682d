"""Grants for rooms that the prefill engine has not opened yet. Pure."""

from kvflow.wire.messages import Grant, PeerId

__all__ = ["WaitingGrants"]


class WaitingGrants:
    """At most one grant of each decode rank for each room."""

    def __init__(self) -> None:
        self._rooms: dict[int, dict[PeerId, Grant]] = {}
        self._num_grants = 0

    def __len__(self) -> int:
        return self._num_grants

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def find(self, room: int, peer: PeerId) -> Grant | None:
        """The grant of a decode rank for a room."""
        return self._rooms.get(room, {}).get(peer)

    def put(self, peer: PeerId, grant: Grant) -> None:
        """Keep a grant, in place of an earlier one."""
        grants = self._rooms.setdefault(grant.room, {})
        self._num_grants += peer not in grants
        grants[peer] = grant

    def take(self, room: int, peer: PeerId) -> Grant:
        """Remove the grant of a decode rank for a room, and give it."""
        grant = self._rooms[room].pop(peer)
        self._num_grants -= 1
        if not self._rooms[room]:
            del self._rooms[room]
        return grant

    def of_room(self, room: int) -> list[PeerId]:
        """Who waits for a room, first come first."""
        return list(self._rooms.get(room, ()))

    def of_peer(self, peer: PeerId) -> list[int]:
        """Which rooms a decode rank waits for."""
        return [room for room, grants in self._rooms.items() if peer in grants]

    def everybody(self) -> list[tuple[int, PeerId]]:
        """Who waits for which room."""
        return [(room, peer) for room, grants in self._rooms.items() for peer in grants]
