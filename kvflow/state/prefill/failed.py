"""Rooms that have failed, remembered so that late requests for them are answered at once. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from kvflow.room import RoomId
from kvflow.wire.messages import Failure, RankId

__all__ = ["FailedRooms"]

MAX_FAILED = 4_096
"""Maximum number of failed rooms that are remembered."""


class FailedRoom(NamedTuple):
    """A room that has failed.

    Attributes:
        told: Decode ranks that know, or whose earlier incarnation did; their next request is a new try.
    """

    failure: Failure
    told: dict[RankId, None]


class FailedRooms:
    """Failures by room; the oldest are forgotten if there are too many."""

    def __init__(self) -> None:
        self._rooms: dict[RoomId, FailedRoom] = {}

    def find(self, room: RoomId) -> FailedRoom | None:
        """Find the failure of a room, and who knows of it."""
        return self._rooms.get(room)

    def note(self, room: RoomId, failure: Failure, told: Iterable[RankId]) -> None:
        """Remember that a room has failed, and the decode ranks that know."""
        self._rooms[room] = FailedRoom(failure, dict.fromkeys(told))
        while len(self._rooms) > MAX_FAILED:
            del self._rooms[next(iter(self._rooms))]

    def forget(self, room: RoomId) -> None:
        """Forget the failure of a room, which is opened again."""
        self._rooms.pop(room, None)

    def tell(self, room: RoomId, rank: RankId) -> Failure | None:
        """Return the failure that a decode rank must be told, once; None if it knows, or the room has not failed."""
        failed = self._rooms.get(room)
        if failed is None or rank in failed.told:
            return None
        failed.told[rank] = None
        return failed.failure
