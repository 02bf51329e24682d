"""Prefill ranks that a decode rank knows: connections, liveness, proofs of their end, staging windows. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvflow.state.decode.windows import StagingWindows
from kvflow.state.effects import AwaitFence, Connect, DecodeEffect, Disconnect, LogEvent, ProbePeer, SendMessage
from kvflow.state.peers import Peer
from kvflow.state.quarantine import Awaited, MissingProof
from kvflow.state.settings import DecodeSettings
from kvflow.state.tables import PeerState
from kvflow.state.timers import Timers
from kvflow.wire.messages import Message, PeerId, Ping, StagingWindow, Welcome

__all__ = ["PeerForgotten", "PingDue", "PrefillPeers", "ProbeDue", "QueuePairsGone"]

Item = TypeVar("Item")

MAX_ENDPOINTS = 1_024
"""Incarnations whose address is remembered after they have left."""

PROBE_AGAIN_S = 0.2
"""After a probe that found a suspect peer's port open: a process that is killed closes its sockets one by one."""

LEASES_TO_FORGET = 10
"""Further leases of silence after which a lost peer is forgotten; until then it may only have been cut off."""


class PingDue(msgspec.Struct, frozen=True):
    """Timer: tell a peer that this rank lives."""

    peer: PeerId


class PeerForgotten(msgspec.Struct, frozen=True):
    """Timer: a peer that is lost has been silent for long enough to be forgotten, or its connection to be closed."""

    peer: PeerId


class ProbeDue(msgspec.Struct, frozen=True):
    """Timer: look again whether the process of a suspect peer still exists."""

    peer: PeerId


class QueuePairsGone(msgspec.Struct, frozen=True):
    """Timer: the deployment says that by now nothing lands any more of what an ended process had written."""

    peer: PeerId


class Origin(NamedTuple):
    """Where an incarnation of a prefill rank runs, as far as it is known.

    Attributes:
        endpoint: Address of its control socket.
        domain: What its transport has said of where its writes can be seen.
    """

    endpoint: str = ""
    domain: bytes = b""


NOWHERE: Final = Origin()


