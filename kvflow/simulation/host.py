"""One life of a rank without tasks and sockets: what `kvflow.rank` does, step by step in virtual time."""

import abc
import ctypes
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvflow.backends.base import BackendEvent
from kvflow.config import RankConfig
from kvflow.errors import FailureReason, LocalProtocolError, Stage
from kvflow.observe.logs import get_logger
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import OddityLog
from kvflow.simulation.network import Line
from kvflow.simulation.pool import Lease, Pool
from kvflow.simulation.requests import Receiving, Sending
from kvflow.simulation.shapes import CellTable
from kvflow.simulation.transport import SimBackend
from kvflow.stages.context import StageContext
from kvflow.stages.packing import HostCopier
from kvflow.stages.staging import StagingMemory
from kvflow.stages.submit import agent_name
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.core import Core
from kvflow.state.invariants import check_invariants
from kvflow.state.quarantine import Footprint
from kvflow.state.staging import StagingArea
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure, Goodbye, Message, PeerId

if TYPE_CHECKING:
    from kvflow.simulation.world import World

__all__ = ["Host"]

CLOSE_MARGIN_S: Final = 1.0
CLOSE_LOOK_S: Final = 0.05
CHECK_EVERY: Final = 8
"""Events of a core between two looks at its invariants."""

_LOG: Final = get_logger()


class QuietOddities(OddityLog):
    """Counts what was ignored, and logs nothing."""

    def count(self, kind: str, peer: PeerId | None = None, **values: object) -> None:
        """Count it."""
        self.counts[kind] = self.counts.get(kind, 0) + 1


