"""What decode ranks have asked for, or announced, before the engine has opened its room. Pure."""

from collections.abc import Hashable
from typing import NamedTuple

import msgspec

from kvflow.config import Limits
from kvflow.room import RoomId
from kvflow.state.shares import Shares
from kvflow.state.timers import Timers
from kvflow.wire.messages import Grant, PeerId

__all__ = ["Announcement", "Asked", "RoomUnopened", "WaitingRooms"]


class RoomUnopened(msgspec.Struct, frozen=True):
    """Timer: the engine must open this room before what was asked for runs out."""

    room: RoomId
    peer: PeerId


class Announcement(NamedTuple):
    """A decode rank will grant pages.

    Attributes:
        generation: Of the grant.
        num_decode_ranks: Of the room.
        deadline: When the decode rank has given up, and would have been heard.
    """

    generation: int
    num_decode_ranks: int
    deadline: float


Asked = Grant | Announcement
"""What a decode rank has asked for."""


class _Kept(NamedTuple):
    one: Asked
    taker: str


def _num_bytes(one: Asked) -> int:
    return 0 if isinstance(one, Announcement) else sum(map(len, one.pages.values()))


class WaitingRooms:
    """Grants and announcements by room and decode rank; each has a timer.

    Args:
        timers: Where they are noted.
        limits: Bounds of all of them, and of their page tables.
    """

    def __init__(self, timers: Timers[Hashable], limits: Limits) -> None:
        self._asked: dict[RoomId, dict[PeerId, _Kept]] = {}
        self._timers = timers
        self._count = 0
        self._grants = Shares(limits.pending_grants)
        self._bytes = Shares(limits.pending_grant_bytes)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, room: RoomId) -> bool:
        return room in self._asked

    @property
    def num_announced(self) -> int:
        """How many of them are announcements."""
        return sum(isinstance(kept.one, Announcement) for asked in self._asked.values() for kept in asked.values())

    def find(self, room: RoomId, peer: PeerId) -> Asked | None:
        """Find what a decode rank has asked for."""
        kept = self._asked.get(room, {}).get(peer)
        return None if kept is None else kept.one

    def has_place(self, taker: str, one: Asked, before: Asked | None) -> bool:
        """Return whether something can be kept for somebody, new or instead of what was kept before."""
        num_bytes = _num_bytes(one) - (0 if before is None else _num_bytes(before))
        return self._grants.has_place(taker, int(before is None)) and self._bytes.has_place(taker, max(num_bytes, 0))

    def put(self, room: RoomId, peer: PeerId, taker: str, one: Asked, until: float) -> None:
        """Keep what a decode rank asks for.

        Args:
            room: That it asks for; nothing is kept that it has asked for before.
            peer: The decode rank.
            taker: To whose share it counts.
            one: What it asks for.
            until: When it is over.
        """
        self._asked.setdefault(room, {})[peer] = _Kept(one, taker)
        self._count += 1
        self._grants.add(taker, 1)
        self._bytes.add(taker, _num_bytes(one))
        self._timers.set(RoomUnopened(room, peer), until)

    def take(self, room: RoomId, peer: PeerId) -> Asked:
        """Take out what a decode rank has asked for."""
        self._timers.clear(RoomUnopened(room, peer))
        one, taker = self._asked[room].pop(peer)
        self._count -= 1
        self._grants.add(taker, -1)
        self._bytes.add(taker, -_num_bytes(one))
        if not self._asked[room]:
            del self._asked[room]
        return one

    def peers(self, room: RoomId) -> list[PeerId]:
        """Decode ranks that wait for a room."""
        return list(self._asked.get(room, ()))

    def rooms_of(self, peer: PeerId) -> list[RoomId]:
        """Rooms that a decode rank waits for."""
        return [room for room, asked in self._asked.items() if peer in asked]

    def all(self) -> list[tuple[RoomId, PeerId]]:
        """Everything that is kept."""
        return [(room, peer) for room, asked in self._asked.items() for peer in asked]
