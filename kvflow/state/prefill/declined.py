"""Rooms that decode ranks have declined, and that the engine has not opened. Pure."""

from collections import OrderedDict

from kvflow.room import RoomId
from kvflow.state.events import DeliveryId
from kvflow.state.prefill.deadlines import DeclineForgotten, PrefillTimer
from kvflow.state.timers import Timers
from kvflow.wire.messages import Failure, RankId

__all__ = ["DeclinedRooms"]

MAX_DECLINED = 16_384
"""Maximum number of declines, by room and decode rank, of rooms that the engine has not opened; and of declines that
are remembered to recognise repeated ones."""


class DeclinedRooms:
    """Declines by room and decode rank, each kept until the engine opens the room.

    Args:
        timers: Where it is noted when a room is forgotten.
        open_s: How long a room is remembered; its id may belong to another request by then.
    """

    def __init__(self, timers: Timers[PrefillTimer], open_s: float) -> None:
        self._timers = timers
        self._open_s = open_s
        self._by_room: dict[RoomId, dict[RankId, Failure]] = {}
        self._num_declined = 0
        self._seen: OrderedDict[DeliveryId, None] = OrderedDict()

    def is_repeated(self, delivery: DeliveryId) -> bool:
        """Return whether this decline has been obeyed before, as far as remembered."""
        return delivery in self._seen

    def note(self, delivery: DeliveryId) -> None:
        """Note that a decline is obeyed."""
        self._seen[delivery] = None
        if len(self._seen) > MAX_DECLINED:
            self._seen.popitem(last=False)

    def add_decline(self, room: RoomId, rank: RankId, failure: Failure, now: float) -> None:
        """Remember a decline; the oldest rooms are dropped if there are too many."""
        declined = self._by_room.setdefault(room, {})
        self._num_declined += rank not in declined
        declined[rank] = failure
        self._timers.set(DeclineForgotten(room), now + self._open_s)
        while self._num_declined > MAX_DECLINED:
            self.take_declines(next(iter(self._by_room)))

    def take_declines(self, room: RoomId) -> dict[RankId, Failure]:
        """Remove and return the declines of a room; none if it was not declined."""
        self._timers.clear(DeclineForgotten(room))
        declined = self._by_room.pop(room, {})
        self._num_declined -= len(declined)
        return declined

    def withdraw(self, room: RoomId, rank: RankId) -> None:
        """Drop a room's declines by a rank that asks for it again, and those by other instances."""
        declined = self._by_room.get(room)
        if declined is None:
            return
        left = {it: failure for it, failure in declined.items() if it != rank and it.instance == rank.instance}
        self._num_declined -= len(declined) - len(left)
        self._by_room[room] = left
        if not left:
            self.take_declines(room)
