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

Pieces in the background wait apart, and have a turn only when no other piece can have one. `BackgroundPace` bounds the
share of the time in which one is written beside others.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from kvflow.bounds import Bounds
from kvflow.state.effects import Cost, Piece, PieceSlots
from kvflow.state.events import DeliveryId
from kvflow.state.prefill.lanes import DeliveryQueue, Lane, Lanes, QueuedPiece
from kvflow.state.prefill.slots import RemoteSlots, SlotPool
from kvflow.wire.messages import PeerId

__all__ = ["BackgroundPace", "PieceEnd", "PieceQueue", "Turn", "Window"]

PAUSE_PER_PIECE: Final = 9
"""Pause of pieces in the background beside others, per time of a piece: they are under way a tenth of the time."""


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


@dataclass(slots=True)
class BackgroundPace:
    """Lets one piece in the background be under way at a time, so that others share no link with more than one.

    Beside other pieces, it pauses after each one for `PAUSE_PER_PIECE` times as long as that one took.

    Attributes:
        num_others: Pieces under way that are not in the background.
    """

    num_others: int = 0
    _began: float | None = None
    _paused_until: float = 0.0

    def admits(self, now: float) -> bool:
        """Return whether a piece may be taken now."""
        return self._began is None and (not self.num_others or now >= self._paused_until)

    def begin_piece(self, now: float) -> None:
        """Note that a piece was taken."""
        self._began = now

    def end_piece(self, now: float) -> None:
        """Note that the piece has returned its credit."""
        if self._began is not None:
            self._paused_until = now + PAUSE_PER_PIECE * (now - self._began)
            self._began = None


@dataclass(slots=True)
class _UnderWay:
    """A piece that was taken; `charge` is None once its credit was returned."""

    charge: Cost | None
    slots: PieceSlots | None
    is_background: bool


class PieceQueue:
    """Pieces that wait for their turn and for credit, and pieces that were taken and have not ended.

    It reads no clock: callers pass the time, which never decreases from call to call.

    Attributes:
        lanes: Pieces that wait. Without any candidates in either, `pop` takes nothing.
        background: Pieces that wait in the background.
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
        self.lanes, self.background = Lanes(), Lanes()
        self._pace = BackgroundPace()
        self._windows: dict[PeerId, Window] = {}
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
        lanes = self.background if piece.link.is_background else self.lanes
        if peer not in lanes.by_peer:
            lanes.by_peer[peer] = Lane(self._limits.ageing_s)
        lanes.by_peer[peer].push(QueuedPiece(piece, now, wants_slot))
        lanes.candidates.setdefault(peer)

    def pop(self, now: float, turn: Callable[[Piece, bool], Turn] = lambda _, __: Turn.TAKEN) -> Piece | None:
        """Take the piece whose turn it is, and charge its credit; None if no peer's next piece fits and is taken.

        `turn` is called with the piece and whether it is packed. A piece that it does not take keeps its turn.
        """
        while self.lanes.candidates or (self.background.candidates and self._pace.admits(now)):
            lanes = self.lanes if self.lanes.candidates else self.background
            peer = next(iter(lanes.candidates))
            line, window = lanes.by_peer[peer].next_line(), self._windows.get(peer)
            entry = line.entries[0]
            pools = self._pools(entry) if entry.wants_slot else ()
            cost = entry.piece.cost.packed if pools else entry.piece.cost
            if pools and not self._local.num_free:
                lanes.without_slot.setdefault(peer)
            elif (window is None or window.admits(cost)) and all(pool.num_free for pool in pools):
                match turn(entry.piece, bool(pools)):
                    case Turn.TAKEN:
                        return self._take_piece(lanes, line, pools, cost, now)
                    case Turn.OVER:
                        return None
                lanes.deferred.setdefault(peer)
            del lanes.candidates[peer]
            self._look_at_next_without_slot()
        return None

    def resume(self) -> bool:
        """Reconsider the peer that was deferred first; return whether there is one."""
        lanes = self.lanes if self.lanes.deferred else self.background
        if not lanes.deferred:
            return False
        peer, _ = lanes.deferred.popitem(last=False)
        lanes.candidates[peer] = None
        lanes.candidates.move_to_end(peer, last=False)
        return True

    def end_piece(self, delivery: DeliveryId, seq: int, how: PieceEnd, now: float) -> None:
        """Return the credit of a piece from `pop`. The peer returns the remote slot of a posted piece."""
        taken = self._under_way[delivery, seq] if how is PieceEnd.IN_DOUBT else self._under_way.pop((delivery, seq))
        if taken.slots is not None:  # first, so that the peer that has waited longest for the slot gets it
            self._end_slots(delivery.peer, taken.slots, how)
        if taken.charge is not None:
            window = self._windows[delivery.peer]
            window.end_post(taken.charge)
            taken.charge = None
            if taken.is_background:
                self._pace.end_piece(now)
            else:
                self._pace.num_others -= 1
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
        for lanes in (self.lanes, self.background):
            if peer in lanes.by_peer:
                lanes.candidates.setdefault(peer)

    def drop(self, delivery: DeliveryId, first: int = 0) -> None:
        """Drop the queued pieces of a delivery, from number `first` on."""
        peer = delivery.peer
        for lanes in (self.lanes, self.background):
            if peer in lanes.by_peer:
                self.stop_expecting(peer, lanes.by_peer[peer].drop(delivery, first))
                lanes.candidates.setdefault(peer)
                lanes.forget_if_empty(peer)

    def _take_piece(
        self, lanes: Lanes, line: DeliveryQueue, pools: tuple[SlotPool, ...], cost: Cost, now: float
    ) -> Piece:
        peer, is_background = line.delivery.peer, lanes is self.background
        piece = lanes.by_peer[peer].take_turn(line, now).piece
        if pools:
            piece = replace(piece, slots=PieceSlots(*(pool.take_slot() for pool in pools)))
        self._under_way[piece.delivery, piece.seq] = _UnderWay(cost, piece.slots, is_background)
        if is_background:
            self._pace.begin_piece(now)
        else:
            self._pace.num_others += 1
        if peer not in self._windows:
            limits = self._limits
            self._windows[peer] = Window(limits.posts_per_peer, limits.bytes_per_peer, limits.descriptors_per_peer)
        self._windows[peer].begin(cost)
        self.stop_expecting(peer, 1)
        lanes.candidates.move_to_end(peer)
        lanes.deferred.pop(peer, None)
        lanes.forget_if_empty(peer)
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
        lanes = self.lanes if self.lanes.without_slot else self.background
        if lanes.without_slot and (self._local.num_free or not self._local.may_come):
            lanes.candidates.setdefault(lanes.without_slot.popitem(last=False)[0])

    def _pools(self, entry: QueuedPiece) -> tuple[SlotPool, ...]:
        """Return the pools of a piece's slots; none if no slot is or will become free."""
        if self._remote is None:
            return ()
        remote = self._remote.pool(entry.piece.delivery.peer)
        if remote is None:
            return ()
        pools = (self._local, remote)
        return pools if all(pool.num_free or pool.may_come for pool in pools) else ()
