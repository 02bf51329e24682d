"""Collects the page tables of large grants, and decides which are asked for now. Pure.

A decode rank sends a Grant with the number of its pages; the gate
asks for them in parts (PagesQuery) when there is memory for all of them and few others are on their way. So any number
of grants may be sent at once: those that do not fit now wait, and nothing is lost or refused. A part that the gate has
not asked for is a violation.

There are no timers. A decode rank repeats a Grant until it is answered; the gate then asks again for what is missing.
What belongs to a decode rank that has left is forgotten with it, and the rest by the deadline of the grant.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from kvflow.bounds import Bounds
from kvflow.errors import RemoteProtocolError
from kvflow.gate.shares import FairShares
from kvflow.geometry.pages import WIRE_PAGES
from kvflow.room import RoomId
from kvflow.wire.messages import PAGE_BYTES, PARTS_PER_QUERY, Grant, GrantedPages, PagesQuery, PeerId

__all__ = ["GrantGate", "GrantId"]

PARTS_OF_ONE: Final = 8
"""Maximum number of parts of one decode rank that are on their way, each of up to 256 KiB."""

PARTS_IN_ALL: Final = 64
"""Maximum number of parts that are on their way: a quarter of the unread bytes that a listener allows."""

OVERDUE_S: Final = 2.0
"""Time after which a part that has not arrived no longer keeps others from being asked for, in seconds."""

PARTS_OF_SILENT: Final = 8
"""Maximum number of parts that are on their way from all decode ranks whose parts are overdue, one from each."""

MIN_TIMEOUT_S: Final = 1e-3
"""Timeout of a grant whose time is up, in seconds."""


class GrantId(NamedTuple):
    """A grant of one decode rank."""

    peer: PeerId
    room: RoomId
    generation: int


class _Incoming:
    """A grant whose pages are not all here.

    Attributes:
        parts: Component, first page and the page after the last, by part.
        next_part: The first part that was never asked for.
        missing: Parts that were asked for and have not arrived.
        again: Those of them to ask for again, in order.
    """

    def __init__(self, connection: bytes, taker: str, grant: Grant, now: float, *, is_open: bool) -> None:
        self.connection = connection
        self.taker = taker
        self.grant = grant
        self.arrived_at = now
        self.parts = grant.parts
        self.num_bytes = PAGE_BYTES * sum(grant.num_pages.values())
        self.next_part = 0
        self.missing: dict[int, None] = {}
        self.again: list[int] = []
        self.is_started = False
        self.is_open = is_open
        self._pages: dict[str, memoryview] = {}

    def start(self) -> None:
        """Reserve memory, which the system provides as it is filled."""
        self.is_started = True
        for name, count in self.grant.num_pages.items():
            self._pages[name] = np.empty(count, WIRE_PAGES).data.cast("B")

    def next_parts(self, most: int) -> range:
        """Choose at most `most` consecutive parts to ask for now."""
        if self.again:
            first = self.again.pop(0)
            return range(first, first + 1)
        first, self.next_part = self.next_part, min(self.next_part + most, len(self.parts))
        self.missing.update(dict.fromkeys(range(first, self.next_part)))
        return range(first, self.next_part)

    @property
    def wants_more(self) -> bool:
        """Whether there are parts to ask for."""
        return bool(self.again) or self.next_part < len(self.parts)

    def store(self, part: GrantedPages) -> None:
        """Store a part, once.

        Raises:
            RemoteProtocolError: It was not asked for, or has the wrong size.
        """
        if part.part >= self.next_part:
            raise _not_asked_for(part)
        name, first, last = self.parts[part.part]
        begin, end = first * PAGE_BYTES, last * PAGE_BYTES
        if len(part.pages) != end - begin:
            raise RemoteProtocolError("part of a page table has the wrong size", part=part.part, size=len(part.pages))
        if part.part in self.missing:
            del self.missing[part.part]
            self._pages[name][begin:end] = part.pages

    def is_over(self, now: float) -> bool:
        """Return whether its time is up, and its last part would have arrived."""
        return now > self.arrived_at + self.grant.timeout_s + OVERDUE_S

    @property
    def is_whole(self) -> bool:
        """Whether all parts have arrived."""
        return not self.missing and self.next_part == len(self.parts)

    def admitted(self, now: float) -> tuple[bytes, Grant]:
        """Return the connection, and the grant with its pages and the time that is left of it."""
        timeout_s = max(self.grant.timeout_s - (now - self.arrived_at), MIN_TIMEOUT_S)
        pages = cast("dict[str, bytes]", self._pages)  # not copied: they may be large
        return self.connection, replace(self.grant, pages=pages, num_pages={}, timeout_s=timeout_s)


class GrantGate:
    """Collects the pages of grants that are too large for one message.

    Args:
        limits: `pending_grant_bytes` bounds the pages that are being collected, `pending_grants` the grants that wait.
        max_pages: Maximum number of pages of a grant, which decode ranks know.
        has_place: Returns whether pages of a decode rank, of a size in bytes, could be kept until their room is open.
        is_open: Returns whether the engine has opened a room.
    """

    def __init__(
        self,
        limits: Bounds,
        max_pages: int,
        has_place: Callable[[PeerId, int], bool],
        is_open: Callable[[RoomId], bool],
    ) -> None:
        self._max_pages = max_pages
        self._has_place = has_place
        self._is_open = is_open
        self._bytes = FairShares(limits.pending_grant_bytes)
        self._grants = FairShares(limits.pending_grants)
        self.incoming: OrderedDict[GrantId, _Incoming] = OrderedDict()
        self._by_key: defaultdict[PeerId | RoomId, dict[GrantId, None]] = defaultdict(dict)
        # Grants of one decode rank take turns; those of rooms that are not open do not hold up those that are.
        self._lines: OrderedDict[tuple[PeerId, bool], OrderedDict[GrantId, None]] = OrderedDict()
        self._silent: set[PeerId] = set()
        self._under_way: OrderedDict[tuple[GrantId, int], float] = OrderedDict()

    @property
    def has_lines(self) -> bool:
        """Whether there are pages to ask for."""
        return bool(self._lines)

    def receive(self, connection: bytes, taker: str, grant_id: GrantId, grant: Grant, now: float) -> bool:
        """Note a Grant whose pages are to be asked for, or its repetition.

        Return False if it is ignored, because too many grants are waiting. The decode rank repeats it.

        Raises:
            RemoteProtocolError: It has more pages than permitted, or does not say how many there are for each range.
        """
        incoming = self.incoming.get(grant_id)
        if incoming is not None:
            incoming.connection = connection
            self._expire(now)
            incoming.again = [part for part in incoming.missing if (grant_id, part) not in self._under_way]
            self._queue(grant_id, incoming)
            return True
        num_pages = sum(grant.num_pages.values())
        if not 0 < num_pages <= self._max_pages or grant.num_pages.keys() != grant.ranges.keys():
            raise RemoteProtocolError("grant has no proper number of pages", num_pages=num_pages, most=self._max_pages)
        if not self._grants.has_place(taker, 1):
            return False
        self._grants.hold(grant_id, taker, 1)
        incoming = _Incoming(connection, taker, grant, now, is_open=self._is_open(grant_id.room))
        self.incoming[grant_id] = incoming
        for key in (grant_id.peer, grant_id.room):
            self._by_key[key][grant_id] = None
        self._queue(grant_id, incoming)
        return True

    def store_part(self, grant_id: GrantId, part: GrantedPages, now: float) -> tuple[bytes, Grant] | None:
        """Store a part, as `_Incoming.store`; return its connection and grant once nothing is missing any more."""
        incoming = self.incoming.get(grant_id)
        if incoming is None:
            raise _not_asked_for(part)
        incoming.store(part)
        self._silent.discard(grant_id.peer)
        self._under_way.pop((grant_id, part.part), None)
        if not incoming.is_whole:
            return None
        self.drop(grant_id)
        return incoming.admitted(now)

    def drop(self, grant_id: GrantId) -> bool:
        """Forget a grant, for example because it was cancelled; return whether it was known."""
        incoming = self.incoming.pop(grant_id, None)
        if incoming is None:
            return False
        for key in (grant_id.peer, grant_id.room):
            del self._by_key[key][grant_id]
            if not self._by_key[key]:
                del self._by_key[key]
        self._grants.release(grant_id)
        self._bytes.release(grant_id)
        for part in incoming.missing:
            self._under_way.pop((grant_id, part), None)
        self._leave_line(grant_id, incoming)
        return True

    def drop_peer(self, peer: PeerId) -> None:
        """Forget the grants of a decode rank that has left."""
        for grant_id in list(self._by_key.get(peer, ())):
            self.drop(grant_id)
        self._silent.discard(peer)

    def open(self, room: RoomId) -> None:
        """Note that the engine has opened a room."""
        for grant_id in self._by_key.get(room, ()):
            incoming = self.incoming[grant_id]
            self._leave_line(grant_id, incoming)
            incoming.is_open = True
            self._queue(grant_id, incoming)

    def ask(self, now: float, peer_at: Callable[[bytes], PeerId | None]) -> list[tuple[bytes, PagesQuery]]:
        """Return the queries to send now, each with its connection: as many as there is room for.

        `peer_at` returns the decode rank that uses a connection; grants of others are forgotten.
        """
        self._expire(now)
        self._look_at_oldest(now)
        queries: list[tuple[bytes, PagesQuery]] = []
        for _ in range(PARTS_IN_ALL):
            if not self._lines or len(self._under_way) >= PARTS_IN_ALL:
                break
            key, line = next(iter(self._lines.items()))
            self._lines.move_to_end(key)
            peer, _ = key
            grant_id = next(iter(line))
            incoming = self.incoming[grant_id]
            if incoming.is_over(now) or peer_at(incoming.connection) != peer:
                self.drop(grant_id)
                continue
            most = self._most_parts(peer)
            if most <= 0 or not self._start(grant_id, incoming):
                continue
            parts = incoming.next_parts(most)
            for part in parts:
                self._under_way[grant_id, part] = now
            query = PagesQuery(room=grant_id.room, generation=grant_id.generation, start=parts.start, stop=parts.stop)
            queries.append((incoming.connection, query))
            if not incoming.wants_more:
                self._leave_line(grant_id, incoming)
        return queries

    def _most_parts(self, peer: PeerId) -> int:
        """Return how many parts a decode rank may be asked for now."""
        of_peer = sum(grant_id.peer == peer for grant_id, _ in self._under_way)
        if peer in self._silent:
            of_silent = sum(grant_id.peer in self._silent for grant_id, _ in self._under_way)
            return int(not of_peer and of_silent < PARTS_OF_SILENT)
        return min(PARTS_PER_QUERY, PARTS_OF_ONE - of_peer, PARTS_IN_ALL - len(self._under_way))

    def _look_at_oldest(self, now: float) -> None:
        """Drop a grant whose time is up. Each call looks at the next one, so all get their turn."""
        if self.incoming:
            grant_id, incoming = next(iter(self.incoming.items()))
            self.incoming.move_to_end(grant_id)
            if incoming.is_over(now):
                self.drop(grant_id)

    def _start(self, grant_id: GrantId, incoming: _Incoming) -> bool:
        """Return whether there is memory for the pages of a grant, and reserve it."""
        if incoming.is_started:
            return True
        taker, num_bytes = incoming.taker, incoming.num_bytes
        is_kept = not incoming.is_open  # until its room is open
        if not self._bytes.has_place(taker, num_bytes) or (is_kept and not self._has_place(grant_id.peer, num_bytes)):
            return False
        self._bytes.hold(grant_id, taker, num_bytes)
        incoming.start()
        return True

    def _queue(self, grant_id: GrantId, incoming: _Incoming) -> None:
        if incoming.wants_more:
            self._lines.setdefault((grant_id.peer, incoming.is_open), OrderedDict())[grant_id] = None

    def _leave_line(self, grant_id: GrantId, incoming: _Incoming) -> None:
        key = (grant_id.peer, incoming.is_open)
        line = self._lines.get(key)
        if line is not None:
            line.pop(grant_id, None)
            if not line:
                del self._lines[key]

    def _expire(self, now: float) -> None:
        """Stop counting parts that are overdue, so that decode ranks that do not answer hold up nobody else."""
        while self._under_way:
            key, asked_at = next(iter(self._under_way.items()))
            if now < asked_at + OVERDUE_S:
                break
            del self._under_way[key]
            self._silent.add(key[0].peer)


def _not_asked_for(part: GrantedPages) -> RemoteProtocolError:
    return RemoteProtocolError("part of a page table was not asked for", room=part.room, part=part.part)
