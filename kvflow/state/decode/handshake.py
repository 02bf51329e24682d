"""From the name of a prefill instance to ranks that take grants, and back again when one of them is lost. Pure.

An instance is looked up in the directory, routes from its ranks are compiled, and each rank is sent a Hello. Rooms wait
for that, for `handshake_s` at most. When the time is up, they fail, and further rooms fail at once, but the handshake
goes on for as long as somebody asks for the instance: it is the control channel that shows when the instance is back,
not the outcome of a room.

A room that fails before it was granted is declined: the instance is told, as soon as it can be and until each of its
ranks has answered, not to hold its pages.
"""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import msgspec

from kvflow.errors import FailureReason, Stage
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.decode.room import Room
from kvflow.state.decode.rooms import Rooms
from kvflow.state.effects import CompileRoutes, DecodeEffect, LogEvent, LookUp
from kvflow.state.events import ConnectedRank, InstanceFound, ReceiveOpened, RoutesCompiled
from kvflow.state.settings import DecodeSettings
from kvflow.state.tables import INSTANCE, InstanceSignal, InstanceState
from kvflow.state.timers import Timers
from kvflow.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Decline,
    Drained,
    Failure,
    Hello,
    PeerId,
    RankRecord,
    Refuse,
    Welcome,
)

__all__ = ["Instances"]

LOOK_AGAIN_S = 0.25
"""How often the directory is asked while a handshake is going on: ranks may restart meanwhile."""

REFUSED_PAUSE_S = 2.0
"""After a refusal, which is not likely to change soon."""

MAX_HELLO_PAUSE_S = 1.0
"""Hellos are retransmitted less and less often, down to this."""

UNWANTED_S = 30.0
"""An instance that cannot be reached is looked for so long after it was asked for last."""

MAX_DECLINED = 4_096
"""Rooms of one instance that it has yet to be told of."""

MAX_BACKOFF = 8
"""Declines are retransmitted less and less often, down to this many times the first pause."""


class LookAgain(msgspec.Struct, frozen=True):
    """Timer: ask the directory again."""

    instance: str


class HandshakeDeadline(msgspec.Struct, frozen=True):
    """Timer: rooms have waited long enough for the handshake."""

    instance: str


class HelloUnanswered(msgspec.Struct, frozen=True):
    """Timer: a rank should have answered its Hello."""

    peer: PeerId


class DeclineUnanswered(msgspec.Struct, frozen=True):
    """Timer: every rank of an instance should have answered what was declined."""

    instance: str


class _Declined(NamedTuple):
    """A room that was declined, and the ranks that know it."""

    generation: int
    failure: Failure
    answered: dict[PeerId, None]


class _Instance:
    """One prefill instance.

    Attributes:
        records: Its ranks, as the directory knows them.
        hellos: Those that are not answered.
        ranks: Those that have answered, by engine rank.
        waiting: Rooms that wait for the handshake, by generation.
        failure: Why it cannot be reached; None while rooms may wait for it.
        declined: Rooms that it has yet to be told of, or to answer.
        num_declines: How often they were retransmitted since it was connected, or since all was answered.
        wanted_at: When it was asked for last.
        found: The directory's last answer since the handshake began.
    """

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.state = InstanceState.LOOKING_UP
        self.attempt = -1
        self.records: tuple[RankRecord, ...] = ()
        self.hellos: dict[PeerId, Hello] = {}
        self.hello_pause_s: dict[PeerId, float] = {}
        self.ranks: dict[int, ConnectedRank] = {}
        self.waiting: dict[int, Room] = {}
        self.failure: Failure | None = None
        self.declined: OrderedDict[int, _Declined] = OrderedDict()
        self.num_declines = 0
        self.wanted_at = now
        self.refused_at = 0.0
        self.found: InstanceFound | None = None

    def apply(self, signal: InstanceSignal) -> None:
        self.state = INSTANCE[self.state, signal]

    @property
    def peers(self) -> list[PeerId]:
        return [record.peer for record in self.records]


