"""The handshake with decode ranks: which Hellos are answered with Welcome, and who may replace a process. Pure."""

from collections.abc import Callable

from kvflow.errors import FailureReason, Stage
from kvflow.state import events as ev
from kvflow.state.drain import DrainState
from kvflow.state.effects import CheckHello, CountAnomaly, DisconnectTransport, LogEvent, PrefillEffect, Reply
from kvflow.state.prefill.peers import DecodePeer, DecodePeers, Kept, Newcomer
from kvflow.state.prefill.slots import RemoteSlots
from kvflow.state.settings import PrefillSettings
from kvflow.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION, Failure, Hello, PeerId, Ping, Refuse, Welcome

__all__ = ["Handshakes"]


class Handshakes:
    """Admits decode ranks, refuses those that do not match, and settles which of two processes has a rank's name.

    `disconnect` disconnects a decode rank, and returns the effects.
    """

    def __init__(
        self,
        me: PeerId,
        settings: PrefillSettings,
        peers: DecodePeers,
        slots: RemoteSlots,
        leaving: DrainState,
        disconnect: Callable[[PeerId, Failure, float], list[PrefillEffect]],
    ) -> None:
        self._me = me
        self._settings = settings
        self._peers = peers
        self._slots = slots
        self._leaving = leaving
        self._disconnect = disconnect

    def greet(self, connection: bytes, hello: Hello, kept: Kept, now: float) -> list[PrefillEffect]:
        """Check a Hello, answer it again, or refuse it."""
        detail = self._mismatch(connection, hello)
        if detail is not None:
            return self.refuse(connection, hello, detail)
        known = self._peers.find(hello.peer)
        if known is not None and (known.attempt, known.connection) == (hello.attempt, connection):
            return self._welcome(connection, hello)  # the first answer was lost
        if self._peers.is_outdated(connection, hello):
            return []
        other = self._peers.other_incarnation(hello.peer)
        if other is not None:
            return self._ask_whether_it_lives(other, Newcomer(connection, hello, kept), now)
        effects: list[PrefillEffect] = []
        if self._peers.wants_other_cells(hello):
            detail = f"{hello.peer.rank} wants different cells than before"
            failure = Failure(FailureReason.PEER_LOST, Stage.BOOTSTRAP, str(self._me.rank), detail)
            effects = self._disconnect(hello.peer, failure, now)
        if not self._peers.has_place(hello.peer, kept):
            return [*effects, *self._refuse_for_capacity(connection, hello)]
        self._peers.begin_check(connection, hello, kept)
        return [*effects, CheckHello(connection, hello)]

    def _mismatch(self, connection: bytes, hello: Hello) -> str | None:
        """Return why a Hello cannot be accepted, whatever its route; None if it can."""
        lowest, highest = hello.versions
        claimant = self._peers.claimant(connection)
        layout = self._settings.layout
        if hello.peer == self._me:
            return "Hello names this rank as its sender"
        if hello.to != self._me:
            return f"Hello is for {hello.to}, but this is {self._me}"
        if self._leaving.is_closing:
            return f"{self._me.rank} is closing"
        if claimant not in (None, hello.peer):
            return f"the connection belongs to {claimant}"
        if (over := self._peers.why_over(hello.peer)) is not None:
            return over
        if lowest > PROTOCOL_VERSION or highest < OLDEST_VERSION or lowest > highest:
            own = f"{OLDEST_VERSION}-{PROTOCOL_VERSION}"
            return f"no common protocol version: decode has {lowest}-{highest}, prefill has {own}"
        if hello.backend != self._settings.backend:
            return f"transports differ: decode has {hello.backend!r}, prefill has {self._settings.backend!r}"
        if hello.layout.fingerprint != layout.fingerprint:
            theirs, own = hello.layout.fingerprint, layout.fingerprint
            return f"model fingerprints differ: decode has {theirs!r}, prefill has {own!r}"
        return None

    def finish_check(self, event: ev.HelloChecked, now: float) -> list[PrefillEffect]:
        """Admit a decode rank whose Hello was checked, or refuse it."""
        hello = event.hello
        if self._leaving.is_closing:
            return []
        kept = self._peers.end_check(event.connection, hello)
        if kept is None:
            return self._forget_transport(hello.peer)
        if event.link is None:
            refused = self.refuse(event.connection, hello, event.failure)
            return [*self._forget_transport(hello.peer), *refused]
        other = self._peers.other_incarnation(hello.peer)
        if other is not None:  # it was connected while this one was checked
            newcomer = Newcomer(event.connection, hello, kept)
            return [DisconnectTransport(hello.peer), *self._ask_whether_it_lives(other, newcomer, now)]
        is_new = hello.peer not in self._peers
        self._peers.admit(event.connection, hello, event.link, kept, now)
        self._slots.connected(hello.peer, event.link.staging, now)
        news = [LogEvent("peer_connected", {"peer": str(hello.peer)})] if is_new else []
        return [*news, *self._welcome(event.connection, hello)]

    def _forget_transport(self, peer: PeerId) -> list[PrefillEffect]:
        """Disconnect the transport that a check has connected, unless the peer is still in use."""
        is_used = peer in self._peers or self._peers.is_checking(peer)
        return [] if is_used else [DisconnectTransport(peer)]

    def _welcome(self, connection: bytes, hello: Hello) -> list[PrefillEffect]:
        welcome = Welcome(
            peer=self._me,
            attempt=hello.attempt,
            version=min(PROTOCOL_VERSION, hello.versions[1]),
            domain=self._settings.domain,
            endpoint=self._settings.endpoint,
            max_pages=self._settings.max_pages,
        )
        return [Reply(connection, welcome)]

    def refuse(self, connection: bytes, hello: Hello, detail: str, kind: str = "hello_refused") -> list[PrefillEffect]:
        """Refuse a Hello, counted as `kind`.

        After "hello_denied" the sender is not remembered, because it may be somebody else.
        """
        if hello.to == self._me and kind == "hello_refused":  # else another process sent it
            self._peers.refused(connection, hello.peer)
        refusal = Refuse(peer=self._me, to=hello.peer, detail=detail, attempt=hello.attempt)
        return [CountAnomaly(kind, hello.peer, detail=detail), Reply(connection, refusal)]

    def _refuse_for_capacity(self, connection: bytes, hello: Hello) -> list[PrefillEffect]:
        detail = (
            f"too many decode ranks of {hello.peer.rank.instance}, or too large Hellos: "
            f"{len(self._peers)} decode ranks are connected, limits.peers={self._settings.limits.peers} allows a share"
        )
        return self.refuse(connection, hello, detail)

    def _ask_whether_it_lives(self, former: DecodePeer, newcomer: Newcomer, now: float) -> list[PrefillEffect]:
        """Ping the connected incarnation before another one of the same rank replaces it.

        If its process has ended, its connection is gone, and sending the Ping fails. A running process answers. If its
        host is down, neither happens, and its lease expires. The newcomer repeats its Hello meanwhile.
        """
        if not self._peers.put_newcomer(former, newcomer):
            return self._refuse_for_capacity(newcomer.connection, newcomer.hello)
        former.asked_at = now
        return [Reply(former.connection, Ping(peer=self._me))]

    def refuse_newcomer(self, former: DecodePeer) -> list[PrefillEffect]:
        """Refuse a newcomer, because the incarnation that it would replace has answered; log this once for each."""
        if former.newcomer is None:
            return []
        connection, hello, _ = former.newcomer
        self._peers.put_newcomer(former, None)
        detail = f"another running process has the name {former.id.rank}: {former.id}"
        effects = self.refuse(connection, hello, detail)
        if former.refused != hello.peer:
            former.refused = hello.peer
            values = {"peer": str(former.id), "refused": str(hello.peer)}
            effects.append(LogEvent("rank_name_conflict", values, is_warning=True))
        return effects