class Host(abc.ABC):
    """Base of both kinds.

    Args:
        world: Everything around it.
        config: Settings.
        incarnation: Names this life.
        table: Layout of its memory.

    Attributes:
        is_alive: The process runs or is stopped; it has not died or been closed.
        is_closing: It takes nothing new.
        is_broken: A task of it has failed, so that it decides nothing any more.
        is_stalling: It is stopped, and so is what its transport had under way.
        frozen_s: For how long it was stopped, all in all.
        when_awake: What waits for it to go on.
    """

    def __init__(self, world: "World", config: RankConfig, me: PeerId, table: CellTable) -> None:
        self.world = world
        self.config = config
        self.me = me
        self.pool = Pool(table)
        self.is_alive = True
        self.is_closing = False
        self.is_broken = False
        self.is_stalling = False
        self.when_awake: list[Callable[[], None]] = []
        self.transfers: dict[int, Sending | Receiving] = {}
        self.ended: list[Sending | Receiving] = []
        self.context = StageContext(
            me=me,
            config=config,
            dispatch=self.dispatch,
            start_task=run_now,
            now=lambda: world.schedule.now,
            times=StageTimes(),
            log=_LOG,
            oddities=QuietOddities(_LOG, lambda: 0.0),
        )
        self._frozen_since: float | None = None
        self._frozen_s = 0.0
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._events: deque[ev.Event] = deque()
        self._is_dispatching = False
        self._alarm = math.inf
        self._num_events = 0
        self.backend = SimBackend(self, in_band=not world.without_notices, ends_with_process=world.is_fenced)
        self.staging = StagingMemory(config.staging_bytes, HostCopier()) if config.staging_bytes else None
        layout = self.staging.added_to(table.layout) if self.staging is not None else table.layout
        self.backend.register_now(layout, agent_name(me))
        self.core = Core(
            me, config.timeouts, config.limits, ends_with_process=world.is_fenced, staging=self._staging_area()
        )
        self._page_bytes = {component.name: component.page_bytes for component in table.layout.components}

    def read(self, address: int, length: int) -> bytes:
        """Bytes of its pages or of its staging memory."""
        if self.staging is not None and self.staging.holds(address):
            return ctypes.string_at(address, length)
        at = address - self.pool.table.base
        return bytes(self.pool.memory[at : at + length])

    def write(self, address: int, data: bytes) -> None:
        """Change its pages or its staging memory."""
        if self.staging is not None and self.staging.holds(address):
            ctypes.memmove(address, data, len(data))
            return
        at = address - self.pool.table.base
        self.pool.memory[at : at + len(data)] = data

    def _staging_area(self) -> StagingArea | None:
        """Whose the parts of its staging memory are, if peers write into it."""
        return None

    @property
    def frozen_s(self) -> float:
        """Seconds stopped or blocked so far."""
        since = self._frozen_since
        return self._frozen_s + (0.0 if since is None else self.world.schedule.now - since)

    @property
    def is_frozen(self) -> bool:
        """It is stopped or blocked now."""
        return self._frozen_since is not None

    # The process -----------------------------------------------------------------------------------------------------

    def call(self, run: Callable[..., None], *args: Any) -> None:
        """Run something in the process: now, when it goes on, or never if it is dead."""
        if not self.is_alive or self.is_broken:
            return
        if self._frozen_since is not None:
            self._deferred.append((run, args))
        else:
            run(*args)

    def freeze(self, *, stalls: bool) -> None:
        """Stop running; `stalls` stops what the transport has under way as well."""
        self._frozen_since = self.world.schedule.now
        self.is_stalling = stalls

    def thaw(self) -> None:
        """Go on with whatever has piled up; timers may be first or last."""
        if not self.is_alive or self._frozen_since is None:
            return
        self._frozen_s = self.frozen_s
        self._frozen_since = None
        self.is_stalling = False
        piled, self._deferred = self._deferred, []
        if self.world.rng.random() < 0.5:
            piled = [item for item in piled if item[0] == self._tick] + [
                item for item in piled if item[0] != self._tick
            ]
        for run, args in piled:
            self.call(run, *args)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        waiting, self.when_awake = self.when_awake, []
        for run in waiting:
            run()

    def kill(self) -> None:
        """Die without a word."""
        self._end()
        self.world.network.vanish(self)
        for write in list(self.backend.writes.values()):
            self.world.plane.sender_died(write)

    def crash(self) -> None:
        """Lose a task, as `Rank._abandon` sees it: say so, and decide nothing any more, while writes go on."""
        failure = self.context.failure(FailureReason.BROKEN, Stage.ENQUEUE, "a task of this rank failed")
        for peer in self.core.connected_peers():
            self.send(peer, Goodbye(peer=self.me, failure=failure))
        self.world.registry.unregister(self)
        self.is_closing = self.is_broken = True
        for transfer in self.transfers.values():
            if transfer.memory is not Memory.SAFE:
                outcome = Outcome.FAILED if transfer.outcome is Outcome.PENDING else transfer.outcome
                transfer.outcome, transfer.memory = outcome, Memory.QUARANTINED
                transfer.decided_at = self.world.schedule.now

    def start_draining(self, timeout_s: float) -> None:
        """Take nothing new and let what is open end, as `Rank.drain` does, and close then."""
        if self.is_closing:
            return
        self.is_closing = True
        self.world.registry.unregister(self)
        self.dispatch(ev.DrainStarted(self.failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is draining")))
        self._finish_draining(self.world.schedule.now + timeout_s)

    def _finish_draining(self, give_up: float) -> None:
        if self._is_unsettled() and self.world.schedule.now < give_up:
            self.world.schedule.after(CLOSE_LOOK_S, self.call, self._finish_draining, give_up)
        else:
            self._close()

    def start_closing(self) -> None:
        """Close in order, as `Rank._close` does."""
        if not self.is_closing:
            self.is_closing = True
            self._close()

    def _close(self) -> None:
        self.dispatch(ev.ClosingStarted(self.failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is closing")))
        self._finish_closing(self.world.schedule.now + self.config.timeouts.drain_s + CLOSE_MARGIN_S)

    def _finish_closing(self, give_up: float) -> None:
        if self._is_unsettled() and self.world.schedule.now < give_up:
            self.world.schedule.after(CLOSE_LOOK_S, self.call, self._finish_closing, give_up)
            return
        for event in self.backend.close_now():
            self.take_backend_event(event)
        for peer in self.core.connected_peers():
            self.send(peer, Goodbye(peer=self.me))
        self.world.closed(self)
        self._end()
        self.world.network.vanish(self, is_orderly=True)

    def _is_unsettled(self) -> bool:
        return any(transfer.memory in (Memory.HELD, Memory.DRAINING) for transfer in self.transfers.values())

    def _end(self) -> None:
        self.is_alive = False
        self.world.lives.pop(agent_name(self.me), None)
        self.world.plane.process_ended(self)
        self._deferred.clear()
        self.is_stalling = False
        self._wake_waiting()

    # As in kvflow.rank -----------------------------------------------------------------------------------------------

    def dispatch(self, event: ev.Event) -> None:
        """Tell the core what has happened, and carry out what follows.

        Raises:
            LocalProtocolError, CapacityExceeded: The engine asked for something that is not allowed now.
        """
        self._events.append(event)
        if self._is_dispatching:
            return
        self._is_dispatching = True
        world = self.world
        try:
            while self._events:
                current = self._events.popleft()
                effects = self.core.handle(current, world.schedule.now)
                if world.story is not None:
                    world.tell_event(self, current, effects)
                for effect in effects:
                    self._perform(effect)
                self._num_events += 1
                if self._num_events % CHECK_EVERY == 0:
                    check_invariants(self.core)
        finally:
            self._is_dispatching = False
        self._set_alarm()
        self._after_dispatch()

    def footprint(self, lease: Lease, counts: Mapping[str, int] | None = None) -> Footprint:
        """What pages of a lease take of the pools; all of them by default."""
        taken = counts or {name: len(slots) for name, slots in lease.pages.items()}
        num_bytes = sum(count * self._page_bytes[name] for name, count in taken.items())
        return Footprint(sum(taken.values()), num_bytes)

    def failure(self, reason: FailureReason, detail: str) -> Failure:
        """A failure that this rank or its engine caused."""
        stage = Stage.BOOTSTRAP if reason is FailureReason.PEER_CLOSED else Stage.ENQUEUE
        return self.context.failure(reason, stage, detail)

    def _perform(self, effect: ef.Effect) -> None:
        match effect:
            case ef.SendMessage(peer, message):
                self.send(peer, message)
            case ef.CountOddity(kind, peer, room):
                self.context.oddities.count(kind, peer, room=room)
            case ef.ForgetPeer(peer):
                self._forget(peer)
            case _:
                self._carry_out(effect)

    def _report(self, key: int, effect: ef.ReportSender | ef.ReportReceiver) -> None:
        """Pass on to the engine how a transfer stands: it takes its pages back as soon as it may."""
        transfer = self.transfers.get(key)
        if transfer is None:
            return
        was_safe = transfer.memory is Memory.SAFE
        transfer.outcome, transfer.memory, transfer.failure = effect.outcome, effect.memory, effect.failure
        if effect.outcome is not Outcome.PENDING and transfer.decided_at is None:
            transfer.decided_at = self.world.schedule.now
            self.world.oracle.decided(transfer)
        if effect.memory is Memory.SAFE and effect.outcome is not Outcome.PENDING:
            del self.transfers[key]
        if effect.memory is Memory.SAFE and not was_safe:
            self.pool.give_back(transfer.lease)
        transfer.lease.is_quarantined = effect.memory is Memory.QUARANTINED
        self.world.reported(transfer)

    def open_transfer(self, key: int, transfer: Sending | Receiving, event: ev.Event) -> None:
        """Put a transfer on record and tell the core that it begins.

        Raises:
            LocalProtocolError, CapacityExceeded: It may not begin; its pages were given back.
        """
        before = self.transfers.get(key)
        self.transfers[key] = transfer
        try:
            self.dispatch(event)
        except Exception:
            self.pool.give_back(transfer.lease)
            del self.transfers[key]
            if before is not None:
                self.transfers[key] = before
            raise

    def _set_alarm(self) -> None:
        due = self.core.next_deadline()
        if due is not None and due < self._alarm:
            self._alarm = due
            self.world.schedule.at(due, self._ring, due)

    def _ring(self, due: float) -> None:
        if self._alarm == due:
            self.call(self._tick)

    def _tick(self) -> None:
        self._alarm = math.inf
        due = self.core.next_deadline()
        if due is not None and due <= self.world.schedule.now:
            self.dispatch(ev.TimePassed())
        else:
            self._set_alarm()

    # What differs ----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _carry_out(self, effect: ef.Effect) -> None:
        """Carry out an effect that only this kind of rank knows."""

    @abc.abstractmethod
    def send(self, peer: PeerId, message: Message) -> None:
        """Send to a greeted peer."""

    @abc.abstractmethod
    def _forget(self, peer: PeerId) -> None:
        """Drop what is held for a peer that has left."""

    @abc.abstractmethod
    def take_backend_event(self, event: BackendEvent) -> None:
        """Take in what the transport says."""

    @abc.abstractmethod
    def leftovers(self) -> dict[str, int]:
        """What is still kept for transfers; all zero when none is open."""

    @abc.abstractmethod
    def take_bytes(self, line: Line, data: bytes) -> None:
        """Take a message from a line that ends here."""

    @abc.abstractmethod
    def line_closed(self, line: Line) -> None:
        """Learn that the other end of a line that ends here is gone."""

    @abc.abstractmethod
    def take_notice(self, payload: bytes) -> None:
        """Take an in-band notice."""

    @abc.abstractmethod
    def _after_dispatch(self) -> None:
        """Let the stages take what the core gave them."""


def run_now(run: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    """Run a coroutine that never waits to its end."""
    try:
        run(*args).send(None)
    except StopIteration:
        return
    raise LocalProtocolError("a task of the simulation may not wait", task=str(run))
