"""Attempts to reach prefill instances: lookups, connections to their ranks, and Hellos. Pure.

An address may come from a client. So lookups at addresses that are not answered take turns (`kvflow.state.turns`), and
hosts have shares. The addresses of ranks come from a directory, which need not be trusted. So the first rank is
connected to, and the others once it has answered. Ranks that have never answered share few places.
"""

from typing import NamedTuple

from kvflow.addresses import split_address
from kvflow.errors import FailureReason, Stage
from kvflow.gate.identity import host_denial
from kvflow.geometry.routes import Route
from kvflow.state.decode.deadlines import DecodeTimer, HelloUnanswered, RetryLookup
from kvflow.state.decode.instances import Instance, InstanceTable, host_of
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.decode.rooms import Rooms
from kvflow.state.effects import DecodeEffect, LookUp
from kvflow.state.events import ConnectedRank, InstanceAddress, InstanceRef, RankRoute
from kvflow.state.settings import DecodeSettings
from kvflow.state.tables import InstanceState
from kvflow.state.timers import Timers
from kvflow.state.turns import Turns
from kvflow.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION, Failure, Hello, PeerId, RankRecord, StagingWindow

__all__ = ["MAX_DIALS", "MAX_LOOKUPS", "TURN_S", "Dialing", "HandshakeContext", "Lookups"]

MAX_DIALS = 64
"""Maximum number of ranks that have been connected to, and have never answered."""

TURN_S = 1.0
"""How long an attempt that is not answered keeps its place when places are short, in seconds."""

MAX_HELLO_PAUSE_S = 1.0
"""Longest pause between retransmitted Hellos, in seconds; the pause doubles up to it."""


class HandshakeContext(NamedTuple):
    """What all parts of the handshake with prefill instances share."""

    me: PeerId
    settings: DecodeSettings
    instances: InstanceTable
    peers: PrefillPeers
    rooms: Rooms
    timers: Timers[DecodeTimer]

    def failure(self, reason: FailureReason, detail: str) -> Failure:
        """Return a failure that this rank was the first to detect."""
        return Failure(reason, Stage.BOOTSTRAP, str(self.me.rank), detail)


