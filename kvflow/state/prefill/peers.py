"""Decode ranks that a prefill rank is connected to, their handshakes, and their closed generations. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvflow.gate.shares import FairShares
from kvflow.state.closed import ClosedGenerations
from kvflow.state.effects import PrefillEffect, Reply
from kvflow.state.events import DeliveryId, PeerRoute
from kvflow.state.peers import Peer, count_states
from kvflow.state.prefill.deadlines import PrefillTimer
from kvflow.state.tables import PeerState
from kvflow.state.timers import Timers
from kvflow.wire.messages import Failure, Hello, Message, PeerId, RankId

__all__ = ["ClosedGeneration", "DecodePeer", "DecodePeers", "Kept", "Newcomer"]

MAX_HELLO_BYTES = 64 * 2**20
"""Maximum bytes of stored Hellos, as encoded. Decoded layouts take ten times as much memory; 8,192 ranks with 100
layers each reach this limit."""

MAX_CLOSED = 4_096
"""Maximum number of closed generations remembered for each decode rank, to recognise late messages."""

MAX_DISCONNECTED = 4_096
"""Maximum number of disconnected decode ranks that are remembered: they may reconnect, or wait for a proof."""

MAX_WRITE_FAILURES = 3
"""Failed writes in a row after which a decode rank must reconnect."""

SAME_CAUSE_S = 0.5
"""Failed writes within this time of one that counted, in seconds, are attributed to the same cause."""


class ClosedGeneration(NamedTuple):
    """How a delivery ended; `failure` is None for a success."""

    failure: Failure | None


class Kept(NamedTuple):
    """The size of a stored Hello, and the principal whose share it counts to."""

    taker: str
    num_bytes: int


class _Check(NamedTuple):
    """A Hello that is being checked."""

    attempt: int
    connection: bytes
    kept: Kept


class Newcomer(NamedTuple):
    """The last Hello of another incarnation of a connected rank."""

    connection: bytes
    hello: Hello
    kept: Kept


class _Disconnected(NamedTuple):
    """The last incarnation that was heard and has disconnected.

    Its generations below `floor` ended then, with `failure`. It may be running, and wait for the proof that nothing can
    land in its pages: it is sent Goodbye over its last `connection`.
    """

    peer: PeerId
    connection: bytes
    floor: int
    failure: Failure


class DecodePeer:
    """One incarnation of a decode rank, as this rank knows it.

    Attributes:
        floor: One above the highest generation that it has used.
        was_heard: Whether it has sent more than Hello and Goodbye, which proves that it has received a Welcome. A Hello
            alone may have outlived its sender in a queue.
        newcomer: Another incarnation of the same rank, until it is known whether this one is alive.
        asked_at: When this one was pinged because of the newcomer.
        refused: Incarnation that was last refused because this one is alive.
    """

    def __init__(self, peer: PeerId, timers: Timers[PrefillTimer], kept: Kept, before: _Disconnected | None) -> None:
        self.id = peer
        self.liveness = Peer(peer, timers)
        self.connection = b""
        self.attempt = -1
        self.link: PeerRoute
        self.floor = before.floor if before else 0
        self.closed: ClosedGenerations[ClosedGeneration] = ClosedGenerations(MAX_CLOSED, self.floor)
        self.before = before
        self.was_heard = False
        self.kept = kept
        self.newcomer: Newcomer | None = None
        self.asked_at = 0.0
        self.refused: PeerId | None = None
        self._num_write_failures = 0
        self._write_failed_at = float("-inf")
        self._written_at = float("-inf")

    def used(self, generation: int) -> None:
        """Note that the decode rank has used a generation."""
        self.floor = max(self.floor, generation + 1)

    def failure_before(self, generation: int) -> Failure | None:
        """Return why it was disconnected after it had used a generation; None if it was not."""
        before = self.before
        return before.failure if before is not None and generation < before.floor else None

    def write_succeeded(self, now: float) -> None:
        """Note that a write to the decode rank has succeeded."""
        self._num_write_failures = 0
        self._written_at = now

    def is_stuck(self, now: float, progress_s: float) -> bool:
        """Return whether no write to it has succeeded for `progress_s`."""
        return now >= self._written_at + progress_s

    def write_failed(self, now: float) -> bool:
        """Note that a write to it has failed; return whether it must reconnect, with fresh native state."""
        if now < self._write_failed_at + SAME_CAUSE_S:
            return False
        self._write_failed_at = now
        self._num_write_failures += 1
        return self._num_write_failures >= MAX_WRITE_FAILURES


class DecodePeers:
    """Connected decode ranks, by incarnation, rank and connection. Those whose Hello is being checked count as well."""

    def __init__(self, timers: Timers[PrefillTimer], most: int) -> None:
        self._timers = timers
        self._shares = FairShares(most)
        self._bytes = FairShares(MAX_HELLO_BYTES)
        self._peers: dict[PeerId, DecodePeer] = {}
        self._by_rank: dict[RankId, PeerId] = {}
        self._by_connection: dict[bytes, PeerId] = {}
        self._checking: dict[PeerId, _Check] = {}
        self._checking_at: dict[bytes, PeerId] = {}
        self._disconnected: OrderedDict[RankId, _Disconnected] = OrderedDict()
        self._over: OrderedDict[PeerId, str] = OrderedDict()
        self._former_at: OrderedDict[bytes, PeerId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def count_states(self) -> dict[PeerState, int]:
        """Count the decode ranks by state."""
        return count_states(known.liveness for known in self._peers.values())

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def __getitem__(self, peer: PeerId) -> DecodePeer:
        return self._peers[peer]

    def find(self, peer: PeerId) -> DecodePeer | None:
        """Find a connected decode rank; None if it is not connected."""
        return self._peers.get(peer)

    def at(self, connection: bytes) -> DecodePeer | None:
        """Return the decode rank of a connection; None if no handshake was done over it."""
        peer = self._by_connection.get(connection)
        return None if peer is None else self._peers[peer]

    def other_incarnation(self, peer: PeerId) -> DecodePeer | None:
        """Find another connected incarnation of the same rank; there is at most one."""
        other = self._by_rank.get(peer.rank)
        return None if other is None or other == peer else self._peers[other]

    def has_place(self, peer: PeerId, kept: Kept) -> bool:
        """Return whether the Hello of a decode rank can be stored within the share of its principal."""
        taker = self._shares.taker_of(peer)
        taker = kept.taker if taker is None else taker
        return self._shares.has_place(taker, 1, peer) and self._bytes.has_place(taker, kept.num_bytes, peer)

    def taker(self, peer: PeerId) -> str:
        """Return the principal to whose share the requests of a connected decode rank count."""
        return self._peers[peer].kept.taker

    def put_newcomer(self, former: DecodePeer, newcomer: Newcomer | None) -> bool:
        """Store the Hello of another incarnation, or none; return whether it fits the share."""
        before, num_bytes = (0 if one is None else one.kept.num_bytes for one in (former.newcomer, newcomer))
        has_place = self._bytes.has_place(former.kept.taker, max(num_bytes - before, 0))
        former.newcomer = newcomer if has_place else None
        self._weigh(former.id)
        return has_place

    def _weigh(self, peer: PeerId) -> None:
        """Recount what is stored for a decode rank, to the share of the principal that it was admitted with."""
        known, checking = self._peers.get(peer), self._checking.get(peer)
        kept = [one.kept for one in (known, checking) if one is not None]
        if not kept:
            self._shares.release(peer)
            self._bytes.release(peer)
            return
        num_bytes = max(one.num_bytes for one in kept)
        if known is not None and known.newcomer is not None:
            num_bytes += known.newcomer.kept.num_bytes
        self._shares.hold(peer, kept[0].taker, 1)
        self._bytes.hold(peer, kept[0].taker, num_bytes)

    def send(self, peer: PeerId, message: Message) -> list[PrefillEffect]:
        """Send to a decode rank if it is connected; lost messages are retransmitted if they matter."""
        known = self._peers.get(peer)
        return [] if known is None else [Reply(known.connection, message)]

    def is_outdated(self, connection: bytes, hello: Hello) -> bool:
        """Return whether a later Hello is known, or this one is already being checked."""
        known = self._peers.get(hello.peer)
        latest = known.attempt if known is not None else -1
        checking = self._checking.get(hello.peer)
        if hello.attempt < latest or (checking is not None and hello.attempt < checking.attempt):
            return True
        return checking is not None and checking[:2] == (hello.attempt, connection)

    def why_over(self, peer: PeerId) -> str | None:
        """Return why an incarnation must not reconnect: it has sent Goodbye, or was replaced, for example; else None.

        Writes to it are no longer tracked: its slots are forgotten, and its pages stay in quarantine.
        """
        return self._over.get(peer)

    def mark_ended(self, peer: PeerId, why: str) -> None:
        """Note that an incarnation is over, and must not reconnect."""
        self.forget_handshake(peer)
        self._over[peer] = why
        while len(self._over) > MAX_DISCONNECTED:
            self._over.popitem(last=False)

    def forget_handshake(self, peer: PeerId) -> None:
        """Forget the unanswered Hellos of an incarnation."""
        self._stop_checking(peer)
        other = self.other_incarnation(peer)
        if other is not None and other.newcomer is not None and other.newcomer.hello.peer == peer:
            self.put_newcomer(other, None)

    def claimant(self, connection: bytes) -> PeerId | None:
        """Return the sender of the Hello on a connection: it is connected, or its Hello is being checked."""
        connected = self._by_connection.get(connection)
        if connected is not None:
            return connected
        return self._checking_at.get(connection)

    def last_at(self, connection: bytes) -> PeerId | None:
        """Return the decode rank that a message over a connection is for, even if it was disconnected meanwhile."""
        return self.claimant(connection) or self._former_at.get(connection)

    def is_remembered(self, connection: bytes, peer: PeerId) -> bool:
        """Return whether a decode rank has sent a Hello over a connection without being connected over it.

        Its Hello is being checked, or it is disconnected, or it waits until it is known whether another incarnation is
        alive.
        """
        if peer in self._checking and self._checking[peer].connection == connection:
            return True
        if peer in self._peers or peer in self._over:
            return False
        gone = self._disconnected.get(peer.rank)
        if gone is not None and (gone.connection, gone.peer) == (connection, peer):
            return True
        other = self.other_incarnation(peer)
        newcomer = other.newcomer if other is not None else None
        return newcomer is not None and (newcomer.connection, newcomer.hello.peer) == (connection, peer)

    def connections(self) -> dict[bytes, PeerId]:
        """Return every connection over which a decode rank may be reached.

        This includes connections whose Hello is being checked, and those of disconnected ranks that have not sent
        Goodbye.
        """
        found = dict(self._by_connection)
        for peer, check in self._checking.items():
            found.setdefault(check.connection, peer)
        for gone in self._disconnected.values():
            if gone.peer not in self._over and gone.peer not in self._peers:
                found.setdefault(gone.connection, gone.peer)
        return found

    def refused(self, connection: bytes, peer: PeerId) -> None:
        """Update the connection of a disconnected decode rank whose Hello was refused."""
        gone = self._disconnected.get(peer.rank)
        if gone is not None and gone.peer == peer:
            self._disconnected[peer.rank] = gone._replace(connection=connection)

    def is_checking(self, peer: PeerId) -> bool:
        """Return whether a Hello of a decode rank is being checked."""
        return peer in self._checking

    def begin_check(self, connection: bytes, hello: Hello, kept: Kept) -> None:
        """Note that a Hello is being checked."""
        self._stop_checking(hello.peer)
        self._checking[hello.peer] = _Check(hello.attempt, connection, kept)
        self._checking_at[connection] = hello.peer
        self._weigh(hello.peer)

    def end_check(self, connection: bytes, hello: Hello) -> Kept | None:
        """End the check of a Hello; return None if another one has replaced it, or its sender was dropped."""
        checking = self._checking.get(hello.peer)
        if checking is None or checking[:2] != (hello.attempt, connection):
            return None
        self._stop_checking(hello.peer)
        return checking.kept

    def _stop_checking(self, peer: PeerId) -> None:
        checking = self._checking.pop(peer, None)
        if checking is not None:
            self._checking_at.pop(checking.connection, None)
            self._weigh(peer)

    def wants_other_cells(self, hello: Hello) -> bool:
        """Return whether a connected decode rank asks for different cells than before."""
        known = self._peers.get(hello.peer)
        return known is not None and (known.link.slices != hello.route.slices or known.link.layout != hello.layout)

    def admit(self, connection: bytes, hello: Hello, link: PeerRoute, kept: Kept, now: float) -> None:
        """Admit a decode rank, or update one that is connected. Its earlier generations stay known.

        This also holds for a disconnected incarnation that reconnects: it cannot grant again under a generation that it
        has used.
        """
        known = self._peers.get(hello.peer)
        if known is None:
            before = self._disconnected.get(hello.peer.rank)
            if before is not None and before.peer != hello.peer:
                before = None
            known = self._peers[hello.peer] = DecodePeer(hello.peer, self._timers, kept, before)
            self._by_rank[hello.peer.rank] = hello.peer
        known.kept = known.kept._replace(num_bytes=kept.num_bytes)
        self._weigh(hello.peer)
        self._by_connection.pop(known.connection, None)
        known.connection, known.attempt, known.link = connection, hello.attempt, link
        self._by_connection[connection] = hello.peer
        known.liveness.connected(hello.lease_s, now)

    def heard(self, known: DecodePeer, forgotten: Iterable[PeerId]) -> None:
        """Note that a decode rank has received its Welcome, which ends its earlier incarnations.

        Until then, an earlier incarnation may be the one that is running, and reconnect. `forgotten` are those whose
        writes or slots were tracked until now.
        """
        known.was_heard = True
        gone = self._disconnected.pop(known.id.rank, None)
        former = [*forgotten] if gone is None or gone.peer == known.id else [*forgotten, gone.peer]
        for peer in former:
            self.mark_ended(peer, f"a later incarnation of {peer.rank} has connected")

    def remove(self, peer: PeerId, failure: Failure) -> None:
        """Remove a connected decode rank, whose requests end with `failure`.

        A Hello of it that is being checked no longer counts; the caller disconnects the transport afterwards.
        """
        known = self._peers.pop(peer)
        self._stop_checking(peer)
        del self._by_rank[peer.rank]
        self._weigh(peer)
        known.liveness.left()
        self._by_connection.pop(known.connection, None)
        self._former_at[known.connection] = peer
        if len(self._former_at) > MAX_DISCONNECTED:
            self._former_at.popitem(last=False)
        former = self._disconnected.get(peer.rank)
        if known.was_heard or former is None or former.peer == peer:
            self._disconnected[peer.rank] = _Disconnected(peer, known.connection, known.floor, failure)
            self._disconnected.move_to_end(peer.rank)
        while len(self._disconnected) > MAX_DISCONNECTED:
            self._disconnected.popitem(last=False)

    def close(self, delivery: DeliveryId, failure: Failure | None) -> None:
        """Record how a delivery ended; only the first report counts."""
        known = self._peers.get(delivery.peer)
        if known is not None:
            known.used(delivery.generation)
            known.closed.close(delivery.generation, ClosedGeneration(failure))
