"""The queue of pieces that wait for credit, and the order in which they are taken. Pure.

Pieces wait by peer, and within a peer by delivery. Peers take turns. A peer whose next piece does not fit its window is
skipped until credit returns: no other peer waits for it, and no smaller piece of its class overtakes it. The same holds
for a peer whose next piece is deferred by the caller, until `resume`. Peers that wait for a local slot are reconsidered
one after another, first come, first served, while there are free slots.

The deliveries to one peer have a rotation for each priority class, and each delivery has a due time: when waiting will
have lifted its next piece from class `c` to class 0, which is `c * ageing_s` after the piece arrived, but never before
the delivery was queued, so that lifted deliveries take turns. The next delivery is the one that is due first among the
heads of the rotations; finding it costs the same however many wait. It follows that

- between two turns of a delivery, every other waiting delivery of its class has one;
- a class is worth a head start of `ageing_s` over the next one, and no more;
- once a delivery of class `c` has waited for `c * ageing_s`, only deliveries that are already queued can have a turn
  before it, one each.
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvflow.bounds import Bounds
from kvflow.state.effects import Cost, Piece, PieceSlots
from kvflow.state.events import DeliveryId
from kvflow.state.prefill.slots import RemoteSlots, SlotPool
from kvflow.wire.messages import PeerId

__all__ = ["PieceEnd", "PieceQueue", "Turn", "Window"]


class Turn(enum.Enum):
    """Whether a piece that fits is taken."""

    TAKEN = "taken"
    DEFERRED = "deferred"
    """Its peer waits for `resume`; others go on."""
    OVER = "over"
    """Nothing more is taken now."""


class PieceEnd(enum.Enum):
    """How a piece leaves its peer's window."""

    DROPPED = "dropped"
    """It was never posted."""
    ENDED = "ended"
    """Its post has ended."""
    IN_DOUBT = "in doubt"
    """The transport cannot tell whether its post has ended."""


@dataclass
class Window:
    """A bound on the posts, bytes and descriptors in flight. A single post may exceed the latter two."""

    max_posts: int
    max_bytes: int
    max_descriptors: int
    num_posts: int = field(default=0, init=False)
    num_bytes: int = field(default=0, init=False)
    num_descriptors: int = field(default=0, init=False)

    def admits(self, cost: Cost) -> bool:
        """Return whether a post of this cost may begin now."""
        if self.num_posts == 0:
            return True
        return (
            self.num_posts < self.max_posts
            and self.num_bytes + cost.num_bytes <= self.max_bytes
            and self.num_descriptors + cost.num_descriptors <= self.max_descriptors
        )

    def begin(self, cost: Cost) -> None:
        """Count a post that starts."""
        self.num_posts += 1
        self.num_bytes += cost.num_bytes
        self.num_descriptors += cost.num_descriptors

    def end_post(self, cost: Cost) -> None:
        """Count a post that has ended; `cost` is what it began with."""
        self.num_posts -= 1
        self.num_bytes -= cost.num_bytes
        self.num_descriptors -= cost.num_descriptors


class _Entry(NamedTuple):
    """A queued piece, when it was queued, and whether to pack it if there are slots."""

    piece: Piece
    enqueued_at: float
    wants_slot: bool


@dataclass(slots=True)
class _UnderWay:
    """A piece that was taken; `charge` is None once its credit was returned."""

    charge: Cost | None
    slots: PieceSlots | None


