"""The common part of prefill and decode ranks: the life cycle, the core with its alarm, and the transfers.

A rank runs entirely on the event loop it is opened on, mostly in callbacks: sockets, the transport and the alarm
dispatch events to the core, and the resulting effects are carried out at once. Operations that have to wait run in a
task group. The core is only accessed from that event loop, so no locks are needed.
"""

import abc
import asyncio
import dataclasses
import logging
import math
import os
import stat
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

import anyio
import numpy as np

from kvflow.aio.alarm import Alarm
from kvflow.aio.pulse import Pulse
from kvflow.aio.shield import run_shielded
from kvflow.aio.tasks import OwnedTasks
from kvflow.aio.yielding_queue import YieldingQueue
from kvflow.backends import create_backend
from kvflow.backends.base import Backend, BackendEvent
from kvflow.backends.shared import RankEndpoint, SharedBackend
from kvflow.config import RankConfig
from kvflow.control.reading import ReadingContext
from kvflow.errors import (
    CapacityExceeded,
    ConfigError,
    FailureReason,
    KvflowError,
    LocalProtocolError,
    RankBroken,
    RankDraining,
    Stage,
    shorten,
)
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import WIRE_PAGES, PageTable
from kvflow.keys import renewed_trust
from kvflow.observe.logs import LOGGER, get_logger
from kvflow.observe.times import Duration, StageTimes
from kvflow.observe.trace import AnomalyLog, describe, log_transfer
from kvflow.packing.staging import staging_memory
from kvflow.ports import Ports
from kvflow.quarantine import QuarantineRecord
from kvflow.room import RoomId
from kvflow.stages.context import StageContext, agent_name
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.counts import CoreCounts
from kvflow.state.quarantine import Footprint, MissingProof, ProofKind, Quarantine
from kvflow.state.recorder import Recorder
from kvflow.state.settings import DecodeSettings, PrefillSettings
from kvflow.state.tables import Memory, Outcome
from kvflow.state.timers import NextTimer
from kvflow.statistics import RankStatistics, StagingStatistics
from kvflow.system import system_ports
from kvflow.transfer import Transfer, check_room, reason_of
from kvflow.trust import Trust, short
from kvflow.wire.messages import Failure, PeerId, RankId

__all__ = ["Rank"]

CLOSE_MARGIN_S: Final = 1.0
"""Additional time, beyond the drain timeout, for the last transfers when closing."""

EVENTS_AT_ONCE: Final = 16
"""Maximum number of transport events handled before the event loop gets its turn."""

STARVED_S: Final = 0.5
"""How long the event loop may be held up before that is logged: less than a second is left until peers notice."""

INCARNATION_BYTES: Final = 8

SharedEvent = ev.QuarantineReleased | ev.DrainStarted | ev.CloseStarted | ev.TransportClosed | ev.TimePassed
"""Events handled by both cores."""

AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)
AnyEvent = TypeVar("AnyEvent")
AnyEffect = TypeVar("AnyEffect")
Event_contra = TypeVar("Event_contra", contravariant=True)
Effect_co = TypeVar("Effect_co", covariant=True)


def _open_for_owner(path: str, flags: int) -> int:
    """Open a file that nobody but its owner may read, even if it already exists."""
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)
    return descriptor


class PostCounts(NamedTuple):
    """Writes that are under way, and those so far; see `StagingStatistics`."""

    posted: int = 0
    packed_posts: int = 0
    packed_bytes: int = 0
    direct_posts: int = 0
    direct_bytes: int = 0