class Dialing:
    """Connects to ranks and sends them Hellos. Methods return effects."""

    def __init__(self, context: HandshakeContext) -> None:
        self._me, self._settings, self._instances, self._peers, self._rooms, self._timers = context
        self._first_pause_s = min(self._settings.timeouts.retransmit_s / 4, MAX_HELLO_PAUSE_S)
        self._dials = Turns[PeerId](MAX_DIALS, TURN_S)

    def start(self, instance: Instance, routes: tuple[RankRoute, ...], now: float) -> list[DecodeEffect]:
        """Start to send Hellos to the ranks of an instance. Each rank that is to write gets a window if one is free."""
        effects: list[DecodeEffect] = []
        instance.ranks = {}
        for record, compiled in zip(instance.records, routes, strict=True):
            peer, route, window = record.peer, compiled.route, None
            if route.slices:
                window, searched = self._peers.assign_window(peer)
                effects += searched
            instance.ranks[peer.rank.engine_rank] = ConnectedRank(peer, compiled.expected, route.slices, window)
            instance.hellos[peer] = self._make_hello(peer, instance.attempt, route, window)
        known = sorted(instance.records, key=lambda record: record.peer not in self._peers)  # those need no place
        instance.undialed.update((record.peer, record) for record in known)
        instance.is_proved = any(self._peers.is_connected(peer) for peer in instance.peers)
        return [*effects, *self.go_on(instance, now)]

    def _make_hello(self, peer: PeerId, attempt: int, route: Route, window: StagingWindow | None) -> Hello:
        settings = self._settings
        return Hello(
            peer=self._me,
            to=peer,
            attempt=attempt,
            versions=(OLDEST_VERSION, PROTOCOL_VERSION),
            lease_s=settings.timeouts.lease_s,
            backend=settings.backend,
            backend_metadata=settings.backend_metadata,
            layout=settings.layout,
            route=route,
            staging=window,
            agent=settings.agent,
            handshake_s=settings.timeouts.handshake_s,
        )

    def go_on(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Send Hellos to more ranks: to the first, then to the others, as one of them answers and places permit."""
        effects: list[DecodeEffect] = []
        while instance.undialed and (instance.is_proved or len(instance.undialed) == len(instance.records)):
            peer, record = next(iter(instance.undialed.items()))
            has_place, opened = self.open(record, now)
            effects += opened
            if not has_place:
                break
            del instance.undialed[peer]
            effects += self._say_hello(instance, peer, now, self._first_pause_s)
        return effects

    def denial(self, records: tuple[RankRecord, ...]) -> str:
        """Return why this rank must not connect to an address in a directory's answer; empty if it may."""
        allowed = self._settings.allowed_hosts
        denials = ((record, host_denial(record.endpoint, allowed)) for record in records)
        return next((f"{record.peer.rank} at {record.endpoint}: {why}" for record, why in denials if why), "")

    def open(self, record: RankRecord, now: float) -> tuple[bool, list[DecodeEffect]]:
        """Open a connection to a rank, unless there is one; return whether it has a place."""
        effects: list[DecodeEffect] = []
        if record.peer not in self._peers:
            owners = (split_address("endpoint", record.endpoint)[0], record.peer.rank.instance)
            has_place, loser = self._dials.take_place(record.peer, owners, now)
            if loser is not None:
                effects += self._hang_up(loser, now)
            if not has_place:
                return False, effects
        return True, effects + self._peers.open(record.peer, record.endpoint)

    def repeat(self, instance: Instance, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Send a Hello again, over another connection if the first one failed."""
        pause_s = min(2 * instance.hello_pause_s[peer], MAX_HELLO_PAUSE_S)
        record = next(record for record in instance.records if record.peer == peer)
        return [*self._peers.open(peer, record.endpoint), *self._say_hello(instance, peer, now, pause_s)]

    def answered(self, instance: Instance, peer: PeerId) -> None:
        """Note that a rank has accepted its Hello."""
        del instance.hellos[peer]
        self._timers.clear(HelloUnanswered(peer))
        self.free_place(peer)
        instance.undialed.pop(peer, None)
        instance.is_proved = True

    def free_place(self, peer: PeerId) -> None:
        """Free the place of a rank that has answered."""
        self._dials.end_attempt(peer)

    def forget(self, instance: Instance, now: float, keep: list[PeerId]) -> list[DecodeEffect]:
        """Abandon unanswered Hellos; disconnect unconnected ranks outside `keep`, and reclaim their unused windows."""
        effects: list[DecodeEffect] = []
        for peer in instance.peers:
            self.free_place(peer)
            self._timers.clear(HelloUnanswered(peer))
            if peer not in keep and peer not in self._peers:
                self._peers.windows.take_back_unused(peer)
                effects += self._close(peer, now)
                effects += self._peers.probe(peer)
        instance.hellos.clear()
        instance.obstacles.clear()
        instance.undialed.clear()
        instance.hello_pause_s.clear()
        return effects

    def _hang_up(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Close the connection to a rank that does not answer, to try it again later."""
        instance = self._instances.find_by_peer(peer)
        if instance is not None and peer in instance.hellos:
            instance.undialed[peer] = next(record for record in instance.records if record.peer == peer)
            instance.undialed.move_to_end(peer, last=instance.is_proved)
            self._timers.clear(HelloUnanswered(peer))
        return self._close(peer, now)

    def _close(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        return self._peers.close_unless_awaited(peer, now, is_awaited=self._rooms.await_proof_of(peer))

    def _say_hello(self, instance: Instance, peer: PeerId, now: float, pause_s: float) -> list[DecodeEffect]:
        instance.hello_pause_s[peer] = pause_s
        self._timers.set(HelloUnanswered(peer), now + pause_s)
        return self._peers.send(peer, instance.hellos[peer])


LOOK_AGAIN_S = 0.25
"""Interval between lookups during a handshake, in seconds: ranks may restart meanwhile."""

MAX_LOOKUPS = 64
"""Maximum number of unanswered lookups at addresses: each takes a socket, and any request may name a new one."""


class Lookups:
    """Asks the directory for instances under a `number`, and sets the timers after which it is asked again."""

    def __init__(self, timers: Timers[DecodeTimer]) -> None:
        self.number = 0
        self._timers = timers
        self._turns = Turns[InstanceRef](MAX_LOOKUPS, TURN_S)

    def expect_newer(self) -> None:
        """Give further lookups a higher number: only their answers are newer than a ticket that has just come."""
        self.number += 1

    def begin(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Look an instance up anew, and again later."""
        instance.found = None
        return self.repeat(instance, now)

    def repeat(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Look an instance up again, and once more later."""
        self.postpone(instance, now + LOOK_AGAIN_S)
        return self.ask(instance, now)

    def ask(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Look up each reference that rooms wait on, if it is its turn."""
        return [LookUp(ref, self.number) for ref in instance.refs_waiting if self._may_ask(instance, ref, now)]

    def ask_later(self, instance: Instance, now: float) -> None:
        """Let an instance be looked up later, unless that is planned."""
        self._timers.set_once(RetryLookup(instance.number), now + LOOK_AGAIN_S)

    def postpone(self, instance: Instance, when: float) -> None:
        """Let an instance be looked up not before `when`."""
        self._timers.set(RetryLookup(instance.number), when)

    def is_planned(self, instance: Instance) -> bool:
        """Return whether an instance will be looked up again."""
        return RetryLookup(instance.number) in self._timers

    def stop(self, instance: Instance) -> None:
        """Look an instance up no more."""
        self._timers.clear(RetryLookup(instance.number))

    def note_answer(self, ref: InstanceRef) -> None:
        """Free the place of a lookup that was answered, or is not wanted any more."""
        self._turns.end_attempt(ref)

    def _may_ask(self, instance: Instance, ref: InstanceRef, now: float) -> bool:
        if not isinstance(ref, InstanceAddress) or instance.state is InstanceState.CONNECTED:
            return True
        return self._turns.take_place(ref, (host_of(ref),), now)[0]
