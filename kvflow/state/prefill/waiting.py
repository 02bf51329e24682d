"""Rooms that are not open: the requests that wait for them, and what is known of those declined or failed. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvflow.bounds import Bounds
from kvflow.gate.shares import FairShares
from kvflow.room import RoomId
from kvflow.state.by_peer import ByPeer
from kvflow.state.events import DeliveryId
from kvflow.state.prefill.deadlines import DeclineForgotten, PrefillTimer, RoomUnopened
from kvflow.state.timers import Timers
from kvflow.wire.messages import Failure, Grant, PeerId, RankId

__all__ = ["Announcement", "Asked", "DeclinedRooms", "FailedRooms", "WaitingRooms"]


class Announcement(NamedTuple):
    """The announcement that a decode rank will grant pages.

    Attributes:
        generation: Generation of the grant.
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
    """Grants and announcements by room and decode rank; each has a timer."""

    def __init__(self, timers: Timers[PrefillTimer], limits: Bounds) -> None:
        self._asked: dict[RoomId, dict[PeerId, Asked]] = {}
        self._asked_at: dict[tuple[RoomId, PeerId], float] = {}
        self._timers = timers
        self._by_peer: ByPeer[tuple[RoomId, PeerId]] = ByPeer()
        self._grants = FairShares(limits.pending_grants)
        self._bytes = FairShares(limits.pending_grant_bytes)

    def __len__(self) -> int:
        return self._grants.total

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

    def asked_at(self, room: RoomId, peer: PeerId) -> float:
        """Return when the request of a decode rank for a room arrived; there must be one."""
        return self._asked_at[room, peer]

    def add_request(self, room: RoomId, peer: PeerId, taker: str, one: Asked, now: float, until: float) -> None:
        """Keep a request, which counts to the share of a principal, until it expires.

        No request of this rank for this room may be kept yet.
        """
        self._asked.setdefault(room, {})[peer] = one
        self._asked_at[room, peer] = now
        self._by_peer.add(peer, (room, peer))
        self._grants.hold((room, peer), taker, 1)
        self._bytes.hold((room, peer), taker, _num_bytes(one))
        self._timers.set(RoomUnopened(room, peer), until)

    def take_request(self, room: RoomId, peer: PeerId) -> Asked:
        """Remove and return the request of a decode rank for a room."""
        self._timers.clear(RoomUnopened(room, peer))
        self._by_peer.remove((room, peer))
        one = self._asked[room].pop(peer)
        del self._asked_at[room, peer]
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


MAX_FAILED = 4_096
"""Maximum number of failed rooms that are remembered."""


class FailedRoom(NamedTuple):
    """A room that has failed, and the decode ranks that know, or whose earlier incarnation did: they may try again."""

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


MAX_DECLINED = 16_384
"""Maximum number of declines, by room and decode rank, of rooms that the engine has not opened; and of declines that
are remembered to recognise repeated ones."""


class DeclinedRooms:
    """Declines by room and decode rank, each kept until the engine opens the room, or for `open_s`.

    The id of the room may belong to another request by then.
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
