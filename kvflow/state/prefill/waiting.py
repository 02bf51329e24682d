"""Grants and announcements that wait for the engine to open their room. Pure."""

from typing import NamedTuple

from kvflow.bounds import Bounds
from kvflow.gate.shares import FairShares
from kvflow.room import RoomId
from kvflow.state.by_peer import ByPeer
from kvflow.state.prefill.deadlines import PrefillTimer, RoomUnopened
from kvflow.state.timers import Timers
from kvflow.wire.messages import Grant, PeerId

__all__ = ["Announcement", "Asked", "WaitingRooms"]


class Announcement(NamedTuple):
    """The announcement that a decode rank will grant pages.

    Attributes:
        generation: Generation of the grant.
        num_decode_ranks: Number of decode ranks of the room.
        deadline: When the decode rank has given up, and its last message would have arrived.
    """

    generation: int
    num_decode_ranks: int
    deadline: float


Asked = Grant | Announcement
"""A request of a decode rank: a grant or an announcement."""


def _num_bytes(one: Asked) -> int:
    return 0 if isinstance(one, Announcement) else sum(map(len, one.pages.values()))


class WaitingRooms:
    """Grants and announcements by room and decode rank; each has a timer.

    Args:
        timers: Where their timers are set.
        limits: Bounds of their number, and of the bytes of their page tables.
    """

    def __init__(self, timers: Timers[PrefillTimer], limits: Bounds) -> None:
        self._asked: dict[RoomId, dict[PeerId, Asked]] = {}
        self._timers = timers
        self._by_peer: ByPeer[tuple[RoomId, PeerId]] = ByPeer()
        self._grants = FairShares(limits.pending_grants)
        self._bytes = FairShares(limits.pending_grant_bytes)

    def __len__(self) -> int:
        return self._grants.total

    def __contains__(self, room: RoomId) -> bool:
        return room in self._asked

    @property
    def num_announced(self) -> int:
        """Number of announcements."""
        return sum(isinstance(one, Announcement) for asked in self._asked.values() for one in asked.values())

    def find(self, room: RoomId, peer: PeerId) -> Asked | None:
        """Find the request of a decode rank for a room."""
        return self._asked.get(room, {}).get(peer)

    def has_place(self, taker: str, one: Asked, before: Asked | None) -> bool:
        """Return whether a request fits the share of a principal, new or in place of an earlier one."""
        num_bytes = _num_bytes(one) - (0 if before is None else _num_bytes(before))
        return self._grants.has_place(taker, int(before is None)) and self._bytes.has_place(taker, max(num_bytes, 0))

    def has_bytes(self, taker: str, num_bytes: int) -> bool:
        """Return whether further page tables of a principal fit its share."""
        return self._bytes.has_place(taker, num_bytes)

    def add_request(self, room: RoomId, peer: PeerId, taker: str, one: Asked, until: float) -> None:
        """Keep a request.

        Args:
            room: Requested room; no request of this rank for it may be kept yet.
            peer: The decode rank.
            taker: Principal whose share it counts to.
            one: The request.
            until: When it expires.
        """
        self._asked.setdefault(room, {})[peer] = one
        self._by_peer.add(peer, (room, peer))
        self._grants.hold((room, peer), taker, 1)
        self._bytes.hold((room, peer), taker, _num_bytes(one))
        self._timers.set(RoomUnopened(room, peer), until)

    def take_request(self, room: RoomId, peer: PeerId) -> Asked:
        """Remove and return the request of a decode rank for a room."""
        self._timers.clear(RoomUnopened(room, peer))
        self._by_peer.remove((room, peer))
        one = self._asked[room].pop(peer)
        self._grants.release((room, peer))
        self._bytes.release((room, peer))
        if not self._asked[room]:
            del self._asked[room]
        return one

    def peers(self, room: RoomId) -> list[PeerId]:
        """Return the decode ranks that wait for a room."""
        return list(self._asked.get(room, ()))

    def rooms_of(self, peer: PeerId) -> list[RoomId]:
        """Return the rooms that a decode rank waits for."""
        return [room for room, _ in self._by_peer.keys_of(peer)]

    def all(self) -> list[tuple[RoomId, PeerId]]:
        """Return the room and the decode rank of every request."""
        return [(room, peer) for room, asked in self._asked.items() for peer in asked]
