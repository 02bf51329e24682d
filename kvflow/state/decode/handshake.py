"""The handshake with prefill instances: from a reference to connected ranks, and again when a rank is lost. Pure.

The core looks an instance up in the directory, compiles the routes from its ranks, and sends each rank a Hello
(`dialing`). Rooms wait for `handshake_s` at most, then fail, and later ones fail at once; but the handshake continues
as long as rooms request the instance.

A room is granted only to the ranks that it refers to: those in the directory's answer, and the process that issued its
ticket. If other processes are connected, the core asks the directory again, because either side may be out of date: a
ticket of a terminated process fails its room, and a new process waits until its predecessor is lost.

A room that fails before it is granted is declined. If the handshake fails, ranks are told without one:
first the rank that was listed first, then, once it has answered, the others, because the directory may have named
strangers.
"""

import itertools
from typing import assert_never

from msgspec.structs import replace

from kvflow.errors import FailureReason
from kvflow.state.decode.deadlines import (
    DeclineUnanswered,
    DecodeTimer,
    HandshakeDeadline,
    HelloUnanswered,
    InstanceTimer,
    RetryLookup,
)
from kvflow.state.decode.declines import Declines
from kvflow.state.decode.dialing import Dialing, HandshakeContext, Lookups
from kvflow.state.decode.ended import Ended
from kvflow.state.decode.instances import Declined, Instance, InstanceTable, Waiting, is_complete
from kvflow.state.decode.issuers import IssuerProbes
from kvflow.state.decode.offers import OffersMade
from kvflow.state.decode.peers import PrefillPeers
from kvflow.state.decode.room import Room
from kvflow.state.decode.rooms import Rooms
from kvflow.state.decode.unconnected import Obstacles, UnconnectedRooms
from kvflow.state.effects import CompileRoutes, DecodeEffect, LogEvent, LookUp
from kvflow.state.events import (
    InstanceAddress,
    InstanceFound,
    InstanceRef,
    OfferMade,
    OfferWithdrawn,
    RoomDeclined,
    RoutesCompiled,
)
from kvflow.state.settings import DecodeSettings
from kvflow.state.tables import InstanceSignal, InstanceState
from kvflow.state.timers import Timers
from kvflow.wire.messages import Drained, Failure, PeerId, Refuse, Welcome

__all__ = ["Instances"]

OTHER_ANSWER_S = 0.5
"""Time after the start of a handshake in which answers for other references do not restart it, in seconds."""

REFUSED_PAUSE_S = 2.0
"""Pause after a refusal, in seconds: its cause is unlikely to go away soon."""

UNWANTED_S = 30.0
"""How long an unreachable instance is looked up after a room last requested it, in seconds."""


