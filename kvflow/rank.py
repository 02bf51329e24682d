"""The common part of prefill and decode ranks: their life cycle.

A rank runs entirely on the event loop it is opened on, mostly in callbacks: sockets, the transport and the alarm
dispatch events to the core, and the resulting effects are carried out at once. Operations that have to wait run in a
task group. The core is only accessed from that event loop, so no locks are needed.
"""

import abc
import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import ClassVar, Final, Generic, Protocol, Self, TypeVar

from kvflow.admin.messages import Health
from kvflow.aio.alarm import Alarm
from kvflow.aio.pulse import Pulse
from kvflow.aio.shield import run_shielded
from kvflow.aio.tasks import OwnedTasks
from kvflow.aio.yielding_queue import YieldingQueue
from kvflow.answers import RankAnswers, RankFacts, health_of
from kvflow.backends import create_backend
from kvflow.backends.base import Backend, BackendEvent
from kvflow.backends.shared import RankEndpoint, SharedBackend
from kvflow.config import RankConfig
from kvflow.dispatcher import Dispatcher
from kvflow.errors import (
    FailureReason,
    KvflowError,
    LocalProtocolError,
    Stage,
    shorten,
)
from kvflow.geometry.layout import KVLayout
from kvflow.incidents import Incidents
from kvflow.keys import renewed_trust
from kvflow.metrics import Metric, Role, collect_metrics
from kvflow.observe.histograms import Histogram
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import AnomalyLog
from kvflow.offers import OfferBook, OfferQueue
from kvflow.open_transfers import OpenTransfers, QuarantineRecord, QuarantineView
from kvflow.packing.staging import staging_memory
from kvflow.ports import Ports
from kvflow.room import RoomId
from kvflow.stages.context import StageContext, agent_name
from kvflow.standing import Standing
from kvflow.state import events as ev
from kvflow.state.counts import CoreCounts
from kvflow.state.settings import DecodeSettings, PrefillSettings
from kvflow.state.tables import Memory
from kvflow.state.timers import NextTimer
from kvflow.statistics import Observed, PostCounts, RankStatistics
from kvflow.system import system_ports
from kvflow.transfer import Tracer, Transfer, reason_of
from kvflow.trust import Trust, short
from kvflow.wire.messages import Failure, PeerId, RankId

__all__ = ["Rank"]

CLOSE_MARGIN_S: Final = 1.0
"""Additional time, beyond the drain timeout, for the last transfers when closing."""

EVENTS_AT_ONCE: Final = 16
"""Maximum number of transport events handled before the event loop gets its turn."""

INCARNATION_BYTES: Final = 8

SharedEvent = ev.QuarantineReleased | ev.DrainStarted | ev.CloseStarted | ev.TransportClosed | ev.TimePassed
"""Events handled by both cores."""

AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)
AnyEvent = TypeVar("AnyEvent")
AnyEffect = TypeVar("AnyEffect")
Event_contra = TypeVar("Event_contra", contravariant=True)
Effect_co = TypeVar("Effect_co", covariant=True)


class Core(QuarantineView, Protocol[Event_contra, Effect_co]):
    """The common interface of both cores; see `kvflow.state`."""

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