class PieceQueue:
    """Pieces that wait for their turn and for credit, and pieces that were taken and have not ended.

    It reads no clock: callers pass the time, which never decreases from call to call.

    Attributes:
        candidates: Peers with a waiting piece that may fit their window; without any, `pop` takes nothing.
        full: Peers with as many waiting pieces as allowed, or more.
        has_freed_capacity: Whether a full queue of a peer has gained capacity; the caller resets it.
    """

    def __init__(
        self,
        limits: Bounds,
        local: SlotPool | None = None,
        remote: RemoteSlots | None = None,
    ) -> None:
        self._local = local or SlotPool(0)
        self._remote = remote
        self._under_way: dict[tuple[DeliveryId, int], _UnderWay] = {}
        self._limits = limits
        self._lanes: dict[PeerId, _Lane] = {}
        self._windows: dict[PeerId, Window] = {}
        self.candidates: OrderedDict[PeerId, None] = OrderedDict()
        self._deferred: OrderedDict[PeerId, None] = OrderedDict()
        self._without_slot: OrderedDict[PeerId, None] = OrderedDict()
        self._num_waiting: dict[PeerId, int] = {}
        self.full: dict[PeerId, None] = {}
        self.has_freed_capacity = False

    def __len__(self) -> int:
        """Return the number of waiting pieces, whatever they wait for."""
        return sum(self._num_waiting.values())

    def expect(self, peer: PeerId) -> None:
        """Count a piece that will be pushed when its data is ready."""
        self._num_waiting[peer] = count = self._num_waiting.get(peer, 0) + 1
        if count >= self._limits.queued_chunks:
            self.full[peer] = None

    def stop_expecting(self, peer: PeerId, count: int) -> None:
        """Note that `count` pieces no longer wait."""
        if not count:
            return
        left = self._num_waiting.pop(peer) - count
        if left:
            self._num_waiting[peer] = left
        if left < self._limits.queued_chunks and peer in self.full:
            del self.full[peer]
            self.has_freed_capacity = True

    def push(self, piece: Piece, now: float, *, wants_slot: bool) -> None:
        """Append an expected piece to the queue of its delivery."""
        peer = piece.delivery.peer
        if peer not in self._lanes:
            self._lanes[peer] = _Lane(self._limits.ageing_s)
        self._lanes[peer].push(_Entry(piece, now, wants_slot))
        self.candidates.setdefault(peer)

    def pop(self, now: float, turn: Callable[[Piece, bool], Turn] = lambda _, __: Turn.TAKEN) -> Piece | None:
        """Take the piece whose turn it is, and charge its credit; None if no peer's next piece fits and is taken.

        `turn` is called with the piece and whether it is packed. A piece that it does not take keeps its turn.
        """
        while self.candidates:
            peer = next(iter(self.candidates))
            line, window = self._lanes[peer].next_line(), self._windows.get(peer)
            entry = line.entries[0]
            pools = self._pools(entry) if entry.wants_slot else ()
            cost = entry.piece.cost.packed if pools else entry.piece.cost
            if pools and not self._local.num_free:
                self._without_slot.setdefault(peer)
            elif (window is None or window.admits(cost)) and all(pool.num_free for pool in pools):
                match turn(entry.piece, bool(pools)):
                    case Turn.TAKEN:
                        return self._take_piece(peer, line, pools, cost, now)
                    case Turn.OVER:
                        return None
                self._deferred.setdefault(peer)
            del self.candidates[peer]
            self._look_at_next_without_slot()
        return None

    def resume(self) -> bool:
        """Reconsider the peer that was deferred first; return whether there is one."""
        if not self._deferred:
            return False
        peer, _ = self._deferred.popitem(last=False)
        self.candidates[peer] = None
        self.candidates.move_to_end(peer, last=False)
        return True

    def end_piece(self, delivery: DeliveryId, seq: int, how: PieceEnd) -> None:
        """Return the credit of a piece from `pop`. The peer returns the remote slot of a posted piece."""
        taken = self._under_way[delivery, seq] if how is PieceEnd.IN_DOUBT else self._under_way.pop((delivery, seq))
        if taken.slots is not None:  # first, so that the peer that has waited longest for the slot gets it
            self._end_slots(delivery.peer, taken.slots, how)
        if taken.charge is not None:
            window = self._windows[delivery.peer]
            window.end_post(taken.charge)
            taken.charge = None
            if window.num_posts == 0:
                del self._windows[delivery.peer]
            self.look_again(delivery.peer)

    def is_in_doubt(self, delivery: DeliveryId, seq: int) -> bool:
        """Return whether a taken piece has already returned its credit."""
        return self._under_way[delivery, seq].charge is None

    def release_slots(self, delivery: DeliveryId, seq: int) -> None:
        """Return the slots of a piece that is written directly after all."""
        taken = self._under_way[delivery, seq]
        if taken.slots is not None:
            self._end_slots(delivery.peer, taken.slots, PieceEnd.DROPPED)
            taken.slots = None

    def look_again(self, peer: PeerId) -> None:
        """Reconsider a peer's pieces, because one of its slots has become free or lost."""
        if peer in self._lanes:
            self.candidates.setdefault(peer)

    def drop(self, delivery: DeliveryId, first: int = 0) -> None:
        """Drop the queued pieces of a delivery, from number `first` on."""
        lane = self._lanes.get(delivery.peer)
        if lane is None:
            return
        self.stop_expecting(delivery.peer, lane.drop(delivery, first))
        self.candidates.setdefault(delivery.peer)
        self._forget_if_empty(delivery.peer)

    def _take_piece(
        self, peer: PeerId, line: "_DeliveryQueue", pools: tuple[SlotPool, ...], cost: Cost, now: float
    ) -> Piece:
        piece = self._lanes[peer].take_turn(line, now).piece
        if pools:
            piece = replace(piece, slots=PieceSlots(*(pool.take_slot() for pool in pools)))
        self._under_way[piece.delivery, piece.seq] = _UnderWay(cost, piece.slots)
        if peer not in self._windows:
            limits = self._limits
            self._windows[peer] = Window(limits.posts_per_peer, limits.bytes_per_peer, limits.descriptors_per_peer)
        self._windows[peer].begin(cost)
        self.stop_expecting(peer, 1)
        self.candidates.move_to_end(peer)
        self._deferred.pop(peer, None)
        self._forget_if_empty(peer)
        self._look_at_next_without_slot()
        return piece

    def _end_slots(self, peer: PeerId, slots: PieceSlots, how: PieceEnd) -> None:
        if how is PieceEnd.IN_DOUBT:
            self._local.lose(slots.local)
        else:
            self._local.give_back(slots.local)
            if how is PieceEnd.DROPPED and self._remote is not None:
                self._remote.give_back(peer, slots.remote)
        self._look_at_next_without_slot()
        self.look_again(peer)

    def _look_at_next_without_slot(self) -> None:
        """Reconsider the peer that has waited longest for a local slot, if one is free, or none will ever be."""
        if self._without_slot and (self._local.num_free or not self._local.may_come):
            self.candidates.setdefault(self._without_slot.popitem(last=False)[0])

    def _pools(self, entry: _Entry) -> tuple[SlotPool, ...]:
        """Return the pools of a piece's slots; none if no slot is or will become free."""
        if self._remote is None:
            return ()
        remote = self._remote.pool(entry.piece.delivery.peer)
        if remote is None:
            return ()
        pools = (self._local, remote)
        return pools if all(pool.num_free or pool.may_come for pool in pools) else ()

    def _forget_if_empty(self, peer: PeerId) -> None:
        if not self._lanes[peer].lines:
            del self._lanes[peer]
            del self.candidates[peer]
            self._deferred.pop(peer, None)
            self._without_slot.pop(peer, None)