class Instances:
    """Prefill instances, and how far the handshake with each is; every method returns what is to be done."""

    def __init__(
        self, me: PeerId, settings: DecodeSettings, peers: PrefillPeers, rooms: Rooms, timers: Timers[Hashable]
    ) -> None:
        self._me = me
        self._settings = settings
        self._timeouts = settings.timeouts
        self._peers = peers
        self._rooms = rooms
        self._timers = timers
        self._instances: dict[str, _Instance] = {}
        self._attempts = itertools.count()

    # What rooms want -------------------------------------------------------------------------------------------------

    def want(self, room: Room, now: float) -> list[DecodeEffect]:
        """Grant a room if its instance is connected, else let it wait, or fail it if the instance cannot be reached."""
        name = room.opened.instance
        effects = self.reconnect(name, now)
        instance = self._instances[name]
        instance.declined.pop(room.room, None)
        if self._is_ready(instance):
            return [*effects, *self._rooms.grant(room, self._ranks(instance), now)]
        if instance.failure is not None:
            detail = f"{name} could not be reached and is being tried again: {instance.failure.detail}"
            return [*effects, *self._rooms.fail(room, self._failure(FailureReason.PEER_FAILING, detail), now)]
        instance.waiting[room.generation] = room
        self._timers.set_once(HandshakeDeadline(name), now + self._timeouts.handshake_s)
        return effects

    def reconnect(self, name: str, now: float) -> list[DecodeEffect]:
        """See to it that an instance is connected."""
        instance = self._instances.get(name)
        if instance is None:
            instance = self._instances[name] = _Instance(name, now)
            return self._look_up(instance, now)
        instance.wanted_at = now
        return []

    def decline(self, opened: ReceiveOpened, failure: Failure, now: float) -> list[DecodeEffect]:
        """Decline a room that was never granted, now or as soon as its instance is connected."""
        instance = self._instances.get(opened.instance)
        if instance is None:
            return []
        instance.waiting.pop(opened.generation, None)
        instance.declined[opened.room] = declined = _Declined(opened.generation, failure, {})
        while len(instance.declined) > MAX_DECLINED:
            instance.declined.popitem(last=False)
        if not self._is_ready(instance):
            return []
        self._timers.set_once(DeclineUnanswered(instance.name), now + self._timeouts.retransmit_s)
        return self._decline(instance, opened.room, declined)

    # What the directory and the compiler say -------------------------------------------------------------------------

    def found(self, event: InstanceFound, now: float) -> list[DecodeEffect]:
        """Begin the handshake with the ranks that the directory knows, if they are others than before."""
        instance = self._instances.get(event.instance)
        if instance is None:
            return []
        instance.found = event
        if not _is_complete(event.records):
            return []
        if self._is_ready(instance):  # an answer that comes late
            return []
        if any(self._peers.has_ended(record.peer) for record in event.records):  # its lease is not over yet
            return []
        is_same = [record.peer for record in event.records] == instance.peers
        if is_same and instance.state is not InstanceState.LOOKING_UP:
            return []
        if instance.state is InstanceState.LOOKING_UP and self._is_paused(instance, now):
            return []
        effects = self._forget_hellos(instance, now, keep=[record.peer for record in event.records])
        instance.records, instance.attempt = event.records, next(self._attempts)
        instance.apply(InstanceSignal.FOUND)
        self._timers.set_once(LookAgain(instance.name), now + LOOK_AGAIN_S)
        return [*effects, CompileRoutes(instance.name, instance.attempt, event.records)]

    def compiled(self, event: RoutesCompiled, now: float) -> list[DecodeEffect]:
        """Say hello to every rank."""
        instance = self._instances.get(event.instance)
        if instance is None or event.attempt != instance.attempt or instance.state is not InstanceState.COMPILING:
            return []
        if len(event.routes) != len(instance.records):
            return self._refused(instance, event.failure, now)
        instance.apply(InstanceSignal.COMPILED)
        instance.ranks = {}
        effects: list[DecodeEffect] = []
        for record, compiled in zip(instance.records, event.routes, strict=True):
            peer, window = record.peer, None
            effects += self._peers.open(peer, record.endpoint)
            if compiled.route.slices:
                window, searched = self._peers.assign_window(peer)
                effects += searched
            instance.ranks[peer.rank.engine_rank] = ConnectedRank(
                peer, compiled.expected, compiled.route.slices, window
            )
            instance.hellos[peer] = Hello(
                peer=self._me,
                to=peer,
                attempt=instance.attempt,
                versions=(OLDEST_VERSION, PROTOCOL_VERSION),
                lease_s=self._timeouts.lease_s,
                backend=self._settings.backend,
                backend_metadata=self._settings.backend_metadata,
                layout=self._settings.layout,
                route=compiled.route,
                staging=window,
                agent=self._settings.agent,
            )
            effects += self._say_hello(instance, peer, now, min(self._timeouts.retransmit_s / 4, MAX_HELLO_PAUSE_S))
        return effects

    # What prefill ranks say ------------------------------------------------------------------------------------------

    def welcomed(self, peer: PeerId, welcome: Welcome, now: float) -> list[DecodeEffect]:
        """Note that a rank has accepted a Hello: from now on it is pinged. When all have, rooms are granted."""
        if not self.expects_answer(peer, welcome.attempt):  # whoever it has replaced was a rank of its own instance
            return []
        instance = self._instances[peer.rank.instance]
        del instance.hellos[peer]
        self._timers.clear(HelloUnanswered(peer))
        is_new = self._peers.handshake_done(peer, now)
        effects: list[DecodeEffect] = [LogEvent("peer_connected", {"peer": str(peer)})] if is_new else []
        effects += self._rooms.peer_connected(instance.ranks[peer.rank.engine_rank])
        return effects if instance.hellos else [*effects, *self._connected(instance, now)]

    def refused(self, peer: PeerId, refuse: Refuse, now: float) -> list[DecodeEffect]:
        """Note that a rank has refused a Hello; a refusal of an earlier one says nothing."""
        if refuse.attempt is None or not self.expects_answer(peer, refuse.attempt):
            return []
        instance = self._instances[peer.rank.instance]
        return self._refused(instance, f"{peer.rank} refused: {refuse.detail}", now)

    def back(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Grant what waits, if a rank that is heard again was all that was missing."""
        instance = self._instances.get(peer.rank.instance)
        return self._serve(instance, now) if instance is not None and self._is_ready(instance) else []

    def suspect(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Look a rank up again whose connection broke: perhaps it has restarted."""
        instance = self._instances.get(peer.rank.instance)
        if instance is None:
            return []
        self._timers.set(LookAgain(instance.name), now + LOOK_AGAIN_S)
        return [LookUp(instance.name)]

    def lost(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Begin anew with an instance of which a rank is lost."""
        instance = self._instances.get(peer.rank.instance)
        if instance is None or peer not in instance.peers:
            return []
        effects = self._forget_hellos(instance, now, keep=[other for other in instance.peers if other != peer])
        instance.apply(InstanceSignal.LOST)
        return [*effects, *self._look_up(instance, now)]

    def decline_answered(self, peer: PeerId, drained: Drained) -> None:
        """Note that a rank knows of a room that was declined, if that is what it answers."""
        instance = self._instances.get(peer.rank.instance)
        declined = instance.declined.get(drained.room) if instance is not None else None
        if instance is None or declined is None or declined.generation != drained.generation:
            return
        declined.answered[peer] = None
        if all(other in declined.answered for other in instance.peers):
            del instance.declined[drained.room]
        if not instance.declined:
            instance.num_declines = 0
            self._timers.clear(DeclineUnanswered(instance.name))

    @property
    def waiting(self) -> list[Room]:
        """Every room that waits for its instance."""
        return [room for instance in self._instances.values() for room in instance.waiting.values()]

    def is_waiting(self, room: Room) -> bool:
        """Say whether a room waits for its instance."""
        instance = self._instances.get(room.opened.instance)
        return instance is not None and room.generation in instance.waiting

    def is_handshaking(self, peer: PeerId) -> bool:
        """Say whether a rank was sent a Hello that it has not answered."""
        instance = self._instances.get(peer.rank.instance)
        return instance is not None and peer in instance.hellos

    def expects_answer(self, peer: PeerId, attempt: int) -> bool:
        """Say whether a rank was sent this Hello, and not a later one, and has not answered it."""
        return self.is_handshaking(peer) and attempt == self._instances[peer.rank.instance].attempt

    # Timers ----------------------------------------------------------------------------------------------------------

    def expired(self, key: Hashable, now: float) -> list[DecodeEffect]:
        """Do what a timer that is due is for."""
        match key:
            case LookAgain(name):
                return self._look_again(self._instances[name], now)
            case DeclineUnanswered(name):
                instance = self._instances[name]
                if not self._is_ready(instance):
                    return []
                instance.num_declines += 1
                return self._send_declined(instance, now)
            case HandshakeDeadline(name):
                instance = self._instances[name]
                detail = f"{name} was not reached within {self._timeouts.handshake_s} s: {self._obstacle(instance)}"
                return self._give_up(instance, self._failure(FailureReason.UNREACHABLE, detail), now)
            case HelloUnanswered(peer):
                instance = self._instances[peer.rank.instance]
                pause_s = min(2 * instance.hello_pause_s[peer], MAX_HELLO_PAUSE_S)
                record = next(record for record in instance.records if record.peer == peer)
                opened = self._peers.open(peer, record.endpoint)  # again, if that failed before
                return [*opened, *self._say_hello(instance, peer, now, pause_s)]
        return []

    # -----------------------------------------------------------------------------------------------------------------

    def _look_up(self, instance: _Instance, now: float) -> list[DecodeEffect]:
        instance.found = None
        self._timers.set(LookAgain(instance.name), now + LOOK_AGAIN_S)
        return [LookUp(instance.name)]

    def _look_again(self, instance: _Instance, now: float) -> list[DecodeEffect]:
        """Ask the directory again while the handshake is going on and somebody wants it, or a rank is suspect."""
        if self._is_ready(instance):
            return []
        is_wanted = instance.waiting or any(self._rooms.involve(peer) for peer in instance.peers)
        if not is_wanted and now >= instance.wanted_at + UNWANTED_S:
            return self._forget(instance, now)
        self._timers.set(LookAgain(instance.name), now + LOOK_AGAIN_S)
        return [LookUp(instance.name)]

    def _forget(self, instance: _Instance, now: float) -> list[DecodeEffect]:
        effects = self._forget_hellos(instance, now, keep=[])
        self._timers.clear(LookAgain(instance.name))
        self._timers.clear(HandshakeDeadline(instance.name))
        self._timers.clear(DeclineUnanswered(instance.name))
        del self._instances[instance.name]
        return effects

    def _say_hello(self, instance: _Instance, peer: PeerId, now: float, pause_s: float) -> list[DecodeEffect]:
        instance.hello_pause_s[peer] = pause_s
        self._timers.set(HelloUnanswered(peer), now + pause_s)
        return self._peers.send(peer, instance.hellos[peer])

    def _connected(self, instance: _Instance, now: float) -> list[DecodeEffect]:
        """Serve what waits, unless the connection to a rank that has accepted its Hello broke meanwhile."""
        instance.apply(InstanceSignal.CONNECTED)
        if not self._is_ready(instance):
            return []
        self._timers.clear(LookAgain(instance.name))
        return self._serve(instance, now)

    def _serve(self, instance: _Instance, now: float) -> list[DecodeEffect]:
        """Grant every room that waits, and decline those that were given up meanwhile."""
        self._timers.clear(HandshakeDeadline(instance.name))
        instance.failure = None
        instance.num_declines = 0
        effects = self._send_declined(instance, now)
        waiting, instance.waiting = instance.waiting, {}
        for room in waiting.values():
            effects += self._rooms.grant(room, self._ranks(instance), now)
        return effects

    def _send_declined(self, instance: _Instance, now: float) -> list[DecodeEffect]:
        """Decline what ranks have not answered, now and again later."""
        if not instance.declined:
            return []
        times = min(2**instance.num_declines, MAX_BACKOFF)
        self._timers.set(DeclineUnanswered(instance.name), now + times * self._timeouts.retransmit_s)
        return [
            effect for room, declined in instance.declined.items() for effect in self._decline(instance, room, declined)
        ]

    def _decline(self, instance: _Instance, room: int, declined: _Declined) -> list[DecodeEffect]:
        message = Decline(room=room, generation=declined.generation, failure=declined.failure)
        unanswered = [peer for peer in instance.peers if peer not in declined.answered]
        return [effect for peer in unanswered for effect in self._peers.send(peer, message)]

    def _refused(self, instance: _Instance, detail: str, now: float) -> list[DecodeEffect]:
        effects = self._forget_hellos(instance, now, keep=[])
        instance.apply(InstanceSignal.REFUSED)
        self._timers.set(LookAgain(instance.name), now + REFUSED_PAUSE_S)
        return [*effects, *self._give_up(instance, self._failure(FailureReason.REFUSED, detail), now)]

    def _is_paused(self, instance: _Instance, now: float) -> bool:
        """Say whether an instance has refused just now; answers to earlier lookups may still come."""
        is_refused = instance.failure is not None and instance.failure.reason is FailureReason.REFUSED
        return is_refused and now < instance.refused_at + REFUSED_PAUSE_S

    def _give_up(self, instance: _Instance, failure: Failure, now: float) -> list[DecodeEffect]:
        """Fail every room that waits, and those to come, until the instance is connected."""
        self._timers.clear(HandshakeDeadline(instance.name))
        is_news = instance.failure is None
        instance.failure = failure
        instance.refused_at = now
        effects: list[DecodeEffect] = []
        for room in list(instance.waiting.values()):
            effects += self._rooms.fail(room, failure, now)
        instance.waiting.clear()
        for peer in instance.hellos:  # it has a staging window, which it gives back if its process has ended
            if peer not in self._peers:
                effects += self._peers.probe(peer)
        if is_news:
            values = {"prefill": instance.name, "reason": failure.reason.value, "detail": failure.detail}
            effects.append(LogEvent("instance_unreachable", values, is_warning=True))
        return effects

    def _forget_hellos(self, instance: _Instance, now: float, keep: list[PeerId]) -> list[DecodeEffect]:
        """Give the handshake with ranks up that are not connected. Those that never were give their windows back."""
        effects: list[DecodeEffect] = []
        for peer in instance.peers:
            self._timers.clear(HelloUnanswered(peer))
            if peer not in keep and peer not in self._peers:
                self._peers.windows.take_back_unused(peer)
                is_awaited = self._rooms.await_proof_of(peer)
                effects += self._peers.close_unless_awaited(peer, now, is_awaited=is_awaited)
                effects += self._peers.probe(peer)
        instance.hellos.clear()
        instance.hello_pause_s.clear()
        return effects

    def _obstacle(self, instance: _Instance) -> str:
        """Say what the rooms of an instance wait for."""
        if instance.state is InstanceState.COMPILING:
            return "routes are being compiled"
        if instance.state is not InstanceState.LOOKING_UP:
            return next(self._silent(instance), "a rank is about to be connected")
        if instance.found is None:
            return "registry does not answer"
        ended = [str(record.peer.rank) for record in instance.found.records if self._peers.has_ended(record.peer)]
        if ended:
            return f"processes have ended whose records are still registered: {', '.join(ended)}"
        if not instance.found.records:
            return "none of its ranks is registered"
        registered = [record.peer.rank.engine_rank for record in instance.found.records]
        needed = instance.found.records[0].num_ranks
        return f"not all ranks are registered: registered={registered} needed={needed}"

    def _silent(self, instance: _Instance) -> Iterator[str]:
        """Say of each rank that holds up the rooms of an instance why it does."""
        for record in instance.records:
            who = f"rank {record.peer.rank} at {record.endpoint}"
            if record.peer in instance.hellos:
                yield f"{who} does not answer"
            elif not self._peers.is_connected(record.peer):
                yield f"{who} was not heard since its connection broke"

    def _ranks(self, instance: _Instance) -> tuple[ConnectedRank, ...]:
        return tuple(instance.ranks.values())

    def _is_ready(self, instance: _Instance) -> bool:
        is_connected = instance.state is InstanceState.CONNECTED
        return is_connected and all(self._peers.is_connected(peer) for peer in instance.peers)

    def _failure(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.BOOTSTRAP, str(self._me.rank), detail)


def _is_complete(records: tuple[RankRecord, ...]) -> bool:
    """Every rank of an instance is there, in order; `num_ranks` is a claim, so nothing of that size is made."""
    is_whole = bool(records) and len(records) == records[0].num_ranks
    return is_whole and all(record.peer.rank.engine_rank == rank for rank, record in enumerate(records))
