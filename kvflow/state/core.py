"""The core of a rank: the only place where protocol state changes.

It does no I/O, reads no clock and draws no random number. The shell tells it what happened and when; it answers with
what to do, in order. Equal events at equal times give equal effects, so any run can be replayed.
"""

from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from kvflow.config import Limits, Timeouts
from kvflow.errors import FailureReason, LocalProtocolError, RankDraining, Stage
from kvflow.state import events as ev
from kvflow.state.breaker import Breaker
from kvflow.state.deadlines import Deadlines
from kvflow.state.effects import CountOddity, Effect, ForgetPeer, PostPlan, SendMessage
from kvflow.state.peer import Peer
from kvflow.state.quarantine import Quarantine
from kvflow.state.receivers import Receivers
from kvflow.state.senders import Senders
from kvflow.state.slots import RemoteSlots, Unreturned
from kvflow.state.staging import StagingArea
from kvflow.state.tables import BreakerState
from kvflow.wire.messages import (
    Cancel,
    Drained,
    Failed,
    Failure,
    Goodbye,
    Grant,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
    Received,
    Refuse,
    Unstage,
    Unstaged,
)

__all__ = ["Core"]

LEASES_TO_OBLIVION = 10
"""Further leases of silence after which a lost peer is forgotten; until then it may only have been cut off."""

MIN_LEASE_S = 1e-3
"""However short a lease a peer asks for, there is time between two looks at it."""


class NextLook(msgspec.Struct, frozen=True):
    """Deadline: see whether something was heard from a peer."""

    peer: PeerId


class NextPing(msgspec.Struct, frozen=True):
    """Deadline: tell a peer that this rank lives."""

    peer: PeerId


class Oblivion(msgspec.Struct, frozen=True):
    """Deadline: a peer that is lost has been silent for long enough to be forgotten."""

    peer: PeerId


