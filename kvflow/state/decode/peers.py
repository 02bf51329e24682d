"""Prefill ranks that a decode rank knows: connections, liveness, proofs of termination, staging windows. Pure."""

from collections import OrderedDict
from typing import NamedTuple, TypeVar

from kvflow.addresses import has_one_host, join_address, split_address
from kvflow.state.decode.deadlines import DecodeTimer, PeerForgotten, PingDue, ProbeDue, QueuePairsGone
from kvflow.state.decode.instances import Instance
from kvflow.state.decode.windows import StagingWindows
from kvflow.state.effects import (
    ClockOffset,
    Connect,
    DecodeEffect,
    Disconnect,
    LogEvent,
    NoteEnds,
    ProbePeer,
    SendMessage,
    WaitForFence,
)
from kvflow.state.peers import Peer, count_states
from kvflow.state.quarantine import MissingProof, ProofKind
from kvflow.state.settings import DecodeSettings
from kvflow.state.tables import InstanceState, PeerState
from kvflow.state.timers import Timers
from kvflow.wire.messages import Message, PeerId, Ping, Pong, StagingWindow, Welcome

__all__ = ["PrefillPeers"]

Item = TypeVar("Item")

MAX_ENDPOINTS = 1_024
"""Maximum number of incarnations whose address or end is remembered."""

PROBE_AGAIN_S = 0.2
"""Pause after a probe that found a suspect peer's port open, in seconds: a killed process closes its sockets one by
one."""

LEASES_TO_FORGET = 10
"""Further leases of silence after which a lost peer is forgotten; until then it may only be partitioned."""


class Origin(NamedTuple):
    """Where an incarnation of a prefill rank listens, and where the transport can observe its writes."""

    endpoint: str = ""
    domain: bytes = b""


