"""The pieces that wait, by peer and delivery, and the order in which deliveries and peers take turns. Pure."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvflow.state.effects import Piece
from kvflow.state.events import DeliveryId
from kvflow.wire.messages import PeerId

__all__ = ["DeliveryQueue", "Lane", "Lanes", "QueuedPiece"]


class QueuedPiece(NamedTuple):
    """A queued piece, when it was queued, and whether to pack it if there are slots."""

    piece: Piece
    enqueued_at: float
    wants_slot: bool


class DeliveryQueue(msgspec.Struct):
    """Queued pieces of one delivery, in order; `place` is its due time and, among equals, its order of arrival."""

    delivery: DeliveryId
    entries: deque[QueuedPiece]
    place: tuple[float, int] = (0.0, 0)


class Lane:
    """The pieces that wait for one peer: a line for each delivery, in the rotation of its class."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self.lines: dict[DeliveryId, DeliveryQueue] = {}
        self._rotations: dict[int, OrderedDict[DeliveryId, DeliveryQueue]] = {}
        self._num_joined = 0

    def push(self, entry: QueuedPiece) -> None:
        """Append a piece to the line of its delivery."""
        line = self.lines.get(entry.piece.delivery)
        if line is not None:
            line.entries.append(entry)
            return
        delivery = entry.piece.delivery
        self.lines[delivery] = line = DeliveryQueue(delivery, deque([entry]))
        self._join(line, entry.enqueued_at)

    def take_turn(self, line: DeliveryQueue, now: float) -> QueuedPiece:
        """Take the next piece of a delivery, which has its next turn after others."""
        self._leave(line)
        entry = line.entries.popleft()
        if line.entries:
            self._join(line, now)
        else:
            del self.lines[line.delivery]
        return entry

    def drop(self, delivery: DeliveryId, first: int) -> int:
        """Drop the pieces of a delivery from number `first` on, and return how many there were."""
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

    def next_line(self) -> DeliveryQueue:
        """Return the delivery whose turn it is."""
        firsts = [next(iter(rotation.values())) for rotation in self._rotations.values()]
        return firsts[0] if len(firsts) == 1 else min(firsts, key=lambda line: line.place)

    def _join(self, line: DeliveryQueue, now: float) -> None:
        piece, enqueued_at, _ = line.entries[0]
        due = max(now, enqueued_at + piece.grant.priority * self._ageing_s)
        line.place = (due, self._num_joined)
        self._num_joined += 1
        self._rotations.setdefault(piece.grant.priority, OrderedDict())[line.delivery] = line

    def _leave(self, line: DeliveryQueue) -> None:
        priority = line.entries[0].piece.grant.priority
        rotation = self._rotations[priority]
        del rotation[line.delivery]
        if not rotation:
            del self._rotations[priority]


@dataclass(slots=True)
class Lanes:
    """The pieces of one kind that wait, in a lane for each peer, and whose turn it is.

    Attributes:
        by_peer: The lanes; none is empty.
        candidates: Peers whose next piece may fit their window, in the order of their turns.
        deferred: Peers that the caller has deferred.
        without_slot: Peers that wait for a local slot.
    """

    by_peer: dict[PeerId, Lane] = field(default_factory=dict)
    candidates: OrderedDict[PeerId, None] = field(default_factory=OrderedDict)
    deferred: OrderedDict[PeerId, None] = field(default_factory=OrderedDict)
    without_slot: OrderedDict[PeerId, None] = field(default_factory=OrderedDict)

    def forget_if_empty(self, peer: PeerId) -> None:
        """Forget a peer for which nothing waits; its lane has just changed."""
        if not self.by_peer[peer].lines:
            del self.by_peer[peer]
            del self.candidates[peer]
            self.deferred.pop(peer, None)
            self.without_slot.pop(peer, None)
