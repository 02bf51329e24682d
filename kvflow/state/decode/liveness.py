"""What a decode rank does when a prefill rank may have ended: doubts, leases, goodbyes, and proofs. Pure."""

from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.decode.handshake import Instances
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.decode.rooms import Rooms
from kvflow.state.effects import CountAnomaly, DecodeEffect
from kvflow.state.peers import log_loss
from kvflow.wire.messages import Failure, Goodbye, PeerId, Refuse

__all__ = ["PrefillLiveness"]


class PrefillLiveness:
    """Decides which prefill ranks live, and tells those who deal with them."""

    def __init__(self, me: PeerId, peers: PrefillPeers, rooms: Rooms, instances: Instances) -> None:
        self._me = me
        self._peers = peers
        self._rooms = rooms
        self._instances = instances

    def replace_others(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Give up earlier incarnations of a rank that has accepted a Hello, and earlier owners of its address."""
        effects: list[DecodeEffect] = []
        for other in self._peers.at_endpoint(peer):
            effects += self._process_ended(other, now)
        for other in self._peers.of_rank(peer):
            failure = self._failure(FailureReason.PEER_LOST, f"{other.rank} has restarted")
            effects += [*self._left(other, failure, now), *self._peers.probe(other)]
        return effects

    def refused(self, peer: PeerId, refuse: Refuse, now: float) -> list[DecodeEffect]:
        """Handle a message that a rank, or whoever is where it was, does not accept."""
        if refuse.peer != peer:  # another process answers at its port, or at its address in a directory
            is_its_port = self._peers.is_where_it_listens(peer)
            ended = self._process_ended(peer, now) if is_its_port else self._is_not_there(peer, now)
            return [*ended, *self._peers.close(peer)]
        if refuse.attempt is not None:
            return self._instances.refused(peer, refuse, now)
        if refuse.to not in (None, self._me) or peer not in self._peers:
            return []
        if self._instances.is_handshaking(peer):  # it answers a message sent before the Hello
            return []
        detail = f"{peer.rank} no longer knows this rank: {refuse.detail}"
        return self._left(peer, self._failure(FailureReason.PEER_LOST, detail), now)

    def said_goodbye(self, peer: PeerId, goodbye: Goodbye, now: float) -> list[DecodeEffect]:
        """Give up a rank that is closing; nothing follows its Goodbye."""
        failure = goodbye.failure or self._failure(FailureReason.PEER_CLOSED, f"{peer.rank} is closing")
        self._peers.said_goodbye(peer)
        effects = self.fenced(peer, now, failure) if goodbye.fenced else []
        effects += self._over(peer, failure, now)
        if not goodbye.fenced:  # its process may end soon, which is a proof for some transports
            effects += self._peers.probe(peer)
        return [*effects, *self._peers.close(peer)]

    def connect_failed(self, event: ev.ConnectFailed) -> list[DecodeEffect]:
        """Note why a rank cannot be connected. The handshake goes on until its deadline."""
        self._instances.obstacles.note_obstacle(event)
        self._peers.open_failed(event.peer)
        return [] if event.is_short else [CountAnomaly("connect_failed", event.peer, detail=event.detail)]

    def doubt_ranks(self, instance: str, now: float) -> list[DecodeEffect]:
        """Treat the ranks of a doubted instance as if their connections had broken: those that are well answer soon."""
        connected = [peer for peer in self._instances.peers_of(instance) if self._peers.is_connected(peer)]
        return [effect for peer in connected for effect in self.connection_lost(peer, now)]

    def connection_lost(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Probe a rank whose connection broke, and send it nothing new until it is heard from."""
        known = self._peers.find(peer)
        if known is None:
            if not self._instances.is_handshaking(peer):
                return []
            self._peers.broke_early(peer)
            return self._instances.suspect(peer, now)
        known.disconnected()
        return [*self.ask_whether_it_lives(peer, now), *self._instances.suspect(peer, now)]

    def ask_whether_it_lives(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Probe a rank's address, and ping it."""
        return [*self._peers.probe(peer), *self.ping_rank(peer, now)]

    def ping_rank(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Ping a rank, and ask it for the ends of its connections if pages wait for a proof."""
        return self._peers.ping(peer, now, asks_ends=bool(self._rooms.unproved))

    def connection_refused(self, peer: PeerId, detail: str, now: float) -> list[DecodeEffect]:
        """Give up a rank because one side refuses the other's key."""
        counted = CountAnomaly("connection_refused", peer, detail=detail)
        if peer not in self._peers:
            return [counted, *self._instances.connection_refused(peer, detail, now)]
        return [counted, *self._left(peer, self._failure(FailureReason.REFUSED, f"{peer.rank}: {detail}"), now)]

    def probe_finished(self, event: ev.ProbeFinished, now: float) -> list[DecodeEffect]:
        """Act on the answer of a rank's address."""
        effects = self._peers.probe_finished(event.peer, now, is_gone=event.is_gone)
        return self._process_ended(event.peer, now) if event.is_gone else effects

    def _process_ended(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Act on the proof that the process of a rank has ended."""
        failure = self._failure(FailureReason.PEER_LOST, f"the process of {peer.rank} has ended")
        is_fenced, effects = self._peers.ended(peer, now)
        if is_fenced:
            effects += self.fenced(peer, now, failure)
        return [*effects, *self._over(peer, failure, now), *self._close_unless_awaited(peer, now)]

    def _is_not_there(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Give up an incarnation that is not at its listed address. This is no proof: directories may lie."""
        self._peers.said_goodbye(peer)
        failure = self._failure(FailureReason.PEER_LOST, f"somebody else answers where {peer.rank} was listed")
        return self._over(peer, failure, now)

    def _over(self, peer: PeerId, failure: Failure, now: float) -> list[DecodeEffect]:
        """Give up an incarnation that is over, whether connected or in the handshake."""
        if peer in self._peers:
            return self._left(peer, failure, now)
        return self._instances.lost(peer, now) if self._instances.is_handshaking(peer) else []

    def fenced(self, peer: PeerId, now: float, failure: Failure | None = None) -> list[DecodeEffect]:
        """Act on the proof that no write of an incarnation can land any more."""
        failure = failure or self._failure(FailureReason.PEER_LOST, f"the process of {peer.rank} has ended")
        effects = self._rooms.peer_fenced(peer, failure, now)
        self._peers.fenced(peer)
        self._peers.windows.reclaim(self._rooms.scatter_from)
        return [*effects, *(self._close_unless_awaited(peer, now) if self._peers.has_ended(peer) else [])]

    def _close_unless_awaited(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        return self._peers.close_unless_awaited(peer, now, is_awaited=self._rooms.await_proof_of(peer))

    def _left(self, peer: PeerId, failure: Failure, now: float) -> list[DecodeEffect]:
        """Give up a connected rank, and all that was wanted from it."""
        if not self._peers.left(peer):
            return []
        return [
            log_loss("peer_disconnected", peer, failure),
            *self._instances.offers.peer_lost(peer, failure),
            *self._rooms.peer_lost(peer, failure, now),
            *self._instances.lost(peer, now),
            *self._close_unless_awaited(peer, now),
        ]

    def check_lease(self, peer: PeerId, now: float, late_s: float) -> list[DecodeEffect]:
        """Declare a rank lost after it was silent for a whole lease."""
        known = self._peers.find(peer)
        if known is None or not known.check(now, late_s):
            return []
        self._peers.lost(peer, now)
        failure = self._failure(FailureReason.PEER_LOST, f"{peer.rank} was silent for {known.lease_s} s")
        return [
            log_loss("peer_lost", peer, failure),
            *self._instances.offers.peer_lost(peer, failure),
            *self._rooms.peer_lost(peer, failure, now),
            *self._instances.lost(peer, now),
        ]

    def forget_if_unused(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Forget a rank that stayed silent, or close its connection, unless a transfer still waits for its proof."""
        if peer not in self._peers and self._instances.is_handshaking(peer):  # the connection is in use again
            return []
        if peer not in self._peers and self._peers.has_ended(peer):  # its last messages have arrived or never will
            return self._peers.close(peer)
        if self._rooms.involve(peer):
            self._peers.lost(peer, now)
            return []
        failure = self._failure(FailureReason.PEER_LOST, f"{peer.rank} stayed silent")
        return [*self._left(peer, failure, now), *self._close_unless_awaited(peer, now)]

    def _failure(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.BOOTSTRAP, str(self._me.rank), detail)