class PrefillPeers:
    """All prefill ranks that are or were connected."""

    def __init__(self, me: PeerId, settings: DecodeSettings, timers: Timers[DecodeTimer]) -> None:
        self.windows = StagingWindows(settings.staging)
        self._me = me
        self._timeouts = settings.timeouts
        self._ends_with_process = settings.ends_with_process
        self._proofs = settings.proofs
        self._timers = timers
        self._peers: dict[PeerId, Peer] = {}
        self.clocks: dict[PeerId, ClockOffset] = {}
        self._open: dict[PeerId, str] = {}
        self._hosts: dict[PeerId, str] = {}
        self._broken: dict[PeerId, None] = {}
        self._endpoints: OrderedDict[PeerId, str] = OrderedDict()
        self._probing: dict[PeerId, bool] = {}
        self._ended: OrderedDict[PeerId, None] = OrderedDict()
        self._fencing: OrderedDict[PeerId, bool] = OrderedDict()
        self._origins: OrderedDict[PeerId, Origin] = OrderedDict()
        self._is_short_of_windows = False
        self._num_waits = 0

    def __len__(self) -> int:
        return len(self._peers)

    def count_states(self) -> dict[PeerState, int]:
        """Count the prefill ranks by state."""
        return count_states(self._peers.values())

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def find(self, peer: PeerId) -> Peer | None:
        """Find a prefill rank that has completed the handshake; None if it is unknown or has left."""
        return self._peers.get(peer)

    def is_connected(self, peer: PeerId) -> bool:
        """Return whether a rank is connected, so that it can be sent new requests."""
        known = self._peers.get(peer)
        return known is not None and known.is_connected

    def are_ready(self, instance: Instance) -> bool:
        """Return whether the handshake with an instance is done, and all of its ranks are connected."""
        return instance.state is InstanceState.CONNECTED and all(map(self.is_connected, instance.peers))

    def of_rank(self, peer: PeerId) -> list[PeerId]:
        """Return the other known incarnations of the same rank."""
        return [other for other in self._peers if other.rank == peer.rank and other != peer]

    # Connections -----------------------------------------------------------------------------------------------------

    def open(self, peer: PeerId, endpoint: str) -> list[DecodeEffect]:
        """Open a connection to a rank's address in the directory, unless there is one."""
        _remember(self._origins, peer, self.origin(peer)._replace(endpoint=endpoint))
        if peer in self._open:
            return []
        self._open[peer] = endpoint
        self._broken.pop(peer, None)
        return [Connect(peer, endpoint)]

    @property
    def all_open(self) -> list[PeerId]:
        """Ranks with a connection, broken or not, including those in the handshake."""
        return list(self._open)

    def open_failed(self, peer: PeerId) -> None:
        """Note that connecting failed."""
        self._open.pop(peer, None)
        self._hosts.pop(peer, None)

    def broke_early(self, peer: PeerId) -> None:
        """Note that a connection broke during the handshake: the answer may come from a terminated process."""
        self._broken[peer] = None

    def close(self, peer: PeerId) -> list[DecodeEffect]:
        """Close a connection, if there is one."""
        self._broken.pop(peer, None)
        self._hosts.pop(peer, None)
        self._timers.clear(PeerForgotten(peer))
        return [Disconnect(peer)] if self._open.pop(peer, None) is not None else []

    def close_unless_awaited(self, peer: PeerId, now: float, *, is_awaited: bool) -> list[DecodeEffect]:
        """Close a connection that is no longer needed, unless it may bring a proof that pages wait for.

        The last messages of a process can arrive after a probe has found that it has ended. A running process that has
        disconnected this rank sends Goodbye when it closes, perhaps without another handshake.
        """
        if peer not in self._open or not (is_awaited or self.windows.awaits_fence(peer)):
            return self.close(peer)
        self.lost(peer, now)
        return []

    def send(self, peer: PeerId, message: Message) -> list[DecodeEffect]:
        """Send to a rank if there is a connection to it; lost messages are retransmitted if they matter."""
        return [SendMessage(peer, message)] if peer in self._open else []

    def at_endpoint(self, peer: PeerId) -> list[PeerId]:
        """Return incarnations that said that they listen where this one does: their processes have ended."""
        endpoint = self._place(peer, self._open.get(peer, ""))
        return [other for other, where in self._endpoints.items() if where == endpoint and other != peer]

    def is_where_it_listens(self, peer: PeerId) -> bool:
        """Return whether the connection to an incarnation uses the address that it reported itself."""
        return peer in self._open and self._place(peer, self._open[peer]) == self._endpoints.get(peer)

    def note_host(self, peer: PeerId, host: str) -> None:
        """Note the IP address of the host that the connection to a rank now leads to."""
        if peer in self._open:
            self._hosts[peer] = host

    def _place(self, peer: PeerId, endpoint: str) -> str:
        """Return the address of a rank with the IP address of its host; empty if that is not known.

        A name may lead to another host later, and an address may have several hosts; what those say proves nothing.
        """
        if not endpoint or has_one_host(endpoint):
            return endpoint
        if peer not in self._hosts or self._open.get(peer) != endpoint:
            return ""
        return join_address(self._hosts[peer], split_address("endpoint", endpoint)[1])

    # Liveness --------------------------------------------------------------------------------------------------------

    def handshake_done(self, peer: PeerId, now: float, welcome: Welcome) -> bool:
        """Record the Welcome of a rank, suspect if its connection broke meanwhile; return whether it is new."""
        place = self._place(peer, welcome.endpoint)
        if place:
            _remember(self._endpoints, peer, place)
        origin = Origin(place or welcome.endpoint or self.origin(peer).endpoint, welcome.domain)
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
        """Note that a message arrived; return whether the rank is back from silence or a broken connection."""
        known = self._peers.get(peer)
        if known is None or not known.heard(now):
            return False
        self._timers.clear(PeerForgotten(peer))
        return True

    def ping(self, peer: PeerId, now: float, *, asks_ends: bool) -> list[DecodeEffect]:
        """Ping a rank, even a silent one: if it was only partitioned, its answer restores it.

        It is asked for the ends of its connections while pages wait for proofs, perhaps because its sound connections
        look like others that must end.
        """
        self._timers.set(PingDue(peer), now + self._timeouts.ping_s)
        return self.send(peer, Ping(peer=self._me, asks_ends=self._num_waits if asks_ends else 0, sent_at=now))

    def compare_clocks(self, peer: PeerId, pong: Pong, now: float) -> None:
        """Learn by how much the clock of a rank differs, unless that is known better."""
        if peer not in self._peers or pong.answered_at is None or pong.sent_at is None or pong.sent_at > now:
            return
        found = ClockOffset(pong.sent_at - pong.answered_at, now - pong.answered_at, now)
        known = self.clocks[peer].widened(now) if peer in self.clocks else found
        if found.high - found.low <= known.high - known.low:
            self.clocks[peer] = found

    def lost(self, peer: PeerId, now: float) -> None:
        """Note that a rank is silent; it is forgotten later unless it is heard again or its proof is awaited."""
        self._timers.set(PeerForgotten(peer), now + LEASES_TO_FORGET * self._timeouts.lease_s)

    def left(self, peer: PeerId) -> bool:
        """Remove a rank; return whether it was known."""
        known = self._peers.pop(peer, None)
        if known is None:
            return False
        known.left()
        self.clocks.pop(peer, None)
        self._timers.clear(PingDue(peer))
        self._timers.clear(ProbeDue(peer))
        self._timers.clear(PeerForgotten(peer))
        return True

    # Proofs ----------------------------------------------------------------------------------------------------------

    def probe(self, peer: PeerId) -> list[DecodeEffect]:
        """Probe whether the process of a rank still exists; if a probe is running, queue another one after it.

        Only the address that the rank reported itself is probed: a directory could name any closed port.
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
        """Note that a probe has ended, and repeat it if needed.

        If it found the process, the process may still have ended since the probe began. So a probe requested meanwhile
        starts now, and a suspect peer is probed again soon.
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
        """Record the proof that a process has ended.

        Return whether this alone proves that no write of it can land any more, and otherwise the effects to find out.
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
        return False, [WaitForFence(peer, self.origin(peer).domain, self.begin_wait())] if asks else []

    def begin_wait(self) -> int:
        """Return the number of a new wait for last bytes. Living ranks are then asked which connections are sound."""
        self._num_waits += 1
        return self._num_waits

    def listed_ends(self, peer: PeerId, pong: Pong) -> list[DecodeEffect]:
        """Leave the sound connections of a living rank out of the waits that had begun when it was asked."""
        is_asked = 0 < pong.asks_ends <= self._num_waits
        return [NoteEnds(peer, pong.asks_ends, pong.ends)] if is_asked else []

    def fence_impossible(self, peer: PeerId) -> None:
        """Note that the transport cannot tell when the last writes of a terminated process have landed."""
        if peer in self._fencing:
            self._fencing[peer] = False

    def origin(self, peer: PeerId) -> Origin:
        """Return where an incarnation runs or ran, as far as remembered."""
        return self._origins.get(peer, Origin())

    def missing_proof(self, peer: PeerId) -> MissingProof:
        """Return the missing proof that a rank can write nothing more."""
        known = self._peers.get(peer)
        if peer in self._fencing:
            awaited = ProofKind.LANDING if self._fencing[peer] else ProofKind.OPERATOR
            awaited = ProofKind.QUEUE_PAIRS if QueuePairsGone(peer) in self._timers else awaited
        elif known is not None and known.is_connected:
            awaited = ProofKind.DRAINED
        else:
            awaited = ProofKind.PEER
        return MissingProof(str(peer), self.origin(peer).endpoint, awaited)

    def said_goodbye(self, peer: PeerId) -> None:
        """Note that an incarnation is over and accepts no more requests."""
        _remember(self._ended, peer, None)

    def has_ended(self, peer: PeerId) -> bool:
        """Return whether a rank has sent Goodbye or its process has ended; its directory record may outlive it."""
        return peer in self._ended

    def fenced(self, peer: PeerId) -> None:
        """Record the proof that no write of an incarnation can land any more; it is no longer probed."""
        self._endpoints.pop(peer, None)
        self._fencing.pop(peer, None)
        self._timers.clear(QueuePairsGone(peer))
        self.windows.fenced(peer)

    def assign_window(self, peer: PeerId) -> tuple[StagingWindow | None, list[DecodeEffect]]:
        """Assign a staging window to a rank; if none is free, probe unconnected owners, and log the shortage once."""
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
    """Store an item for an incarnation, and evict the oldest items beyond `MAX_ENDPOINTS`."""
    items[peer] = item
    items.move_to_end(peer)
    while len(items) > MAX_ENDPOINTS:
        items.popitem(last=False)