class _DeliveryQueue(msgspec.Struct):
    """Queued pieces of one delivery, in order; `place` is its due time and, among equals, its order of arrival."""

    delivery: DeliveryId
    entries: deque[_Entry]
    place: tuple[float, int] = (0.0, 0)


class _Lane:
    """The pieces that wait for one peer: a line for each delivery, in the rotation of its class."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self.lines: dict[DeliveryId, _DeliveryQueue] = {}
        self._rotations: dict[int, OrderedDict[DeliveryId, _DeliveryQueue]] = {}
        self._num_joined = 0

    def push(self, entry: _Entry) -> None:
        line = self.lines.get(entry.piece.delivery)
        if line is not None:
            line.entries.append(entry)
            return
        delivery = entry.piece.delivery
        self.lines[delivery] = line = _DeliveryQueue(delivery, deque([entry]))
        self._join(line, entry.enqueued_at)

    def take_turn(self, line: _DeliveryQueue, now: float) -> _Entry:
        self._leave(line)
        entry = line.entries.popleft()
        if line.entries:
            self._join(line, now)
        else:
            del self.lines[line.delivery]
        return entry

    def drop(self, delivery: DeliveryId, first: int) -> int:
        line = self.lines.get(delivery)
        if line is None:
            return 0
        num_before = len(line.entries)
        kept = [entry for entry in line.entries if entry.piece.seq < first]
        if not kept:
            self._leave(line)
            del self.lines[delivery]
        line.entries = deque(kept)
        return num_before - len(kept)

    def next_line(self) -> _DeliveryQueue:
        firsts = [next(iter(rotation.values())) for rotation in self._rotations.values()]
        return firsts[0] if len(firsts) == 1 else min(firsts, key=lambda line: line.place)

    def _join(self, line: _DeliveryQueue, now: float) -> None:
        piece, enqueued_at, _ = line.entries[0]
        due = max(now, enqueued_at + piece.grant.priority * self._ageing_s)
        line.place = (due, self._num_joined)
        self._num_joined += 1
        self._rotations.setdefault(piece.grant.priority, OrderedDict())[line.delivery] = line

    def _leave(self, line: _DeliveryQueue) -> None:
        priority = line.entries[0].piece.grant.priority
        rotation = self._rotations[priority]
        del rotation[line.delivery]
        if not rotation:
            del self._rotations[priority]
