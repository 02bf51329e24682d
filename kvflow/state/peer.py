"""The acquaintance with one life of a peer: greeted, heard, lost."""

from kvflow.config import PINGS_PER_LEASE
from kvflow.state.tables import PEER, PeerSignal, PeerState
from kvflow.wire.messages import PeerId

__all__ = ["Peer"]


class Peer:
    """What a rank remembers of one life of another rank.

    Attributes:
        lease_s: Silence after which it must be taken for dead.
        heard_at: When something was last heard, on the shell's monotonic clock.
    """

    def __init__(self, peer: PeerId) -> None:
        self.id = peer
        self.state = PeerState.LOST  # until `greeted`, which follows at once
        self.lease_s = 0.0
        self.heard_at = 0.0
        self._silent_thirds = 0
        self._is_spared = False

    @property
    def is_connected(self) -> bool:
        """It is greeted and not silent."""
        return self.state is PeerState.CONNECTED

    def greeted(self, lease_s: float, now: float) -> None:
        """The handshake succeeded: the lease begins."""
        self.lease_s = lease_s
        self._apply(PeerSignal.GREETED)
        self.heard(now)

    def heard(self, now: float) -> None:
        """A message came: the lease begins anew."""
        self._apply(PeerSignal.HEARD)
        self.heard_at = now
        self._silent_thirds = 0
        self._is_spared = False

    @property
    def third_s(self) -> float:
        """How long after one look at it the next is due."""
        return self.lease_s / PINGS_PER_LEASE

    def look(self, now: float, late_s: float) -> float | None:
        """Count a third of the lease that was silent.

        A third of which this process slept through a half is not counted, except after another such one in the same
        silence: what the peer said meanwhile may lie unread, and a peer in the same process could say nothing.

        Args:
            now: The time.
            late_s: By how much this look comes too late.

        Returns:
            When to look next, or None if the whole lease was silent.
        """
        if self.heard_at + self.third_s > now:
            return self.heard_at + self.third_s
        self._is_spared = late_s > self.third_s / 2 and not self._is_spared
        if not self._is_spared:
            self._silent_thirds += 1
        return now + self.third_s if self._silent_thirds < PINGS_PER_LEASE else None

    def expired(self) -> None:
        """The lease is over."""
        self._apply(PeerSignal.EXPIRED)

    def left(self) -> None:
        """This life is over."""
        self._apply(PeerSignal.LEFT)

    def _apply(self, signal: PeerSignal) -> None:
        self.state = PEER[self.state, signal]