class PrefillPeers:
    """Every prefill rank that is connected, or was.

    Attributes:
        windows: Staging windows, and whose they are.
    """

    def __init__(self, me: PeerId, settings: DecodeSettings, timers: Timers[Hashable]) -> None:
        self.windows = StagingWindows(settings.staging)
        self._me = me
        self._timeouts = settings.timeouts
        self._ends_with_process = settings.ends_with_process
        self._proofs = settings.proofs
        self._timers = timers
        self._peers: dict[PeerId, Peer] = {}
        self._open: dict[PeerId, str] = {}
        self._broken: dict[PeerId, None] = {}
        self._endpoints: OrderedDict[PeerId, str] = OrderedDict()
        self._probing: dict[PeerId, bool] = {}
        self._ended: OrderedDict[PeerId, None] = OrderedDict()
        self._fencing: OrderedDict[PeerId, bool] = OrderedDict()
        self._origins: OrderedDict[PeerId, Origin] = OrderedDict()
        self._is_short_of_windows = False

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def find(self, peer: PeerId) -> Peer | None:
        """Find a prefill rank after the handshake; None if it is not known, or has left."""
        return self._peers.get(peer)

    def is_connected(self, peer: PeerId) -> bool:
        """Return whether a rank can be sent something new."""
        known = self._peers.get(peer)
        return known is not None and known.is_connected

    def connected(self) -> list[PeerId]:
        """Ranks that can be sent something new."""
        return [peer.id for peer in self._peers.values() if peer.is_connected]

    def of_rank(self, peer: PeerId) -> list[PeerId]:
        """Known incarnations of the same rank but this one."""
        return [other for other in self._peers if other.rank == peer.rank and other != peer]

    # Connections -----------------------------------------------------------------------------------------------------

    def open(self, peer: PeerId, endpoint: str) -> list[DecodeEffect]:
        """Open a connection to where a directory has a rank, unless there is one."""
        _remember(self._origins, peer, self.origin(peer)._replace(endpoint=endpoint))
        if peer in self._open:
            return []
        self._open[peer] = endpoint
        self._broken.pop(peer, None)
        return [Connect(peer, endpoint)]

    @property
    def all_open(self) -> list[PeerId]:
        """Ranks to which there is a connection, broken or not, also during the handshake."""
        return list(self._open)

    def open_failed(self, peer: PeerId) -> None:
        """Note that no connection could be made."""
        self._open.pop(peer, None)

    def broke_early(self, peer: PeerId) -> None:
        """Note that a connection broke during the handshake: the answer may come from a process that is gone."""
        self._broken[peer] = None

    def close(self, peer: PeerId) -> list[DecodeEffect]:
        """Close a connection, if there is one."""
        self._broken.pop(peer, None)
        self._timers.clear(PeerForgotten(peer))
        return [Disconnect(peer)] if self._open.pop(peer, None) is not None else []

    def close_unless_awaited(self, peer: PeerId, now: float, *, is_awaited: bool) -> list[DecodeEffect]:
        """Close a connection that is not needed any more, unless it may bring a proof that something waits for.

        The last words of a process can come after a probe has found that it has ended. One that lives and has
        disconnected this rank says Goodbye when it leaves, perhaps without another handshake.

        Args:
            peer: Whose connection.
            now: The time.
            is_awaited: Pages wait for a proof of this incarnation.
        """
        if peer not in self._open or not (is_awaited or self.windows.awaits_fence(peer)):
            return self.close(peer)
        self.lost(peer, now)
        return []

    def send(self, peer: PeerId, message: Message) -> list[DecodeEffect]:
        """Send over a connection; what is for a rank without one is lost, and retransmitted if it matters."""
        return [SendMessage(peer, message)] if peer in self._open else []

    def at_endpoint(self, peer: PeerId) -> list[PeerId]:
        """Who listened where this incarnation was reached: their processes have ended.

        What a directory has said of them does not count, only what they have said themselves.
        """
        endpoint = self._open.get(peer)
        return [other for other, where in self._endpoints.items() if where == endpoint and other != peer]

    def is_where_it_listens(self, peer: PeerId) -> bool:
        """Return whether the connection to an incarnation leads where it has said that it listens."""
        return peer in self._open and self._open[peer] == self._endpoints.get(peer)

    # Liveness --------------------------------------------------------------------------------------------------------

    def handshake_done(self, peer: PeerId, now: float, welcome: Welcome) -> bool:
        """Note that a rank takes grants, and what it says of itself; say whether it was not known before.

        One whose connection broke meanwhile is suspect until something else is heard.
        """
        if welcome.endpoint:
            _remember(self._endpoints, peer, welcome.endpoint)
        origin = Origin(welcome.endpoint or self.origin(peer).endpoint, welcome.domain)
        _remember(self._origins, peer, origin)
        known = self._peers.get(peer)
        is_new = known is None
        if known is None:
            known = self._peers[peer] = Peer(peer, self._timers)
        self._timers.clear(PeerForgotten(peer))
        self.windows.use(peer)
        known.connected(self._timeouts.lease_s, now)
        if peer in self._broken:
            del self._broken[peer]
            known.disconnected()
        self._timers.set(PingDue(peer), now + self._timeouts.ping_s)
        return is_new

    def heard(self, peer: PeerId, now: float) -> bool:
        """Note that a message came; say whether the rank is back from silence or a break."""
        known = self._peers.get(peer)
        if known is None or not known.heard(now):
            return False
        self._timers.clear(PeerForgotten(peer))
        return True

    def ping(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Also a silent rank: if it was only cut off, its answer brings it back."""
        self._timers.set(PingDue(peer), now + self._timeouts.ping_s)
        return self.send(peer, Ping(peer=self._me))

    def lost(self, peer: PeerId, now: float) -> None:
        """Note that a rank is silent: it is forgotten later, unless it is heard again or a proof of it is awaited."""
        self._timers.set(PeerForgotten(peer), now + LEASES_TO_FORGET * self._timeouts.lease_s)

    def left(self, peer: PeerId) -> bool:
        """Drop a rank; say whether it was known."""
        known = self._peers.pop(peer, None)
        if known is None:
            return False
        known.left()
        self._timers.clear(PingDue(peer))
        self._timers.clear(ProbeDue(peer))
        self._timers.clear(PeerForgotten(peer))
        return True

    # Proofs ----------------------------------------------------------------------------------------------------------

    def probe(self, peer: PeerId) -> list[DecodeEffect]:
        """Find out whether the process of a rank still exists; if that is going on, perhaps once more after it.

        Only where it has said itself that it listens: a directory could name any port at which nobody does.
        """
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            return []
        if peer in self._probing:
            self._probing[peer] = True
            return []
        self._probing[peer] = False
        return [ProbePeer(peer, endpoint)]

    def probe_finished(self, peer: PeerId, now: float, *, is_gone: bool) -> list[DecodeEffect]:
        """Note that a probe has ended. If it found nothing, what has happened since it began may show by another.

        So one that was asked for meanwhile is made now, and a suspect peer is probed again soon.
        """
        was_asked_again = self._probing.pop(peer, False)
        if is_gone:
            return []
        if self._is_suspect(peer):
            self._timers.set(ProbeDue(peer), now + PROBE_AGAIN_S)
        return self.probe(peer) if was_asked_again else []

    def probe_suspect(self, peer: PeerId) -> list[DecodeEffect]:
        """Probe a peer if it is still suspect."""
        return self.probe(peer) if self._is_suspect(peer) else []

    def _is_suspect(self, peer: PeerId) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.state is PeerState.SUSPECT

    def ended(self, peer: PeerId, now: float) -> tuple[bool, list[DecodeEffect]]:
        """Note the proof that a process has ended.

        Returns:
            Whether that alone proves that nothing of it lands any more; and what is to be done to find out if not.
        """
        self._endpoints.pop(peer, None)
        self.said_goodbye(peer)
        if self._ends_with_process and self._proofs.process_end:
            return True, []
        if peer in self._fencing:
            return False, []
        queue_pairs_s = self._proofs.queue_pairs_die_with_process_s
        if queue_pairs_s is not None:
            self._timers.set_once(QueuePairsGone(peer), now + queue_pairs_s)
        asks = self._proofs.process_end
        _remember(self._fencing, peer, asks)
        return False, [AwaitFence(peer, self.origin(peer).domain)] if asks else []

    def fence_impossible(self, peer: PeerId) -> None:
        """Note that the transport does not tell when the last bytes of an ended process have landed."""
        if peer in self._fencing:
            self._fencing[peer] = False

    def origin(self, peer: PeerId) -> Origin:
        """Return what is remembered of where an incarnation runs, also after its end."""
        return self._origins.get(peer, NOWHERE)

    def missing_proof(self, peer: PeerId) -> MissingProof:
        """Return what would prove that a rank can write nothing any more."""
        known = self._peers.get(peer)
        if peer in self._fencing:
            awaited = Awaited.LANDING if self._fencing[peer] else Awaited.OPERATOR
            awaited = Awaited.QUEUE_PAIRS if QueuePairsGone(peer) in self._timers else awaited
        elif known is not None and known.is_connected:
            awaited = Awaited.DRAINED
        else:
            awaited = Awaited.PEER
        return MissingProof(str(peer), self.origin(peer).endpoint, awaited)

    def said_goodbye(self, peer: PeerId) -> None:
        """Note that a rank serves nobody any more."""
        _remember(self._ended, peer, None)

    def has_ended(self, peer: PeerId) -> bool:
        """Return whether a rank has said goodbye, or its process has ended; its record may outlive it."""
        return peer in self._ended

    def fenced(self, peer: PeerId) -> None:
        """Note the proof that nothing of an incarnation lands any more: it is not probed after that."""
        self._endpoints.pop(peer, None)
        self._fencing.pop(peer, None)
        self._timers.clear(QueuePairsGone(peer))
        self.windows.fenced(peer)

    def assign_window(self, peer: PeerId) -> tuple[StagingWindow | None, list[DecodeEffect]]:
        """Give a rank a staging window; if none is left, look for owners that have ended, and say so once."""
        window = self.windows.assign(peer)
        if window is not None or not self.windows.num_windows:
            self._is_short_of_windows &= window is None
            return window, []
        effects: list[DecodeEffect] = []
        for owner in self.windows.owners:
            if owner not in self._peers:
                effects += self.probe(owner)
        if not self._is_short_of_windows:
            self._is_short_of_windows = True
            values = {"peer": str(peer), "windows": str(self.windows.num_windows)}
            effects.append(LogEvent("staging_windows_exhausted", values, is_warning=True))
        return None, effects


def _remember(items: OrderedDict[PeerId, Item], peer: PeerId, item: Item) -> None:
    """Keep something of an incarnation, and of so many others at most."""
    items[peer] = item
    items.move_to_end(peer)
    while len(items) > MAX_ENDPOINTS:
        items.popitem(last=False)
