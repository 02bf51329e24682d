"""What a prefill rank and a decode rank share: the life cycle, the core with its clock, and the tasks.

All of a rank runs in one task group on the event loop it is opened on. The core is only ever touched from there, so
nothing needs a lock.
"""

import abc
import logging
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel
from typing_extensions import Self

from kvflow.aio.clock import Clock, now
from kvflow.aio.tasks import OwnedTasks
from kvflow.backends import create_backend
from kvflow.backends.base import Backend, BackendEvent
from kvflow.config import RankConfig
from kvflow.errors import FailureReason, KvflowError, LocalProtocolError, RankBroken, Stage
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import PageTable
from kvflow.observe.logs import LOGGER, get_logger
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import OddityLog, describe
from kvflow.stages.context import StageContext
from kvflow.stages.staging import staging_memory
from kvflow.stages.submit import agent_name
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.core import Core
from kvflow.state.quarantine import Footprint
from kvflow.state.staging import StagingArea
from kvflow.state.tables import Memory, Outcome
from kvflow.statistics import RankStatistics, StagingStatistics
from kvflow.transfer import Transfer
from kvflow.wire.messages import Failure, Goodbye, Message, PeerId, RankId

__all__ = ["Rank"]

CLOSE_MARGIN_S = 1.0
"""How much longer than the drain timeout closing may wait for the last transfers."""

EVENTS_AT_ONCE = 16
"""Events of the transport taken in before the event loop gets its turn."""

AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