class Core:
    """State of one rank: its peers, the rooms it sends and the rooms it receives.

    Args:
        me: This life of this rank.
        timeouts: How long things may take.
        limits: How much there may be of things.
        ends_with_process: The transport lets nothing land any more once the process that wrote has ended.
        staging: On a decode rank, whose windows are whose. The shell asks it for a window before it says hello.

    Attributes:
        slots: On a prefill rank, the slots in the windows that decode ranks have given it. The queue takes from it.
    """

    def __init__(
        self,
        me: PeerId,
        timeouts: Timeouts,
        limits: Limits,
        *,
        ends_with_process: bool,
        staging: StagingArea | None = None,
    ) -> None:
        self.me = me
        self.peers: dict[PeerId, Peer] = {}
        self.deadlines: Deadlines[Hashable] = Deadlines()
        self.quarantine = Quarantine(limits)
        self.senders = Senders(me, timeouts, limits, self.deadlines, self.quarantine)
        self.receivers = Receivers(me, timeouts, limits, self.deadlines, self.quarantine)
        self.slots = RemoteSlots(timeouts, self.deadlines)
        self.staging = staging
        self._timeouts = timeouts
        self._ends_with_process = ends_with_process
        self._leaving: Failure | None = None
        self._is_closing = False
        self._breakers: dict[PeerId, Breaker] = {}
        self._handlers: dict[type, Callable[[Any, float], list[Effect]]] = {
            ev.SendOpened: self._send_opened,
            ev.ChunkOffered: lambda event, now: self.senders.offer(event.room, event.chunk, event.footprint, now),
            ev.SendAborted: lambda event, now: self.senders.abort(event.room, event.failure, now),
            ev.PlanFinished: self._plan_finished,
            ev.PlanFailed: lambda event, now: self.senders.plan_failed(event.delivery, event.failure, now),
            ev.PostSettled: self._post_settled,
            ev.PostDoubted: self._post_doubted,
            ev.PeerGreeted: self._peer_greeted,
            ev.ReceiveOpened: self._receive_opened,
            ev.ReceiveAborted: lambda event, now: self.receivers.abort(event.room, event.failure, now),
            ev.InstanceGreeted: self._instance_greeted,
            ev.InstanceUnreachable: lambda event, now: self.receivers.unreachable(event.instance, event.failure, now),
            ev.DigestsVerified: lambda event, now: self.receivers.verified(event.generation, event.failure, now),
            ev.Scattered: self._scattered,
            ev.NoticeDelivered: lambda event, now: self.receivers.notice(event.notice, None, now),
            ev.MessageReceived: self._message_received,
            ev.PeerLeft: lambda event, now: self._left(event.peer, event.failure, now),
            ev.PeerGone: self._peer_gone,
            ev.QuarantineReleased: self._quarantine_released,
            ev.DrainStarted: self._drain_started,
            ev.ClosingStarted: self._closing_started,
            ev.TimePassed: self._time_passed,
        }

        self._message_handlers: dict[type, Callable[[PeerId, Any, float], list[Effect]]] = {
            Grant: self._granted,
            Cancel: self._cancelled,
            Received: self._received,
            Unstaged: lambda peer, word, _: self.slots.unstaged(peer, word),
            Unstage: self.receivers.unstage,
            Notice: lambda peer, notice, now: self.receivers.notice(notice, peer, now),
            Drained: self.receivers.drained,
            Failed: self.receivers.failed,
            Ping: lambda peer, _, __: [SendMessage(peer, Pong(peer=self.me))],
            Pong: lambda _, __, ___: [],
            Goodbye: self._said_goodbye,
        }

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event in and say what follows from it.

        Args:
            event: What happened.
            now: When, in seconds on a monotonic clock.

        Returns:
            Effects, to be carried out in this order.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining: The engine asked for something that is not allowed
                now; nothing has changed. No event that comes from a peer raises.
        """
        return self._handlers[type(event)](event, now)

    def next_deadline(self) -> float | None:
        """When `TimePassed` is due, or None while nothing has a deadline."""
        return self.deadlines.next()

    @property
    def is_idle(self) -> bool:
        """No room is open and no page is held."""
        return not self.senders.rooms and not self.receivers.receivers

    def connected_peers(self) -> list[PeerId]:
        """Peers that are greeted and not silent."""
        return [peer.id for peer in self.peers.values() if peer.is_connected]

    def _send_opened(self, event: ev.SendOpened, now: float) -> list[Effect]:
        self._check_open(event.room)
        return self.senders.open(event.room, now)

    def _receive_opened(self, event: ev.ReceiveOpened, now: float) -> list[Effect]:
        self._check_open(event.room)
        return self.receivers.open(event, now)

    def _check_open(self, room: int) -> None:
        if self._is_closing:
            raise LocalProtocolError("rank is closing", room=room)
        if self._leaving is not None:
            raise RankDraining("rank is draining", room=room)

    def _peer_greeted(self, event: ev.PeerGreeted, now: float) -> list[Effect]:
        effects = self._acquaint(event.peer, event.lease_s, now)
        self.senders.acquaintances.greeted(event.peer, event.owed, event.cutting)
        self.slots.greeted(event.peer, event.staging, now)
        self.senders.unproved.outlived(event.peer)
        return effects

    def _instance_greeted(self, event: ev.InstanceGreeted, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for rank in event.ranks:
            effects += self._acquaint(rank.peer, self._timeouts.lease_s, now)
            self.deadlines.set(NextPing(rank.peer), now + self._timeouts.ping_s)
        return [*effects, *self.receivers.greeted(event.instance, event.ranks, now)]

    def _acquaint(self, peer_id: PeerId, lease_s: float, now: float) -> list[Effect]:
        """Note a peer as connected; an earlier life of the same rank is over."""
        effects: list[Effect] = []
        for other in [peer for peer in self.peers if peer.rank == peer_id.rank and peer != peer_id]:
            failure = self._failure(FailureReason.PEER_LOST, f"{other.rank} has restarted")
            effects += self._left(other, failure, now)
        peer = self.peers.setdefault(peer_id, Peer(peer_id))
        peer.greeted(max(lease_s, MIN_LEASE_S), now)
        self.deadlines.set(NextLook(peer_id), now + peer.third_s)
        return effects

    def _message_received(self, event: ev.MessageReceived, now: float) -> list[Effect]:
        peer = self.peers.get(event.peer)
        if peer is None:
            return [CountOddity("message_from_stranger", event.peer, None)]
        effects: list[Effect] = []
        if not peer.is_connected:
            self.deadlines.set(NextLook(peer.id), now + peer.third_s)
            effects = self.receivers.reconnected(peer.id)
        peer.heard(now)
        return [*effects, *self._obey(event.peer, event.message, now)]

    def _obey(self, peer: PeerId, message: Message, now: float) -> list[Effect]:
        handler = self._message_handlers.get(type(message))
        is_for_prefill = isinstance(message, (Grant, Cancel, Received, Unstaged))
        if handler is None or (is_for_prefill and peer not in self.senders.acquaintances):
            return [CountOddity(f"unexpected_{type(message).__name__.lower()}", peer, None)]
        if not _is_genuine(peer, message):
            return [CountOddity("message_in_the_name_of_another", peer, None)]
        return handler(peer, message, now)

    def _granted(self, peer: PeerId, grant: Grant, now: float) -> list[Effect]:
        return self.senders.grant(peer, grant, now, leaving=self._leaving)

    def _cancelled(self, peer: PeerId, cancel: Cancel, now: float) -> list[Effect]:
        effects = self.senders.cancel(peer, cancel, now)
        return [*effects, *self.slots.over(ev.DeliveryId(cancel.room, peer, cancel.generation))]

    def _received(self, peer: PeerId, received: Received, now: float) -> list[Effect]:
        effects = self.senders.received(peer, received, now)
        return [*effects, *self.slots.over(ev.DeliveryId(received.room, peer, received.generation))]

    def _plan_finished(self, event: ev.PlanFinished, now: float) -> list[Effect]:
        effects = self.senders.plan_finished(event, now)
        for effect in effects:
            if isinstance(effect, PostPlan):
                self.slots.posted(effect.delivery, effect.seq, effect.notice)
        return effects

    def _scattered(self, event: ev.Scattered, now: float) -> list[Effect]:
        effects = self.receivers.scattered(event, now)
        self._reclaim_windows()
        return effects

    def _reclaim_windows(self) -> None:
        if self.staging is not None and self.staging.has_windows_of_dead:
            self.staging.reclaim(self.receivers.scattered_peers())

    def _post_settled(self, event: ev.PostSettled, now: float) -> list[Effect]:
        is_news = event.failure is not None and not self.senders.is_doubted(event.delivery)
        effects = [*self.senders.post_settled(event, now), *self.slots.settled(event, now)]
        if event.failure is None:
            self._breakers.pop(event.delivery.peer, None)
        elif is_news:
            effects += self._write_failed(event.delivery.peer, event.failure, now)
        return effects

    def _post_doubted(self, event: ev.PostDoubted, now: float) -> list[Effect]:
        effects = self.senders.post_doubted(event.delivery, event.failure, now)
        effects += self.slots.doubted(event.delivery, event.seq)
        return [*effects, *self._write_failed(event.delivery.peer, event.failure, now)]

    def _write_failed(self, peer: PeerId, failure: Failure, now: float) -> list[Effect]:
        """Part with a peer to which writes fail again and again: it must greet anew, with fresh native state."""
        if peer not in self.peers:
            return []
        breaker = self._breakers.setdefault(peer, Breaker())
        breaker.failed(now)
        if breaker.state is BreakerState.CLOSED:
            return []
        refusal = Refuse(peer=self.me, to=peer, detail=f"writes to you fail, say hello again: {failure.detail}")
        effects = self._fail_all_with(peer, failure, now)
        return [*effects, SendMessage(peer, refusal), *self._left(peer, failure, now)]

    def _said_goodbye(self, peer: PeerId, goodbye: Goodbye, now: float) -> list[Effect]:
        failure = goodbye.failure or self._failure(FailureReason.PEER_CLOSED, f"{peer.rank} is closing")
        self.senders.unproved.ended(peer)
        self.slots.ended(peer)
        return self._left(peer, failure, now)

    def _peer_gone(self, event: ev.PeerGone, now: float) -> list[Effect]:
        failure = self._failure(FailureReason.PEER_LOST, f"the process of {event.peer.rank} has ended")
        if not event.is_quiet and not self._ends_with_process:
            return self._left(event.peer, failure, now)
        effects = [*self.receivers.gone(event.peer, failure, now), *self._left(event.peer, failure, now)]
        if self.staging is not None:
            self.staging.gone(event.peer)
            self._reclaim_windows()
        return effects

    def _quarantine_released(self, event: ev.QuarantineReleased, now: float) -> list[Effect]:
        if event.key in self.receivers.receivers:
            return self.receivers.release(event.key, now)
        return self.senders.release(event.key, now)

    def _left(self, peer_id: PeerId, failure: Failure, now: float) -> list[Effect]:
        peer = self.peers.pop(peer_id, None)
        if peer is None:
            return []
        peer.left()
        self.deadlines.clear(NextLook(peer_id))
        self.deadlines.clear(NextPing(peer_id))
        self.deadlines.clear(Oblivion(peer_id))
        self._breakers.pop(peer_id, None)
        effects = self._fail_all_with(peer_id, failure, now)
        self.senders.acquaintances.forget(peer_id, failure)
        self.slots.left(peer_id)
        return [*effects, ForgetPeer(peer_id)]

    def _fail_all_with(self, peer: PeerId, failure: Failure, now: float) -> list[Effect]:
        return [*self.senders.peer_lost(peer, failure, now), *self.receivers.peer_lost(peer, failure, now)]

    def _drain_started(self, event: ev.DrainStarted, _: float) -> list[Effect]:
        self._leaving = event.failure
        return self.senders.turn_away(event.failure)

    def _closing_started(self, event: ev.ClosingStarted, now: float) -> list[Effect]:
        self._leaving, self._is_closing = event.failure, True
        return [*self.senders.close(event.failure, now), *self.receivers.close(event.failure, now)]

    def _time_passed(self, _: ev.TimePassed, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while True:
            due = self.deadlines.next()
            key = self.deadlines.pop_due(now)
            if due is None or key is None:
                return effects
            effects += self._expired(key, now, late_s=now - due)

    def _expired(self, key: Hashable, now: float, late_s: float) -> list[Effect]:
        match key:
            case NextLook(peer):
                return self._look_after(self.peers[peer], now, late_s)
            case NextPing(peer):
                return self._ping(self.peers[peer], now)
            case Oblivion(peer):
                return self._forget_if_dead(self.peers[peer], now)
            case Unreturned():
                return self.slots.expired(key, now)
        return [*self.senders.expired(key, now), *self.receivers.expired(key, now)]

    def _look_after(self, peer: Peer, now: float, late_s: float) -> list[Effect]:
        """Take a peer for lost once it was silent for a whole lease."""
        next_look = peer.look(now, late_s)
        if next_look is not None:
            self.deadlines.set(NextLook(peer.id), next_look)
            return []
        failure = self._failure(FailureReason.PEER_LOST, f"{peer.id.rank} was silent for {peer.lease_s} s")
        if peer.id in self.senders.acquaintances:  # a decode rank can prove nothing here; if it lives, it greets anew
            return self._left(peer.id, failure, now)
        peer.expired()
        self.deadlines.set(Oblivion(peer.id), now + LEASES_TO_OBLIVION * peer.lease_s)
        return self._fail_all_with(peer.id, failure, now)

    def _forget_if_dead(self, peer: Peer, now: float) -> list[Effect]:
        """Drop a peer that stayed silent, unless some transfer still waits for its proof."""
        if peer.is_connected:
            return []
        if self.receivers.involve(peer.id):
            self.deadlines.set(Oblivion(peer.id), now + LEASES_TO_OBLIVION * peer.lease_s)
            return []
        return self._left(peer.id, self._failure(FailureReason.PEER_LOST, f"{peer.id.rank} stayed silent"), now)

    def _ping(self, peer: Peer, now: float) -> list[Effect]:
        """Also to a silent peer: if it was only cut off, its answer brings it back."""
        self.deadlines.set(NextPing(peer.id), now + self._timeouts.ping_s)
        return [SendMessage(peer.id, Ping(peer=self.me))]

    def _failure(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.BOOTSTRAP, str(self.me.rank), detail)


def _is_genuine(peer: PeerId, message: Message) -> bool:
    """Say whether a message names the life, or the engine rank, that its line belongs to."""
    match message:
        case Ping() | Pong() | Goodbye():
            return message.peer == peer
        case Notice() | Drained() | Failed() | Unstage():
            return message.engine_rank == peer.rank.engine_rank
    return True
