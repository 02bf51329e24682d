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


def _num_bytes(one: Asked) -> int:
    return 0 if isinstance(one, Announcement) else sum(map(len, one.pages.values()))


class WaitingRooms:
    """Grants and announcements by room and decode rank; each has a timer.

    Args:
        timers: Where they are noted.
        limits: Bounds of all of them, and of their page tables.
    """

    def __init__(self, timers: Timers[Hashable], limits: Limits) -> None:
        self._asked: dict[RoomId, dict[PeerId, Asked]] = {}
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
        return sum(isinstance(one, Announcement) for asked in self._asked.values() for one in asked.values())

    def find(self, room: RoomId, peer: PeerId) -> Asked | None:
        """Find what a decode rank has asked for."""
        return self._asked.get(room, {}).get(peer)

    def has_place(self, peer: PeerId, one: Asked) -> bool:
        """Say whether something that a decode rank asks for can be kept: its instance has not used up its share."""
        instance = peer.rank.instance
        return self._grants.has_place(instance, 1) and self._bytes.has_place(instance, _num_bytes(one))

    def put(self, room: RoomId, peer: PeerId, one: Asked, until: float) -> None:
        """Keep what a decode rank asks for, instead of what it has asked for before."""
        asked = self._asked.setdefault(room, {})
        if (before := asked.get(peer)) is not None:
            self._count_out(peer, before)
        self._count += 1
        self._grants.add(peer.rank.instance, 1)
        self._bytes.add(peer.rank.instance, _num_bytes(one))
        asked[peer] = one
        self._timers.set(RoomUnopened(room, peer), until)

    def take(self, room: RoomId, peer: PeerId) -> Asked:
        """Take out what a decode rank has asked for."""
        self._timers.clear(RoomUnopened(room, peer))
        one = self._asked[room].pop(peer)
        self._count_out(peer, one)
        if not self._asked[room]:
            del self._asked[room]
        return one

    def _count_out(self, peer: PeerId, one: Asked) -> None:
        self._count -= 1
        self._grants.add(peer.rank.instance, -1)
        self._bytes.add(peer.rank.instance, -_num_bytes(one))

    def peers(self, room: RoomId) -> list[PeerId]:
        """Decode ranks that wait for a room."""
        return list(self._asked.get(room, ()))

    def rooms_of(self, peer: PeerId) -> list[RoomId]:
        """Rooms that a decode rank waits for."""
        return [room for room, asked in self._asked.items() if peer in asked]

    def all(self) -> list[tuple[RoomId, PeerId]]:
        """Everything that is kept."""
        return [(room, peer) for room, asked in self._asked.items() for peer in asked]
