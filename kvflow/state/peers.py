"""Liveness of a peer: what both roles track of one incarnation of a rank at the other end. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec

from kvflow.config import PINGS_PER_LEASE
from kvflow.errors import FailureReason
from kvflow.state.effects import LogEvent
from kvflow.state.tables import PEER, PeerSignal, PeerState
from kvflow.state.timers import Timers
from kvflow.wire.messages import Drained, Failed, Failure, Goodbye, Message, Notice, PeerId, Ping, Pong, SlotQuery

__all__ = ["BUSY_LEASES", "LeaseCheck", "Peer", "count_states", "is_genuine", "log_loss"]

MIN_LEASE_S = 1e-3
"""Shortest lease, in seconds, so that there is time between two checks."""

BUSY_LEASES = 10
"""Leases that a peer may be silent for while its connection stands: libzmq's own thread answers heartbeats even while
an engine holds the interpreter. After that, the peer is lost, because its event loop may never run again."""


class LeaseCheck(msgspec.Struct, frozen=True):
    """Timer: check whether a peer was heard from."""

    peer: PeerId


class Peer:
    """One incarnation of a rank at the other end.

    It is presumed dead after a silence of `lease_s`, unless its connection stands.
    """

    def __init__(self, peer: PeerId, timers: Timers[Any]) -> None:
        self.id = peer
        self.state = PeerState.LOST  # until `connected`, which follows at once
        self.lease_s = 0.0
        self.heard_at = 0.0
        self._timers = timers
        self._silent_thirds = 0
        self._is_spared = False

    @property
    def is_connected(self) -> bool:
        """Whether the handshake is done, the connection stands, and the peer is not silent."""
        return self.state is PeerState.CONNECTED

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard for most of its lease, or for longer."""
        return self._silent_thirds >= PINGS_PER_LEASE - 1

    def connected(self, lease_s: float, now: float) -> None:
        """Note that the handshake succeeded, and start the lease."""
        self.lease_s = max(lease_s, MIN_LEASE_S)
        self._apply(PeerSignal.CONNECTED)
        self._heard(now)
        self._timers.set(LeaseCheck(self.id), now + self._third_s)

    def heard(self, now: float) -> bool:
        """Note that a message arrived, and renew the lease; return whether the peer was lost or suspect."""
        self._heard(now)
        if self.state is PeerState.CONNECTED:
            return False
        if self.state is PeerState.LOST:
            self._timers.set(LeaseCheck(self.id), now + self._third_s)
        self._apply(PeerSignal.HEARD)
        return True

    def disconnected(self) -> None:
        """Note that the connection broke."""
        self._apply(PeerSignal.DISCONNECTED)

    def check(self, now: float, late_s: float) -> bool:
        """Count a silent third of the lease; return whether the lease has expired, so that the peer is lost.

        While the connection stands, the peer's process is alive and only its event loop is busy, so it has
        `BUSY_LEASES`. A third is not counted if this check is so late that this process slept through half of it,
        unless the third before was already exempt: messages of the peer may be unread, and a peer in the same process
        could not send any.
        """
        next_check = self.heard_at + self._third_s
        if next_check <= now:
            self._is_spared = late_s > self._third_s / 2 and not self._is_spared
            if not self._is_spared:
                self._silent_thirds += 1
            next_check = now + self._third_s
        if self._silent_thirds >= PINGS_PER_LEASE * (BUSY_LEASES if self.is_connected else 1):
            self._apply(PeerSignal.EXPIRED)
            return True
        self._timers.set(LeaseCheck(self.id), next_check)
        return False

    def left(self) -> None:
        """Note that this incarnation is over."""
        self._timers.clear(LeaseCheck(self.id))
        self._apply(PeerSignal.LEFT)

    @property
    def _third_s(self) -> float:
        return self.lease_s / PINGS_PER_LEASE

    def _heard(self, now: float) -> None:
        self.heard_at = now
        self._silent_thirds = 0
        self._is_spared = False

    def _apply(self, signal: PeerSignal) -> None:
        self.state = PEER[self.state, signal]


def count_states(peers: Iterable[Peer]) -> dict[PeerState, int]:
    """Count known peers by state; those that have left are not known any more."""
    counts = dict.fromkeys((PeerState.CONNECTED, PeerState.SUSPECT, PeerState.LOST), 0)
    for peer in peers:
        counts[peer.state] += 1
    return counts


def is_genuine(peer: PeerId, message: Message) -> bool:
    """Return whether a message names the incarnation, or the engine rank, that its connection belongs to."""
    match message:
        case Ping() | Pong() | Goodbye():
            return message.peer == peer
        case Notice() | Drained() | Failed() | SlotQuery():
            return message.engine_rank == peer.rank.engine_rank
    return True


def log_loss(event: str, peer: PeerId, failure: Failure) -> LogEvent:
    """Return the log event of a lost peer, a warning unless the peer is closing."""
    values = {"peer": str(peer), "reason": failure.reason.value, "detail": failure.detail}
    return LogEvent(event, values, is_warning=failure.reason is not FailureReason.PEER_CLOSED)