class Rank(Standing, abc.ABC, Generic[AnyTransfer, AnyEvent, AnyEffect]):
    """Base class of both ranks, which document its arguments."""

    _core: Core[AnyEvent | SharedEvent, AnyEffect]
    _role: ClassVar[Role]
    offers: OfferBook | OfferQueue

    def __init__(
        self,
        config: RankConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        ports: Ports | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self._ports = ports or system_ports()
        incarnation = int.from_bytes(self._ports.random_bytes(INCARNATION_BYTES), "little")
        super().__init__(PeerId(RankId(config.instance, config.engine_rank), incarnation))
        if isinstance(backend, SharedBackend):
            backend = RankEndpoint(backend)
        self._backend = backend or create_backend(config.backend, config.backend_options)
        self._trust = config.trust_in_force
        self._staging = staging_memory(config, layout, self._backend.capabilities.descriptor_overhead_s)
        self._times = StageTimes()
        self._transfers = OpenTransfers[AnyTransfer](layout, self._log, tracer)
        self._anomalies = AnomalyLog(self._log, self._ports.now)
        self._loop_lag = Histogram()
        self._pulse = Pulse(self._ports.now, lambda: self._transfers.num_unsettled > 0, self._anomalies.note_hold)
        self._dispatcher = Dispatcher[AnyEvent | SharedEvent, AnyEffect](
            self._perform,
            self._give_up,
            lambda error: self._tasks.fail(error),  # noqa: PLW0108 - made next
            self._ports.now,
            self._log,
        )
        self._request, self._dispatch = self._dispatcher.submit, self._dispatcher.dispatch
        self._now, self._footprint_of = self._ports.now, self._transfers.footprint
        self._tasks = OwnedTasks(self._dispatcher.break_down)
        self._start_task = self._tasks.start
        self._incidents = Incidents(config, self._ports, self._log, self._tasks.start)
        self._transfers.note_incident = self._incidents.note
        self._context: StageContext[AnyEvent | SharedEvent] = StageContext(
            me=self.me,
            config=config,
            ports=self._ports,
            now=self._ports.now,
            dispatch=self._dispatch,
            start_task=self._tasks.start,
            times=self._times,
            pulse=self._pulse,
            anomalies=self._anomalies,
        )
        self._arrived = YieldingQueue[BackendEvent](self._dispatcher.fail, EVENTS_AT_ONCE)
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
            await self._backend.open(agent_name(self.me), self._arrived.put_items, self._tasks.fail)
            await self._backend.register(self._staging.added_to(self.layout) if self._staging else self.layout)
            if isinstance(self._backend, RankEndpoint):
                self._backend.keep(self._staging)
            self._open()
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
            "admin": self._open_admin(),
        }
        self._log.info("rank_opened", **{name: value for name, value in values.items() if value})
        return self

    def _open_admin(self) -> str:
        facts = RankFacts(self._role, self._backend.name, self._backend.paths, self._listens_at(), self._now())
        answers = RankAnswers(self, self._transfers, facts, self._incidents)
        return answers.open_socket(self._ports.open_admin, self._log, self._resources)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._check_loop()
        await run_shielded(self._leave())

    async def _leave(self) -> None:
        try:
            await self._close()
        finally:
            self._dispatcher.is_over = True
            self._transfers.end_proofs()
            self.offers.end_offers(self._new_failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is closed"))
            try:
                await self._incidents.finish()
                self._resources.close()
            finally:
                await self._tasks.close()
        quarantined = len(self.quarantined())
        self._log.log(logging.WARNING if quarantined else logging.INFO, "rank_closed", quarantined=quarantined)

    async def _close(self) -> None:
        """Fail open transfers, say goodbye to the peers and stop the transport. Tasks are still running."""
        self._is_open = False
        self._dispatch(ev.CloseStarted(self._new_failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is closing")))
        await self._transfers.wait_until_settled(self.config.timeouts.drain_s + CLOSE_MARGIN_S)
        await self._backend.aclose()
        self._arrived.take_all()
        self._dispatch(ev.TransportClosed())
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
        self._check_open()
        if self._is_draining:
            return
        self._is_draining = True
        self._log.info("rank_draining", rooms=len(self._transfers.by_key))
        self._unregister()
        self._dispatch(ev.DrainStarted(self._new_failure(FailureReason.PEER_CLOSED, f"{self.me.rank} is draining")))

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
        self._check_open()
        trust = renewed_trust(self._trust, trust)
        self._apply_trust(trust)
        self._trust = trust
        self._log.info("trust_reloaded", public=short(trust.public), peers=len(trust.peers))

    @property
    def is_drained(self) -> bool:
        """True if draining has started and every transfer has an outcome, with its pages safe or in quarantine."""
        return self._is_draining and not self._transfers.num_unsettled

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Start draining, wait until everything has finished, and return `is_drained`.

        Args:
            timeout_s: How long to wait; no limit by default. Transfers still open after that fail when the rank closes.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self.start_drain()
        await self._transfers.wait_until_settled(math.inf if timeout_s is None else timeout_s)
        return self.is_drained

    def _start(
        self,
        handle: Callable[[AnyEvent | SharedEvent, float], Sequence[AnyEffect]],
        settings: PrefillSettings | DecodeSettings,
    ) -> None:
        """Begin to pass events to the core, by calling `handle`; raise ConfigError if they cannot be recorded."""
        self._transfers.core = self._core
        box = self._resources.enter_context(self._incidents.open_box(self.me, settings))
        alarm = Alarm(self._core.timers.next, lambda: self._dispatch(ev.TimePassed()), self._now, self._note_lag)
        self._resources.callback(alarm.close)
        self._dispatcher.start(handle, alarm, box)

    def _give_up(self, error: Exception) -> None:
        """Fail every transfer: from now on the core reports nothing, so pages in use can no longer be proved safe."""
        self._is_open, self._error = False, error
        failure = self._new_failure(FailureReason.BROKEN, f"this rank has failed: {type(error).__name__}: {error}")
        self._unregister()
        self._say_goodbye(failure)
        self._transfers.fail(failure)
        self.offers.end_offers(failure)

    def _note_lag(self, lag_s: float) -> None:
        self._loop_lag.add(lag_s)
        if not self._pulse.is_running:
            self._anomalies.note_hold(lag_s, "at least, as no transfer was open: ")

    def _open_transfer(self, key: RoomId, transfer: AnyTransfer, event: AnyEvent, memory: Memory = Memory.HELD) -> None:
        """Register a transfer, with or without pages, and pass its opening event to the core.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining, RankBroken: It was refused; nothing has changed.
        """
        self._check_open()
        transfer._begin(memory)
        before = self._transfers.add(key, transfer)
        self._pulse.start()
        try:
            self._request(event)
        except KvflowError as error:
            self._transfers.remove_refused(key, transfer, before)
            reason = reason_of(error)
            self._transfers.totals.refused[reason] += 1
            self._note_refused(event, self._new_failure(reason, str(error)))
            raise

    def statistics(self) -> RankStatistics:
        """Return the current counters.

        Raises:
            LocalProtocolError: The rank has not been opened.
        """
        if self._loop is None:
            raise self._not_open()
        observed = Observed(
            times=self._times.copied(),
            transfers=self._transfers.totals.copied(),
            loop_lag=self._loop_lag.copied(),
            oldest_quarantine_s=self._transfers.oldest_quarantine_s,
            paths=self._backend.observed_paths,
        )
        return RankStatistics.from_counts(self._core.counts(), self._post_counts(), self._anomalies, observed)

    def metrics(self) -> tuple[Metric, ...]:
        """Return the series of docs/metrics.md with their current values.

        May be called from any thread; in another one, it waits for the rank's event loop.

        Raises:
            LocalProtocolError: The rank has not been opened.
            TimeoutError: The event loop has not answered within 10 s.
        """
        rank = self.me.rank
        labels = {"role": self._role, "instance_name": rank.instance, "engine_rank": str(rank.engine_rank)}
        return collect_metrics(self._call_on_loop(self.statistics), labels)

    def health(self) -> Health:
        """Return whether the rank can transfer, and why not; from any thread, with the errors of `metrics`."""
        return self._call_on_loop(lambda: health_of(self, self._transfers))

    def _post_counts(self) -> PostCounts:
        """Count writes; a decode rank makes none."""
        return PostCounts()

    def quarantined(self) -> list[QuarantineRecord]:
        """List ended transfers whose pages may still be in use. Do not reuse pages while they are listed.

        Each record names the pages and, for each peer, the missing proof.
        """
        return self._transfers.quarantined()

    def release(self, which: RoomId | QuarantineRecord, *, because: str | None = None) -> None:
        """Release quarantined pages without proof that nothing can touch them.

        A last resort for operators who know by other means that no peer can write to (or read) the pages any more, for
        example because its host is off. If that is wrong, another request gets corrupted data.

        Args:
            which: A room, to release all of its quarantined transfers, or one record from `quarantined()`. The
                transfer's `memory` is SAFE afterwards.
            because: How the operator knows that; for the log line.

        Raises:
            LocalProtocolError: It is not in quarantine, or this is the wrong event loop or thread.
        """
        self._check_loop()
        for key in self._transfers.find_quarantined(which, because):
            if self._transfers.takes_proofs:
                self._dispatch(ev.QuarantineReleased(key))
            else:
                self._transfers.release(key)

    def _log_callback_failed(self, transfer: Transfer, error: BaseException) -> None:
        """Log that a transfer's `on_change` has raised an exception."""
        self._log.error("callback_failed", room=transfer.room, label=transfer.label, exc_info=error)

    def _new_failure(self, reason: FailureReason, detail: str) -> Failure:
        """Return a failure caused by this rank or its engine."""
        stage = Stage.BOOTSTRAP if reason is FailureReason.PEER_CLOSED else Stage.ENQUEUE
        return self._context.failure(reason, stage, detail)

    def _unregister(self) -> None:
        """Stop lookups from finding this rank."""

    def _settle_after_break(self) -> None:
        """Report what closing the transport has proved about the pages of a broken rank."""

    # What differs between the two kinds -----------------------------------------------------------------------------

    @abc.abstractmethod
    def _open(self) -> None:
        """Create the core, sockets and stages on the event loop, and add what must be closed to `_resources`.

        Set what takes the events of the transport, too: `_arrived.take`.
        """

    @abc.abstractmethod
    def _apply_trust(self, trust: Trust) -> None:
        """Switch to other keys, or raise ConfigError if they cannot be used."""

    @abc.abstractmethod
    def _perform(self, effect: AnyEffect) -> None:
        """Carry out an effect."""

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
