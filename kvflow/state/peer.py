"""The acquaintance with one life of a peer: greeted, heard, lost."""

from kvflow.state.tables import PEER, PeerSignal, PeerState
from kvflow.wire.messages import PeerId

__all__ = ["Peer"]


class Peer:
    """What a rank remembers of one life of another rank.

    Attributes:
        lease_s: Silence after which it must be taken for dead.
        expires: When that is, on the shell's monotonic clock.
        is_spared: The lease was extended once in this silence, because this process was not running.
    """

    def __init__(self, peer: PeerId) -> None:
        self.id = peer
        self.state = PeerState.LOST  # until `greeted`, which follows at once
        self.lease_s = 0.0
        self.expires = 0.0
        self.is_spared = False

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
        self.expires = now + self.lease_s
        self.is_spared = False

    def expired(self) -> None:
        """The lease is over."""
        self._apply(PeerSignal.EXPIRED)

    def left(self) -> None:
        """This life is over."""
        self._apply(PeerSignal.LEFT)

    def _apply(self, signal: PeerSignal) -> None:
        self.state = PEER[self.state, signal]