class Instances:
    """Prefill instances, and the state of the handshake with each. Methods return effects."""

    def __init__(
        self, me: PeerId, settings: DecodeSettings, peers: PrefillPeers, rooms: Rooms, timers: Timers[DecodeTimer]
    ) -> None:
        self._timeouts = settings.timeouts
        self._peers = peers
        self._rooms = rooms
        self._timers = timers
        self._instances = InstanceTable()
        self._attempts = itertools.count()
        self._lookups = Lookups(timers)
        context = HandshakeContext(me, settings, self._instances, peers, rooms, timers)
        self._failure = context.failure
        self.obstacles = Obstacles(context)
        self.offers = OffersMade(context, self.obstacles)
        self.issuers = IssuerProbes(context)
        self._waiting = UnconnectedRooms(context)
        self._dialing = Dialing(context)
        self._declines = Declines(context, self._dialing)

    # Requests from rooms ---------------------------------------------------------------------------------------------

    def want(self, room: Room, now: float) -> list[DecodeEffect]:
        """Grant or announce a room if its instance is connected; else queue it, or fail it if that is unreachable."""
        ref, issuer = room.opened.instance, room.opened.issuer
        known = self._instances.at(ref)
        if known is not None and room.generation in known.waiting:  # it was announced, and has pages now
            return []
        if issuer is not None:
            self._lookups.expect_newer()
        instance, effects = self._find_or_connect(ref, now)
        if instance is None:
            detail = "too many unreachable prefill instances"
            return self._rooms.fail(room, self._failure(FailureReason.CAPACITY, detail), now)
        instance.declined.pop(room.room, None)
        is_ready = self._peers.are_ready(instance)
        if is_ready and instance.is_meant_by(room):
            return [*effects, *self._rooms.connected(room, tuple(instance.ranks.values()), now)]
        is_news = issuer is not None and issuer not in instance.peers
        if instance.failure is not None and not is_ready and not is_news:
            detail = f"{instance} could not be reached; retrying: {instance.failure.detail}"
            reason = FailureReason.SHORTAGE if instance.is_short else FailureReason.PEER_FAILING
            return [*effects, *self._rooms.fail(room, self._failure(reason, detail), now)]
        self._waiting.add(instance, Waiting(room, self._lookups.number, now + self._timeouts.handshake_s))
        if is_ready:
            self._lookups.ask_later(instance, now)
            effects.append(LookUp(ref, self._lookups.number))
        return effects

    def reconnect(self, ref: InstanceRef, now: float) -> list[DecodeEffect]:
        """Start connecting an instance, unless that has begun."""
        return self._find_or_connect(ref, now)[1]

    def follow_offer(self, event: OfferMade | OfferWithdrawn, now: float) -> list[DecodeEffect]:
        """Note an offer, and start connecting its instance; or forget it. Raises CapacityExceeded."""
        if isinstance(event, OfferWithdrawn):
            self.offers.withdraw(event.number)
            return []
        self.offers.make_offer(event, now)
        return self.reconnect(event.to, now)

    def _find_or_connect(self, ref: InstanceRef, now: float) -> tuple[Instance | None, list[DecodeEffect]]:
        """Find an instance, or start connecting it; None if rooms wait for too many others."""
        instance = self._instances.at(ref)
        is_new = instance is None
        if instance is None:
            if not self._instances.make_room(ref):
                return None, []
            instance = self._instances.add(ref, now)
        instance.ref, instance.wanted_at = ref, now
        if not is_new or self._lookups.is_planned(instance) or self._peers.are_ready(instance):
            return instance, []
        return instance, self._lookups.begin(instance, now)

    def decline(self, room: Room, failure: Failure, now: float) -> list[DecodeEffect]:
        """Decline a room that was never granted, now or once its instance is connected or the handshake has failed.

        Reachable ranks that received its announcement are told now.
        """
        opened = room.opened
        instance = self._instances.find_by_peer(room.told[0]) if room.told else self._instances.at(opened.instance)
        if instance is None:
            return []
        self._waiting.remove(instance, opened.generation)
        if failure.reason is FailureReason.STALE_TICKET:  # no running process holds pages for it
            return []
        declined = Declined(opened.generation, failure, opened.issuer, {}, opened.capability)
        return self._declines.add_decline(instance, opened.room, declined, now, is_announced=bool(room.told))

    def decline_refused(self, event: RoomDeclined, now: float) -> list[DecodeEffect]:
        """Decline a room that the engine will not receive, or that was refused here, unless it is being received."""
        open_here = self._rooms.pending(event.room)
        instance = self._instances.at(event.instance)
        if open_here is not None and self._instances.at(open_here.opened.instance) is instance:
            return []
        instance, effects = self._find_or_connect(event.instance, now)
        if instance is None:
            return []
        self._rooms.ended.close(event.generation, Ended(event.room, (), event.failure))  # to recognise the answers
        declined = Declined(event.generation, event.failure, event.issuer, {}, event.capability)
        return [*effects, *self._declines.add_decline(instance, event.room, declined, now)]

    def decline_answered(self, peer: PeerId, drained: Drained, now: float) -> list[DecodeEffect]:
        """Note that a rank has answered a decline, if that is what it answers."""
        instance = self._instances.find_by_peer(peer)
        return [] if instance is None else self._declines.answered(instance, peer, drained, now)

    # Answers from the directory and the compiler ---------------------------------------------------------------------

    def found(self, event: InstanceFound, now: float) -> list[DecodeEffect]:
        """Start the handshake with the ranks in a directory answer, if they differ from the current ones."""
        instance = self._instances.at(event.instance)
        if instance is None:
            return []
        self._lookups.note_answer(event.instance)
        effects = self._waiting.fail_outdated(instance, event, now)
        instance.found, instance.refusal, instance.is_short = event, "", False
        if not is_complete(event.records):
            return effects
        name = event.records[0].peer.rank.instance
        if isinstance(event.instance, InstanceAddress) and event.instance.name is None:
            instance = self._name(instance, event, name, now)
        if name != instance.name:
            return effects
        if self._peers.are_ready(instance):
            return [*effects, *self._found_again(instance, event, now)]
        return [*effects, *self._begin(instance, event, now)]

    def _begin(self, instance: Instance, event: InstanceFound, now: float) -> list[DecodeEffect]:
        """Start the handshake with the ranks of an instance, unless it is in progress or currently futile."""
        if any(self._peers.has_ended(record.peer) for record in event.records):  # its registration has not expired yet
            return []
        instance.refs[event.instance] = event.records[0].peer
        is_same = [record.peer for record in event.records] == instance.peers
        is_looking_up = instance.state is InstanceState.LOOKING_UP
        if is_same and not is_looking_up:
            return []
        if is_looking_up and self._is_paused(instance, now):
            return []
        if not is_looking_up and event.instance != instance.found_by and now < instance.began_at + OTHER_ANSWER_S:
            return []
        if denial := self._dialing.denial(event.records):
            return self._refused(instance, denial, now)
        effects = self._dialing.forget(instance, now, keep=[record.peer for record in event.records])
        instance.records, instance.attempt = event.records, next(self._attempts)
        instance.found_by, instance.began_at = event.instance, now
        instance.apply(InstanceSignal.FOUND)
        self._lookups.ask_later(instance, now)
        return [*effects, CompileRoutes(event.records[0].peer.rank.instance, instance.attempt, event.records)]

    def _found_again(self, instance: Instance, event: InstanceFound, now: float) -> list[DecodeEffect]:
        """Grant rooms that have waited for this answer; if any remain, probe connected ranks that it omits."""
        if not instance.waiting:  # a late answer
            return []
        instance.refs[event.instance] = event.records[0].peer
        effects = self._waiting.grant(instance, now)
        if instance.waiting:
            known = [record.peer for record in event.records]
            for peer in instance.peers:
                if peer not in known:
                    effects += self._peers.probe(peer)
        return effects

    def _name(self, before: Instance, event: InstanceFound, name: str, now: float) -> Instance:
        """Record which instance an address belongs to, and move the rooms that refer to the address there."""
        instance = self._instances.name(event.instance, name, now)
        if instance is before:
            return instance
        self._waiting.move(before, event, instance)
        if before.name is None:
            instance.declined.update(before.declined)
        if not before.refs and before.name is None:
            self._clear_timers(before)
            self._instances.remove(before)
        instance.found = event
        self._lookups.ask_later(instance, now)
        return instance

    def compiled(self, event: RoutesCompiled, now: float) -> list[DecodeEffect]:
        """Send a Hello to every rank."""
        instance = self._instances.named(event.instance)
        if instance is None or event.attempt != instance.attempt or instance.state is not InstanceState.COMPILING:
            return []
        if len(event.routes) != len(instance.records):
            return self._refused(instance, event.failure, now)
        instance.apply(InstanceSignal.COMPILED)
        return self._dialing.start(instance, event.routes, now)

    # Messages from prefill ranks -------------------------------------------------------------------------------------

    def welcomed(self, peer: PeerId, welcome: Welcome, now: float) -> list[DecodeEffect]:
        """Note that a rank has accepted its Hello, and start to ping it. The last one grants the waiting rooms."""
        instance = self._asked(peer, welcome.attempt)
        if instance is None:  # replacing another incarnation has restarted the handshake
            return []
        self._dialing.answered(instance, peer)
        is_new = self._peers.handshake_done(peer, now, welcome)
        effects: list[DecodeEffect] = [LogEvent("peer_connected", {"peer": str(peer)})] if is_new else []
        rank = replace(instance.ranks[peer.rank.engine_rank], max_pages=welcome.max_pages)
        instance.ranks[peer.rank.engine_rank] = rank
        effects += self._rooms.peer_connected(rank)
        return [*effects, *(self._dialing.go_on(instance, now) if instance.hellos else self._connected(instance, now))]

    def refused(self, peer: PeerId, refuse: Refuse, now: float) -> list[DecodeEffect]:
        """Handle the refusal of a Hello; ignore it if it answers an earlier one."""
        instance = self._asked(peer, refuse.attempt)
        return [] if instance is None else self._refused(instance, f"{peer.rank} refused: {refuse.detail}", now)

    def connection_refused(self, peer: PeerId, detail: str, now: float) -> list[DecodeEffect]:
        """Handle a connection that was refused because of a key while a Hello is unanswered."""
        instance = self._asked(peer)
        if instance is None:
            return []
        record = next(record for record in instance.records if record.peer == peer)
        return self._refused(instance, f"rank {peer.rank} at {record.endpoint}: {detail}", now)

    def back(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Grant the waiting rooms if a rank that is heard again was the only one missing."""
        instance = self._instances.find_by_peer(peer)
        return self._serve(instance, now) if instance is not None and self._peers.are_ready(instance) else []

    def peers_of(self, name: str) -> list[PeerId]:
        """Return the ranks of an instance that were found last."""
        instance = self._instances.named(name)
        return [] if instance is None else instance.peers

    def suspect(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Look up the instance of a rank whose connection broke, because the rank may have restarted."""
        instance = self._instances.find_by_peer(peer)
        return [] if instance is None else self._lookups.repeat(instance, now)

    def lost(self, peer: PeerId, now: float) -> list[DecodeEffect]:
        """Restart the handshake with an instance that has lost a rank."""
        instance = self._instances.find_by_peer(peer)
        if instance is None or peer not in instance.peers:
            return []
        effects = self._dialing.forget(instance, now, keep=[other for other in instance.peers if other != peer])
        instance.apply(InstanceSignal.LOST)
        return [*effects, *self._lookups.begin(instance, now)]

    def is_handshaking(self, peer: PeerId, attempt: int | None = None) -> bool:
        """Return whether a rank has an unanswered Hello, with this attempt number if one is given."""
        return self._asked(peer, attempt) is not None

    def _asked(self, peer: PeerId, attempt: int | None = None) -> Instance | None:
        """Find the instance of a rank that has an unanswered Hello, with this attempt number if one is given."""
        instance = self._instances.find_by_peer(peer)
        if instance is None or peer not in instance.hellos or attempt not in (None, instance.attempt):
            return None
        return instance

    # Timers ----------------------------------------------------------------------------------------------------------

    def expired(self, key: InstanceTimer, now: float) -> list[DecodeEffect]:
        """Handle an expired timer."""
        match key:
            case RetryLookup(number):
                return self._look_again(self._instances.numbered(number), now)
            case DeclineUnanswered(number):
                return self._declines.repeat(self._instances.numbered(number), now)
            case HandshakeDeadline(number):
                return self._deadline_passed(self._instances.numbered(number), now)
            case HelloUnanswered(peer):
                instance = self._asked(peer)
                return [] if instance is None else self._dialing.repeat(instance, peer, now)
            case _:
                assert_never(key)

    # -----------------------------------------------------------------------------------------------------------------

    def _look_again(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Repeat the lookup while the handshake is unfinished or a rank is suspect; forget unwanted instances."""
        if self._peers.are_ready(instance) and not instance.waiting:
            return []
        is_wanted = instance.waiting or any(self._rooms.involve(peer) for peer in instance.peers)
        if not instance.refs or (not is_wanted and now >= instance.wanted_at + UNWANTED_S):
            return self._forget(instance, now)
        looked_up = self._lookups.repeat(instance, now)
        return [*looked_up, *self.issuers.probe(instance, looked_up, now), *self._dialing.go_on(instance, now)]

    def _forget(self, instance: Instance, now: float) -> list[DecodeEffect]:
        effects = self._dialing.forget(instance, now, keep=[])
        self._clear_timers(instance)
        for ref in instance.refs:
            self._lookups.note_answer(ref)
        self._instances.remove(instance)
        return effects

    def _clear_timers(self, instance: Instance) -> None:
        for timer in (RetryLookup, HandshakeDeadline, DeclineUnanswered):
            self._timers.clear(timer(instance.number))

    def _connected(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Serve the waiting rooms, unless the connection to a rank that has accepted its Hello broke meanwhile."""
        instance.apply(InstanceSignal.CONNECTED)
        instance.is_short = False
        if not self._peers.are_ready(instance):
            return []
        self._lookups.stop(instance)
        return self._serve(instance, now)

    def _serve(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Send outstanding declines, and grant the waiting rooms."""
        instance.failure = None
        instance.num_declines = 0
        effects = [*self._declines.send_all(instance, now), *self._waiting.grant(instance, now)]
        if instance.waiting:
            self._lookups.ask_later(instance, now)
            effects += self._lookups.ask(instance, now)
        return effects

    def _deadline_passed(self, instance: Instance, now: float) -> list[DecodeEffect]:
        """Fail all waiting rooms; if the instance is connected, only those whose own deadline has passed."""
        effects = self._waiting.fail_overdue(instance, now)
        if not instance.waiting or self._peers.are_ready(instance):
            return effects
        obstacle = self.obstacles.describe(instance)
        detail = f"{instance} was not reached within {self._timeouts.handshake_s} s: {obstacle}"
        reason = FailureReason.SHORTAGE if instance.is_short else FailureReason.UNREACHABLE
        return [*effects, *self._give_up(instance, self._failure(reason, detail), now)]

    def _refused(self, instance: Instance, detail: str, now: float) -> list[DecodeEffect]:
        effects = self._dialing.forget(instance, now, keep=[])
        instance.apply(InstanceSignal.REFUSED)
        self._lookups.postpone(instance, now + REFUSED_PAUSE_S)
        return [*effects, *self._give_up(instance, self._failure(FailureReason.REFUSED, detail), now)]

    def _is_paused(self, instance: Instance, now: float) -> bool:
        """Return whether an instance has just refused; answers to earlier lookups may still arrive."""
        is_refused = instance.failure is not None and instance.failure.reason is FailureReason.REFUSED
        return is_refused and now < instance.refused_at + REFUSED_PAUSE_S

    def _give_up(self, instance: Instance, failure: Failure, now: float) -> list[DecodeEffect]:
        """Fail all waiting rooms, and later ones at once, until the instance is connected."""
        is_news = instance.failure is None
        instance.refused_at = now
        has_waited = bool(instance.waiting)
        effects = self._waiting.fail_all(instance, failure, now)
        instance.failure = failure
        effects += self._declines.send_all(instance, now)
        for peer in instance.hellos:  # it owns a staging window, which is reclaimed if its process has ended
            if peer not in self._peers:
                effects += self._peers.probe(peer)
        if is_news:
            name = "handshake_refused" if failure.reason is FailureReason.REFUSED else "instance_unreachable"
            values = {"prefill": str(instance), "reason": failure.reason.value, "detail": failure.detail}
            effects.append(LogEvent(name, values, is_warning=not has_waited))  # each failed room logs its own warning
        return effects