class Core(Protocol[Event_contra, Effect_co]):
    """The common interface of both cores; see `kvflow.state`."""

    quarantine: Quarantine

    @property
    def timers(self) -> NextTimer:
        """Its timers, the earliest of which says when it needs a `TimePassed` event."""

    def handle(self, event: Event_contra, now: float, /) -> Sequence[Effect_co]:
        """Handle an event, and return the resulting effects.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining: The engine's request is not allowed; nothing has
                changed.
        """

    def counts(self) -> CoreCounts:
        """Count what is open, waits, or is in quarantine."""

    def missing_proofs(self, key: Any, /) -> Sequence[MissingProof]:
        """Return the missing proofs for a transfer's pages."""

    def pages_of(self, key: Any, /) -> Mapping[str, bytes]:
        """Return the pages of a transfer as `WIRE_PAGES`, by component."""


class Rank(abc.ABC, Generic[AnyTransfer, AnyEvent, AnyEffect]):
    """Base class of both ranks. Use it as an async context manager.

    Args:
        config: Settings.
        layout: Memory to send from or receive into; it must stay allocated until the rank is closed.
        backend: A transport to use instead of the configured one.
        ports: Replacement for the real sockets, clock, threads and random bytes (for tests).
    """

    _core: Core[AnyEvent | SharedEvent, AnyEffect]

    def __init__(
        self,
        config: RankConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        ports: Ports | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self._ports = ports or system_ports()
        incarnation = int.from_bytes(self._ports.random_bytes(INCARNATION_BYTES), "little")
        self.me = PeerId(RankId(config.instance, config.engine_rank), incarnation)
        if isinstance(backend, SharedBackend):
            backend = backend.for_rank()
        self._backend = backend or create_backend(config.backend, config.backend_options)
        self._trust = config.trust_in_force
        self._staging = staging_memory(config, layout, self._backend.capabilities.descriptor_overhead_s)
        self._page_bytes = {component.name: component.page_bytes for component in layout.components}
        self._times = StageTimes()
        self._loop_lag = Duration()
        self._pulse = Pulse(self._ports.now, lambda: self._num_unsettled > 0, self._note_hold)
        self._log = get_logger(instance=config.instance, engine_rank=config.engine_rank)
        self._anomalies = AnomalyLog(self._log, self._ports.now)
        self._tasks = OwnedTasks(self._break)
        self._context: StageContext[AnyEvent | SharedEvent] = StageContext(
            me=self.me,
            config=config,
            ports=self._ports,
            now=self._ports.now,
            dispatch=self.dispatch,
            start_task=self._tasks.start,
            times=self._times,
            pulse=self._pulse,
            log=self._log,
            anomalies=self._anomalies,
        )
        self._reading_context = ReadingContext(self._ports, self._anomalies, self._tasks.start)
        self._arrived: YieldingQueue[BackendEvent] = YieldingQueue(self._take_backend_event, self._fail, EVENTS_AT_ONCE)
        self._transfers: dict[RoomId, AnyTransfer] = {}
        self._num_unsettled = 0
        self._settled = anyio.Event()
        self._events: deque[AnyEvent | SharedEvent] = deque()
        self._is_dispatching = False
        self._is_draining = False
        self._is_open = False
        self._is_over = False
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._recorder: Recorder | None = None
        self._resources = ExitStack()

    # Life cycle -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise LocalProtocolError("rank can be opened only once; create a new one", rank=str(self.me.rank))
        self._loop = asyncio.get_running_loop()
        try:
            self._ports.control.reserve()
            if (host := await self._own_host()) is not None:
                self._backend.advertise(host)
            self._host = host
            await self._backend.open(agent_name(self.me), self._arrived.put, self._tasks.fail)
            await self._backend.register(self._staging.added_to(self.layout) if self._staging else self.layout)
            if isinstance(self._backend, RankEndpoint):
                self._backend.keep(self._staging)
            self._open()
            self._alarm = Alarm(
                self._core.timers.next, lambda: self.dispatch(ev.TimePassed()), self._ports.now, self._note_lag
            )
            self._resources.callback(self._alarm.close)
            self._resources.callback(self._pulse.close)
            await self._tasks.open()
        except BaseException:
            self._resources.close()
            await run_shielded(self._backend.aclose())
            raise
        self._is_open = True
        if self.config.trust is not None and self.config.trust.is_plain:
            self._log.warning("plain_transport")
        values = {
            "incarnation": f"{self.me.incarnation:016x}",
            "backend": self._backend.name,
            "paths": self._backend.paths,
            "advertise": self._host,
            "endpoint": self._listens_at(),
            "registry": self.config.registry,
            "num_ranks": self.config.num_ranks,
            "layout": self.layout.summary,
            "fingerprint": shorten(self.layout.fingerprint),
        }
        self._log.info("rank_opened", **{name: value for name, value in values.items() if value})
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.check_loop()
        await run_shielded(self._leave())

    async def _leave(self) -> None:
        try:
            await self._close()
        finally:
            self._is_over = True
            for transfer in self._transfers.values():
                transfer.mark_rank_closed()
            try:
                self._resources.close()
            finally:
                await self._tasks.close()
        quarantined = len(self.quarantined())
        self._log.log(logging.WARNING if quarantined else logging.INFO, "rank_closed", quarantined=quarantined)

    async def _close(self) -> None:
        """Fail open transfers, say goodbye to the peers and stop the transport. Tasks are still running."""
        self._is_open = False
        self.dispatch(ev.CloseStarted(self.failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is closing")))
        await self._wait_until_settled(self.config.timeouts.drain_s + CLOSE_MARGIN_S)
        await self._backend.aclose()
        self._arrived.take_all()
        self.dispatch(ev.TransportClosed())
        if self._error is not None:
            self._settle_after_break()

    def start_drain(self) -> None:
        """Refuse new work and let open transfers finish. Call this on SIGTERM, before leaving the rank.

        New requests from peers are refused at once, and lookups no longer find this rank, so routers move on. A prefill
        engine may keep sending chunks of open rooms. `is_drained` becomes true when everything has finished. Calling it
        again has no effect.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self.check_open()
        if self._is_draining:
            return
        self._is_draining = True
        self._log.info("rank_draining", rooms=len(self._transfers))
        self._unregister()
        self.dispatch(ev.DrainStarted(self.failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is draining")))

    def reload_trust(self, trust: Trust | None = None) -> None:
        """Replace the keys without a restart, for example on SIGHUP.

        Peers that are no longer listed are disconnected, and their transfers fail. New handshakes use the new lists. If
        this rank's own key changes, its connections are re-established, so add the new key to the other side's lists
        first.

        Args:
            trust: The new keys; by default they are reread from the directory they were loaded from.

        Raises:
            ConfigError: The keys cannot be read or used; nothing has changed.
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self.check_open()
        trust = renewed_trust(self._trust, trust)
        self._apply_trust(trust)
        self._trust = trust
        self._log.info("trust_reloaded", public=short(trust.public), peers=len(trust.peers))

    @property
    def is_drained(self) -> bool:
        """True if draining has started and every transfer has an outcome, with its pages safe or in quarantine."""
        return self._is_draining and not self._num_unsettled

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Start draining, and wait until everything has finished.

        Args:
            timeout_s: How long to wait; no limit by default. Transfers still open after that fail when the rank closes.

        Returns:
            The value of `is_drained`.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self.start_drain()
        await self._wait_until_settled(math.inf if timeout_s is None else timeout_s)
        return self.is_drained

    def check_loop(self) -> None:
        """Check that the call comes from the event loop and thread that the rank was opened on.

        Raises:
            LocalProtocolError: It does not.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop and self._loop is not None:
            raise LocalProtocolError("rank must be used on the event loop that opened it", rank=str(self.me.rank))

    def check_opened(self) -> None:
        """Check that the rank has been opened.

        Raises:
            LocalProtocolError: It has not.
        """
        if self._loop is None:
            raise self.not_open()

    def not_open(self) -> LocalProtocolError:
        """Return the error for a call that requires an open rank."""
        message = "rank is not open any more" if self._loop else "rank is not open; enter it with `async with` first"
        return LocalProtocolError(message, rank=str(self.me.rank))

    def check_open(self) -> None:
        """Check that the rank is open and that the call comes from its event loop.

        Raises:
            LocalProtocolError: The rank is not open, or the call comes from another event loop or thread.
            RankBroken: The rank is broken.
        """
        self.check_loop()
        self.check_usable()

    @property
    def is_usable(self) -> bool:
        """True if the rank is open and not broken."""
        return self._is_open and self._error is None

    def check_usable(self) -> None:
        """Check that the rank is open. Can be called from any thread.

        Raises:
            LocalProtocolError: The rank is not open.
            RankBroken: The rank is broken.
        """
        if self._error is not None:
            raise RankBroken("rank has failed; close it and open another one") from self._error
        if not self._is_open:
            raise self.not_open()

    def start_task(self, run: Callable[..., Awaitable[None]], *args: object) -> None:
        """Start a task on the event loop. It is cancelled when the rank is closed."""
        self._tasks.start(run, *args)

    # The core -------------------------------------------------------------------------------------------------------

    def request(self, event: AnyEvent | SharedEvent) -> None:
        """Pass a request of the engine to the core, and carry out the effects.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining: The request is not allowed now; nothing has changed.
            RankBroken: The rank is broken.
        """
        self.check_open()
        self._submit_request(event)

    def _submit_request(self, event: AnyEvent | SharedEvent) -> None:
        if self._is_dispatching:
            raise LocalProtocolError("rank cannot be used from within its own callbacks")
        try:
            effects = self._handle(event)
        except (LocalProtocolError, CapacityExceeded, RankDraining):
            raise
        except Exception as error:
            self._log.error("event_failed", event_type=type(event).__name__)
            self._fail(error)
            raise RankBroken("rank has failed; close it and open another one") from error
        self._carry_out(event, effects)

    def dispatch(self, event: AnyEvent | SharedEvent) -> None:
        """Pass an event to the core, and carry out the effects. Never raises: an exception breaks the rank.

        An event dispatched while other effects are being carried out waits until they are done. Events are dropped once
        the rank is closed or broken.
        """
        if self._is_over:
            return
        self._events.append(event)
        if not self._is_dispatching:
            self._carry_out(None, ())

    def _dispatch_soon(self, event: AnyEvent | SharedEvent) -> None:
        """Dispatch an event after the event loop has had a turn."""
        asyncio.get_running_loop().call_soon(self.dispatch, event)

    def _note_lag(self, lag_s: float) -> None:
        self._loop_lag.add(lag_s)
        if not self._pulse.is_running:
            self._note_hold(lag_s, "at least, as no transfer was open: ")

    def _note_hold(self, held_s: float, prefix: str = "") -> None:
        if held_s > STARVED_S:
            detail = f"{prefix}the engine held the GIL or the event loop, or this process was suspended"
            self._anomalies.count("event_loop_starved", held_s=round(held_s, 3), detail=detail)

    def _count_anomaly(self, effect: ef.CountAnomaly) -> None:
        self._anomalies.count(effect.kind, effect.peer, room=effect.room, detail=effect.detail or None)

    def _log_event(self, effect: ef.LogEvent) -> None:
        level = logging.WARNING if effect.is_warning else logging.INFO
        self._anomalies.log(level, effect.name, effect.values)

    def _carry_out(self, event: AnyEvent | SharedEvent | None, effects: Sequence[AnyEffect]) -> None:
        """Carry out effects, then handle the queued events."""
        self._is_dispatching = True
        num_done = 0
        try:
            while True:
                if event is not None and LOGGER.isEnabledFor(logging.DEBUG):
                    self._trace(event, effects)
                for num_done, effect in enumerate(effects):  # noqa: B007 - for the log, if one fails
                    self._perform(effect)
                if not self._events or self._error is not None:
                    break
                event, effects, num_done = self._events.popleft(), (), 0
                effects = self._handle(event)
            self._alarm.check()
        except BaseException as error:
            left = [type(effect).__name__ for effect in effects[num_done:]]
            self._log.error("event_failed", event_type=type(event).__name__, effects_left=left)
            if not isinstance(error, Exception):
                self._break(RuntimeError(f"interrupted by {type(error).__name__}"))
                raise
            self._fail(error)
        finally:
            self._is_dispatching = False
            if self._error is not None:
                self._events.clear()

    def _handle(self, event: AnyEvent | SharedEvent) -> Sequence[AnyEffect]:
        now = self._ports.now()
        if self._recorder is None:
            return self._core.handle(event, now)
        try:
            effects = self._core.handle(event, now)
        except KvflowError as error:
            self._record_event(event, now, (), error)
            raise
        self._record_event(event, now, effects)
        return effects

    def _record(self, settings: PrefillSettings | DecodeSettings) -> None:
        """Start recording the core, if recording is configured.

        Raises:
            ConfigError: The file cannot be written.
        """
        path = self.config.record
        if path is None:
            return
        try:
            file = self._resources.enter_context(open(path, "wb", 0, opener=_open_for_owner))  # noqa: SIM115 - the stack closes it
            self._recorder = Recorder(file, self.me, settings)
        except OSError as error:
            raise ConfigError("file cannot be written", record=str(path), detail=str(error)) from error

    def _record_event(self, event: Any, now: float, effects: Sequence[Any], error: KvflowError | None = None) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.record(event, now, effects, error)
        except OSError as failure:  # such as a full disk; the rank continues without recording
            self._recorder = None
            self._log.error("recording_ended", detail=str(failure))

    def _trace(self, event: Any, effects: Sequence[Any]) -> None:
        name, values = describe(event)
        self._log.debug(name, **values, effects=[type(effect).__name__ for effect in effects])

    def _fail(self, error: Exception) -> None:
        """Break the rank, and make its exit raise the error."""
        self._tasks.fail(error)
        self._break(error)

    def _break(self, error: Exception) -> None:
        """Break the rank: from now on the core reports nothing, so pages in use can no longer be proved safe."""
        if self._error is not None:
            return
        self._is_open = False
        self._alarm.close()
        self._error = error
        self._log.error("rank_broken", exc_info=error)
        failure = self.failure(FailureReason.BROKEN, f"this rank has failed: {type(error).__name__}: {error}")
        self._unregister()
        self._say_goodbye(failure)
        for transfer in list(self._transfers.values()):
            outcome = Outcome.FAILED if transfer.outcome is Outcome.PENDING else transfer.outcome
            memory = Memory.SAFE if transfer.memory is Memory.SAFE else Memory.QUARANTINED
            transfer.report(outcome, memory, transfer.failure or failure)
        self._num_unsettled = 0
        self._settled.set()

    # Transfers ------------------------------------------------------------------------------------------------------

    def open_transfer(self, key: RoomId, transfer: AnyTransfer, event: AnyEvent, memory: Memory = Memory.HELD) -> None:
        """Register a transfer and pass its opening event to the core. The transfer may have no pages yet.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining, RankBroken: The transfer was refused; nothing has
                changed.
        """
        self.check_open()
        transfer.begin(memory)
        before = self._transfers.get(key)
        self._transfers[key] = transfer
        self._num_unsettled += 1
        self._pulse.start()
        try:
            self._submit_request(event)
        except KvflowError as error:
            transfer.mark_refused()
            if self._error is None:
                self._num_unsettled -= 1
            del self._transfers[key]
            if before is not None:
                self._transfers[key] = before
            self._note_refused(event, self.failure(reason_of(error), str(error)))
            raise

    def statistics(self) -> RankStatistics:
        """Return the current counters.

        Raises:
            LocalProtocolError: The rank has not been opened.
        """
        self.check_opened()
        counts, posts = self._core.counts(), self._post_counts()
        return RankStatistics(
            rooms=counts.rooms,
            quarantined=counts.quarantined,
            quarantined_pages=counts.quarantined_pages,
            quarantined_bytes=counts.quarantined_bytes,
            announced=counts.announced,
            waiting_grants=counts.waiting_grants,
            queued_chunks=counts.queued_chunks,
            posted=posts.posted,
            timers=counts.timers,
            peers=counts.peers,
            anomalies=dict(self._anomalies.counts),
            postponed=dict(self._anomalies.postponed),
            times=self._times,
            loop_lag=dataclasses.replace(self._loop_lag),
            staging=StagingStatistics(
                packed_posts=posts.packed_posts,
                packed_bytes=posts.packed_bytes,
                direct_posts=posts.direct_posts,
                direct_bytes=posts.direct_bytes,
                slots_taken=counts.slots_taken,
                slots_lost=counts.slots_lost,
                windows_taken=counts.windows_taken,
                windows_free=counts.windows_free,
            ),
        )

    def _post_counts(self) -> PostCounts:
        """Count writes; a decode rank makes none."""
        return PostCounts()

    def quarantined(self) -> list[QuarantineRecord]:
        """List ended transfers whose pages may still be in use. Do not reuse pages while they are listed.

        Each record names the pages and, for each peer, the missing proof.
        """
        return [self._record_of(key, transfer) for key, transfer in self._transfers.items() if transfer.is_quarantined]

    def release(self, which: RoomId | QuarantineRecord) -> None:
        """Release quarantined pages without proof that nothing can touch them.

        A last resort for operators who know by other means that no peer can write to (or read) the pages any more, for
        example because its host is off. If that is wrong, another request gets corrupted data.

        Args:
            which: A room, to release all of its quarantined transfers, or one record from `quarantined()`. The
                transfer's `memory` is SAFE afterwards.

        Raises:
            LocalProtocolError: It is not in quarantine, or this is the wrong event loop or thread.
        """
        self.check_loop()
        room = which.room if isinstance(which, QuarantineRecord) else check_room(which)
        keys = [key for key, transfer in self._transfers.items() if transfer.is_quarantined and transfer.room == room]
        if isinstance(which, QuarantineRecord):
            keys = [key for key in keys if key == which.key]
        if not keys:
            raise LocalProtocolError("room is not in quarantine", room=room)
        for key in keys:
            self._release(key, self._transfers[key])

    def _release(self, key: RoomId, transfer: AnyTransfer) -> None:
        self._log.warning("quarantine_released", room=transfer.room, failure=transfer.failure)
        if self._error is None and not self._is_over:
            self.dispatch(ev.QuarantineReleased(key))
        else:  # the core no longer reports
            transfer.report(transfer.outcome, Memory.SAFE, transfer.failure)
            del self._transfers[key]

    def _record_of(self, key: RoomId, transfer: AnyTransfer) -> QuarantineRecord:
        pages = {
            name: np.frombuffer(data, WIRE_PAGES).astype(np.int32) for name, data in self._core.pages_of(key).items()
        }
        takes_proofs = self._error is None and not self._is_over
        return QuarantineRecord(
            room=transfer.room,
            label=transfer.label,
            key=key,
            pages=pages,
            num_bytes=sum(len(indices) * self._page_bytes[name] for name, indices in pages.items()),
            since_s=transfer.quarantined_s,
            failure=transfer.failure,
            missing=tuple(self._core.missing_proofs(key) if takes_proofs else [MissingProof("", "", ProofKind.BROKEN)]),
        )

    def _log_quarantined(self, key: RoomId, transfer: AnyTransfer) -> None:
        record = self._record_of(key, transfer)
        self._log.warning(
            "pages_quarantined",
            room=record.room,
            pages={name: len(pages) for name, pages in record.pages.items()},
            num_bytes=record.num_bytes,
            missing=[proof.detail for proof in record.missing],
            quarantined=len(self._core.quarantine),
        )

    def log_callback_failed(self, transfer: Transfer, error: BaseException) -> None:
        """Log that a transfer's `on_change` has raised an exception."""
        self._log.error("callback_failed", room=transfer.room, label=transfer.label, exc_info=error)

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._ports.now()

    def footprint(self, tables: Mapping[str, PageTable]) -> Footprint:
        """Return the number of pages and bytes that page tables occupy in the pools."""
        num_pages = num_bytes = 0
        for name, table in tables.items():
            num_pages += len(table.pages)
            num_bytes += len(table.pages) * self._page_bytes[name]
        return Footprint(num_pages, num_bytes)

    def failure(self, reason: FailureReason, detail: str) -> Failure:
        """Return a failure caused by this rank or its engine."""
        stage = Stage.BOOTSTRAP if reason is FailureReason.PEER_CLOSED else Stage.ENQUEUE
        return self._context.failure(reason, stage, detail)

    def _report(self, key: RoomId, effect: ef.ReportSender | ef.ReportReceiver) -> None:
        """Report the state of a transfer to the engine, and forget the transfer once nothing more can follow."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        was_pending, was_settled, before = transfer.outcome is Outcome.PENDING, transfer.is_settled, transfer.memory
        transfer.report(effect.outcome, effect.memory, effect.failure)
        is_quarantined = effect.memory is Memory.QUARANTINED
        is_over = effect.outcome is not Outcome.PENDING
        if was_pending and is_over and LOGGER.isEnabledFor(logging.WARNING if effect.failure else logging.DEBUG):
            log_transfer(self._log, transfer.log_line())
        if is_quarantined and before is not Memory.QUARANTINED:
            self._log_quarantined(key, transfer)
        elif before is Memory.QUARANTINED and not is_quarantined:
            self._log.info("quarantine_left", room=transfer.room, quarantined=len(self._core.quarantine))
        if effect.memory is Memory.SAFE and is_over:
            del self._transfers[key]
        if transfer.is_settled and not was_settled:
            self._num_unsettled -= 1
            if not self._num_unsettled:
                self._settled.set()

    def _unregister(self) -> None:
        """Stop lookups from finding this rank."""

    def _settle_after_break(self) -> None:
        """Report what closing the transport has proved about the pages of a broken rank."""

    async def _wait_until_settled(self, timeout_s: float) -> None:
        """Wait until every transfer has an outcome, with its pages safe or in quarantine, or until the timeout."""
        with anyio.move_on_after(timeout_s):
            while self._num_unsettled:
                if self._settled.is_set():
                    self._settled = anyio.Event()
                await self._settled.wait()

    # What differs between the two kinds -----------------------------------------------------------------------------

    @abc.abstractmethod
    def _open(self) -> None:
        """Create the core, sockets and stages on the event loop, and add what must be closed to `_resources`."""

    @abc.abstractmethod
    def _apply_trust(self, trust: Trust) -> None:
        """Switch to other keys.

        Raises:
            ConfigError: The keys cannot be used.
        """

    @abc.abstractmethod
    def _perform(self, effect: AnyEffect) -> None:
        """Carry out an effect."""

    @abc.abstractmethod
    def _take_backend_event(self, event: BackendEvent) -> None:
        """Handle an event from the transport."""

    def _listens_at(self) -> str:
        """Return the address at which others connect to this rank; empty if it only connects to others."""
        return ""

    @abc.abstractmethod
    async def _own_host(self) -> str | None:
        """Return the host at which peers reach this process; None if unknown."""

    @abc.abstractmethod
    def _note_refused(self, event: AnyEvent, failure: Failure) -> None:
        """Tell the other side that a transfer was refused here."""

    @abc.abstractmethod
    def _say_goodbye(self, failure: Failure) -> None:
        """Tell every peer that this rank is broken."""