class Rank(abc.ABC, Generic[AnyTransfer]):
    """Base of both ranks. Use it as an async context manager.

    Args:
        config: Settings.
        layout: Memory to send from or to receive into; it must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name.
    """

    def __init__(self, config: RankConfig, layout: KVLayout, backend: Backend | None = None) -> None:
        self.config = config
        self.layout = layout
        self.me = PeerId(RankId(config.instance, config.engine_rank), secrets.randbits(64))
        self._backend = backend or create_backend(config.backend, config.backend_options)
        ends_with_process = self._backend.capabilities.ends_with_process
        self._staging = staging_memory(config, layout)
        area = self._staging_area()
        self._core = Core(self.me, config.timeouts, config.limits, ends_with_process=ends_with_process, staging=area)
        self._page_bytes = {component.name: component.page_bytes for component in layout.components}
        self._clock = Clock(self._core.next_deadline, lambda: self.dispatch(ev.TimePassed()))
        self._times = StageTimes()
        self._log = get_logger(instance=config.instance, engine_rank=config.engine_rank)
        self._oddities = OddityLog(self._log, now)
        self._tasks = OwnedTasks(self._abandon)
        self._context = StageContext(
            me=self.me,
            config=config,
            dispatch=self.dispatch,
            start_task=self._tasks.start,
            now=now,
            times=self._times,
            log=self._log,
            oddities=self._oddities,
        )
        self._transfers: dict[int, AnyTransfer] = {}
        self._events: deque[ev.Event] = deque()
        self._is_dispatching = False
        self._settled = anyio.Event()
        self._is_leaving = False
        self._is_open = False
        self._was_opened = False
        self._error: Exception | None = None
        self._resources = ExitStack()

    async def __aenter__(self) -> Self:
        if self._was_opened:
            raise LocalProtocolError("a rank can be opened only once; make another one", rank=str(self.me.rank))
        self._was_opened = True
        try:
            await self._backend.open(agent_name(self.me))
            await self._backend.register(self._staging.added_to(self.layout) if self._staging else self.layout)
            self._open()
            await self._tasks.open()
        except BaseException:
            self._resources.close()
            with anyio.CancelScope(shield=True):
                await self._backend.aclose()
            raise
        for run in (self._clock.run, self._take_events, *self._runners()):
            self._tasks.start(run)
        self._is_open = True
        self._log.info("rank_opened", incarnation=f"{self.me.incarnation:016x}", backend=self._backend.name)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._close()
            finally:
                try:
                    await self._tasks.close()
                finally:
                    self._resources.close()
            self._log.info("rank_closed", quarantined=len(self.quarantined()))

    def statistics(self) -> RankStatistics:
        """Counts at this moment."""
        receivers = self._core.receivers
        memories = [sender.state.memory for sender in self._core.senders.rooms.values()]
        memories += [receiver.state.memory for receiver in receivers.receivers.values()]
        num_quarantined = sum(memory is Memory.QUARANTINED for memory in memories)
        return RankStatistics(
            rooms=len(memories) - num_quarantined,
            quarantined=num_quarantined,
            quarantined_pages=self._core.quarantine.total.num_pages,
            quarantined_bytes=self._core.quarantine.total.num_bytes,
            waiting_grants=len(self._core.senders.waiting),
            queued_chunks=0,
            posted=0,
            deadlines=len(self._core.deadlines),
            peers=len(self._core.peers),
            oddities=dict(self._oddities.counts),
            times=self._times,
            staging=self._staging_statistics(),
        )

    def dispatch(self, event: ev.Event) -> None:
        """Tell the core what has happened, and carry out what follows.

        An event that comes up while another's effects are carried out waits until they are.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining: The engine asked for something that is not allowed now.
        """
        self._events.append(event)
        if self._is_dispatching:
            return
        try:
            self._carry_on()
        except Exception as error:
            if not isinstance(error, KvflowError):
                self._abandon(error)
            raise

    def _carry_on(self) -> None:
        self._is_dispatching = True
        try:
            while self._events:
                current = self._events.popleft()
                effects = self._core.handle(current, now())
                if LOGGER.isEnabledFor(logging.DEBUG):
                    self._trace(current, effects)
                for effect in effects:
                    self._perform(effect)
        finally:
            self._is_dispatching = False
        self._clock.check()
        self._after_dispatch()

    def start_task(self, run: Callable[..., Awaitable[None]], *args: object) -> None:
        """Start a task on the event loop that lives no longer than the rank."""
        self._tasks.start(run, *args)

    def open_transfer(self, key: int, transfer: AnyTransfer, event: ev.Event) -> None:
        """Put a transfer on record and tell the core that it begins.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining, RankBroken: It may not begin; nothing has changed.
        """
        self._check_open()
        transfer.begin()
        before = self._transfers.get(key)
        self._transfers[key] = transfer
        try:
            self.dispatch(event)
        except KvflowError:
            transfer.never_begin()
            del self._transfers[key]
            if before is not None:
                self._transfers[key] = before
            raise

    def _check_open(self) -> None:
        if self._error is not None:
            raise RankBroken("a task of this rank failed; close it and open another") from self._error
        if not self._is_open:
            raise LocalProtocolError("rank is not open", rank=str(self.me.rank))

    def quarantined(self) -> list[AnyTransfer]:
        """Ended transfers whose pages are not proved quiet: they must not be used again while they are listed."""
        return [transfer for transfer in self._transfers.values() if transfer.memory is Memory.QUARANTINED]

    def release(self, transfer: AnyTransfer) -> None:
        """Take the pages of a transfer in quarantine back although nobody has proved them quiet.

        An operator's last resort, for when it is known from elsewhere that no peer can write to them (or read them)
        any more: its host is off, say. If that is not so, another request gets the wrong bytes.

        Args:
            transfer: One of `quarantined()`; its `memory` is SAFE afterwards.

        Raises:
            LocalProtocolError: It is not in quarantine.
        """
        keys = [key for key, other in self._transfers.items() if other is transfer]
        if not keys or transfer.memory is not Memory.QUARANTINED:
            raise LocalProtocolError("transfer is not in quarantine", room=transfer.room, memory=transfer.memory.value)
        self._log.warning("quarantine_released", room=transfer.room, failure=transfer.failure)
        if self._error is None:
            self.dispatch(ev.QuarantineReleased(keys[0]))
        else:  # nobody reports any more
            transfer.report(transfer.outcome, Memory.SAFE, transfer.failure)
            del self._transfers[keys[0]]

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take nothing new, and wait until what is open has ended: the thing to do on SIGTERM, before leaving.

        Peers are told at once if they ask for something new, so a router soon looks elsewhere.

        Args:
            timeout_s: How long to wait; without limit by default. What is open after that fails when the rank is left.

        Returns:
            Whether every transfer has its outcome, and its pages are safe or in quarantine.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self._check_open()
        self._log.info("rank_draining", rooms=len(self._transfers))
        self._withdraw()
        self.dispatch(ev.DrainStarted(self.failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is draining")))
        return await self._wait_until_settled(math.inf if timeout_s is None else timeout_s)

    def footprint(self, tables: Mapping[str, PageTable]) -> Footprint:
        """What some pages take of the pools."""
        num_pages = num_bytes = 0
        for name, table in tables.items():
            num_pages += len(table.pages)
            num_bytes += len(table.pages) * self._page_bytes[name]
        return Footprint(num_pages, num_bytes)

    def failure(self, reason: FailureReason, detail: str) -> Failure:
        """A failure that this rank or its engine caused."""
        stage = Stage.BOOTSTRAP if reason is FailureReason.PEER_CLOSED else Stage.ENQUEUE
        return self._context.failure(reason, stage, detail)

    # What differs between the two kinds -----------------------------------------------------------------------------

    @abc.abstractmethod
    def _open(self) -> None:
        """Make the sockets and stages, on the event loop; what has to be closed goes into `_resources`."""

    @abc.abstractmethod
    def _runners(self) -> list[Callable[[], Awaitable[None]]]:
        """What has to run for as long as the rank is open."""

    @abc.abstractmethod
    def _carry_out(self, effect: ef.Effect) -> None:
        """Carry out an effect that only this kind of rank knows."""

    @abc.abstractmethod
    def _send(self, peer: PeerId, message: Message) -> None:
        """Send to a greeted peer."""

    @abc.abstractmethod
    def _forget(self, peer: PeerId) -> None:
        """Drop what is held for a peer that has left."""

    @abc.abstractmethod
    def _take_backend_event(self, event: BackendEvent) -> None:
        """Take in what the transport says."""

    def _staging_area(self) -> StagingArea | None:
        """Whose the parts of this rank's staging memory are, if peers write into it."""
        return None

    def _staging_statistics(self) -> StagingStatistics:
        return StagingStatistics()

    def _withdraw(self) -> None:
        """Let nobody find this rank any more."""

    def _after_dispatch(self) -> None:
        """Look at what has changed after a step of the core."""

    # What does not --------------------------------------------------------------------------------------------------

    def _perform(self, effect: ef.Effect) -> None:
        match effect:
            case ef.SendMessage(peer, message):
                self._send(peer, message)
            case ef.CountOddity(kind, peer, room):
                self._oddities.count(kind, peer, room=room)
            case ef.ForgetPeer(peer):
                self._forget(peer)
            case _:
                self._carry_out(effect)

    def _report(self, key: int, effect: ef.ReportSender | ef.ReportReceiver) -> None:
        """Pass on to the engine how a transfer stands; forget it when nothing more can follow."""
        level = logging.INFO if effect.failure is None else logging.WARNING
        if LOGGER.isEnabledFor(level):  # most often it is not, and values cost more than the question
            name, values = describe(effect)
            self._log.log(level, name, **values)
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        if self._error is None:
            transfer.report(effect.outcome, effect.memory, effect.failure)
        elif effect.memory is Memory.SAFE:  # all else was decided when the rank broke
            transfer.report(transfer.outcome, Memory.SAFE, transfer.failure)
        if effect.memory is Memory.SAFE and effect.outcome is not Outcome.PENDING:
            del self._transfers[key]
        if self._is_leaving and not self._is_unsettled():
            self._settled.set()

    def _trace(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        name, values = describe(event)
        self._log.debug(name, **values, effects=[type(effect).__name__ for effect in effects])

    async def _take_events(self) -> None:
        while True:
            for number, event in enumerate(await self._backend.take_events(), 1):
                self._take_backend_event(event)
                if number % EVENTS_AT_ONCE == 0:
                    await anyio.lowlevel.checkpoint()

    def _abandon(self, error: Exception) -> None:
        """Something here has failed, so nobody will report any more: what is open cannot be proved quiet."""
        if self._error is not None:
            return
        self._is_open = False
        self._error = error
        self._log.error("rank_broken", exc_info=error)
        self._withdraw()
        detail = f"a task of this rank failed: {type(error).__name__}: {error}"
        failure = self._context.failure(FailureReason.BROKEN, Stage.ENQUEUE, detail)
        for peer in self._core.connected_peers():
            self._send(peer, Goodbye(peer=self.me, failure=failure))
        for transfer in self._transfers.values():
            outcome = Outcome.FAILED if transfer.outcome is Outcome.PENDING else transfer.outcome
            memory = Memory.SAFE if transfer.memory is Memory.SAFE else Memory.QUARANTINED
            transfer.report(outcome, memory, transfer.failure or failure)
        self._settled.set()

    async def _wait_until_settled(self, timeout_s: float) -> bool:
        """Wait until every transfer is decided and its pages are quiet or in quarantine; say whether that came."""
        self._is_leaving = True
        if self._is_unsettled():
            if self._settled.is_set():  # others who wait have the same event
                self._settled = anyio.Event()
            with anyio.move_on_after(timeout_s):
                await self._settled.wait()
        return not self._is_unsettled()

    def _is_unsettled(self) -> bool:
        return any(not transfer.is_settled for transfer in self._transfers.values())

    def _ignore(self, kind: str) -> None:
        self._oddities.count(kind)

    async def _close(self) -> None:
        """End every transfer, stop the transport and say goodbye. The tasks that did it are ended after this."""
        self._is_open = False
        self.dispatch(ev.ClosingStarted(self.failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is closing")))
        await self._wait_until_settled(self.config.timeouts.drain_s + CLOSE_MARGIN_S)
        for event in await self._backend.aclose():
            self._take_backend_event(event)
        if self._error is None:  # a broken rank has said it already, and why
            for peer in self._core.connected_peers():
                self._send(peer, Goodbye(peer=self.me))
