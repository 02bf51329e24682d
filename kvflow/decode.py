"""The decode side: what an engine embeds in each decode worker."""

import hashlib
import itertools
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import assert_never

import msgspec
from typing_extensions import Unpack, override

from kvflow.addresses import split_hosts
from kvflow.backends.base import Backend
from kvflow.backends.shared import SharedBackend
from kvflow.checks import check_argument
from kvflow.config import DecodeConfig
from kvflow.directory import Directories, open_directory
from kvflow.errors import ConfigError, FailureReason, KvflowError, Stage, TicketError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import Pages
from kvflow.geometry.ranges import TokenRange
from kvflow.hosts import default_host
from kvflow.observe.totals import RECEIVED_AT_ONCE, Received
from kvflow.observe.trace import slow_values
from kvflow.offers import OfferBook
from kvflow.options import ReceiveOptions
from kvflow.ports import Ports
from kvflow.rank import Rank
from kvflow.receive_checks import Prefill, ReceiveChecks, ReceiveRequest, Wanted
from kvflow.receiver import RoomReceiver
from kvflow.room import RoomId
from kvflow.stages.aggregate import Aggregate
from kvflow.stages.bootstrap import PeerConnections, PeerProofs, RouteCompiler
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.settings import DecodeSettings
from kvflow.state.tables import Memory
from kvflow.transfer import Tracer, reason_of
from kvflow.trust import Trust
from kvflow.wire.messages import Ack, Failure, Goodbye

__all__ = ["DecodeRank", "Prefill"]

SECRET_BYTES = 16


class DecodeRank(Rank[RoomReceiver, ev.DecodeEvent, ef.DecodeEffect]):
    """Receives the KV cache of rooms from prefill instances. Use it as an async context manager.

    Args:
        config: Settings.
        layout: The pools to receive into; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the configured one; a `SharedBackend` if ranks of this process share it.
        ports: Replacement for the real sockets, clock, threads and random bytes (for tests).
        tracer: Makes a span of each transfer, see `kvflow.otel.TransferTracer`.

    Attributes:
        offers: Offers rooms of this instance to others.

    Raises:
        ConfigError: `config` is not a `DecodeConfig`, `layout` is not a `KVLayout`, the backend is unknown, or
            digests of device memory are configured.
        BackendUnavailable: The transport's library is missing or broken.
        RegistrationError: The transport cannot register the memory.
        Shortage: There is not enough memory for `staging_bytes`; on entry: this process lacks descriptors or threads.
    """

    config: DecodeConfig
    _core: DecodeCore
    offers: OfferBook
    _role = "decode"

    def __init__(
        self,
        config: DecodeConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        ports: Ports | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        check_argument("config", config, DecodeConfig)
        check_argument("layout", layout, KVLayout)
        if config.digest_every and not layout.is_on_host:
            raise ConfigError("digests require host memory", digest_every=config.digest_every, memory_kind="VRAM")
        super().__init__(config, layout, backend, ports=ports, tracer=tracer)
        if config.proofs.queue_pairs_die_with_process_s is not None and not self._backend.capabilities.queue_pairs:
            raise ConfigError(
                "queue_pairs_die_with_process_s requires a transport with queue pairs",
                setting="proofs.queue_pairs_die_with_process_s",
                value=config.proofs.queue_pairs_die_with_process_s,
                backend=self._backend.name,
            )
        self._checks = ReceiveChecks(config, layout, lambda: self._trust, self._footprint_of)
        self._check_wanted = self._checks.check_wanted
        self._generations = itertools.count(1)
        self._secret = self._ports.random_bytes(SECRET_BYTES)
        self._totals = self._transfers.totals
        self.offers = OfferBook(self._checks, self._check_open, self._request, self._dispatch)

    def receive(
        self,
        room: RoomId | None = None,
        *,
        prefill: Prefill,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        digest: bool | None = None,
        **options: Unpack[ReceiveOptions],
    ) -> RoomReceiver:
        """Start receiving a room; use the result as an async context manager.

        Once the block has exited, for whatever reason, no write can reach the pages any more, or they are in
        quarantine.

        Args:
            room: The router's ID for the request, the same on both sides; not needed with a ticket.
            prefill: The instance that computes the room: a name in the registry, the address of the rank that acts as
                its registry (an `Endpoint`, or a string like `PrefillRank.endpoint`), or a ticket from
                `PrefillRank.ticket`.
            tokens: Wanted positions `[start, stop)`. Set `start` after a prefix that this side already has; `(n, n)`
                asks for the metadata only.
            pages: For each component of the layout, the pool pages to write `tokens` to: one for each page-sized block
                that the range touches. Use a `TokenPages` to ask for a different token range (a window); for a
                component of kind "slot", pass its one slot; pass None for a component that is not wanted.
            digest: Compare digests of the sent and the received data before the transfer counts as complete; a
                difference fails it with the reason `corrupt`. By default, as configured (`digest_every`).
            options: See `kvflow.ReceiveOptions`.

        Raises:
            PlanError: A page table does not match the pool or the tokens, or digests were requested for device memory.
            ConfigError: `num_ranks`, `timeout_s`, `priority`, `digest`, `capability` or `traceparent` is invalid, or
                `prefill` needs a registry.
            TicketError: The ticket is malformed, not signed as required, for another room, model or protocol version,
                or its address is not in `allowed_hosts`.
            LocalProtocolError: `room`, `prefill` or `label` is invalid. On entry: the room is already being received,
                or the rank is not open.
            PagesInUse: On entry: another transfer may still write to one of the pages.
            CapacityExceeded: On entry: too many transfers are open, or too much memory is in quarantine.
            RankDraining: On entry: the rank is draining.
            TransferFailed: On exit: the transfer failed, and `done` has not raised it.
        """
        asked = self._check_request(room, prefill, **options)
        try:
            wanted = self._check_wanted(tokens, pages, digest=digest, timeout_s=asked.timeout_s)
        except KvflowError as error:
            self._decline_soon(_declined(asked.opened, self._new_failure(reason_of(error), str(error))))
            raise
        return RoomReceiver(self, asked, asked.opened, wanted)

    def announce(
        self, room: RoomId | None = None, *, prefill: Prefill, **options: Unpack[ReceiveOptions]
    ) -> RoomReceiver:
        """Tell prefill that a room will be received, before pages are allocated. Use the result as with `receive`.

        Prefill then keeps its pages as long as this rank is alive, instead of only for `Timeouts.grant_s`. Meanwhile
        the instance is looked up and connected. Once you have pages, call `RoomReceiver.grant`; from then on it behaves
        like `receive`. Until then `memory` is SAFE. If prefill fails the room first, this transfer fails too.

        Args:
            room: As in `receive`.
            prefill: As in `receive`.
            options: See `kvflow.ReceiveOptions`.

        Raises:
            ConfigError: `num_ranks`, `timeout_s`, `priority`, `capability` or `traceparent` is invalid, or `prefill`
                needs a registry.
            TicketError: As in `receive`.
            LocalProtocolError: `room`, `prefill` or `label` is invalid. On entry: the room is already being received,
                or the rank is not open.
            CapacityExceeded: On entry: too many transfers are open, or too much memory is in quarantine.
            RankDraining: On entry: the rank is draining.
            TransferFailed: On exit: the transfer failed, and `done` has not raised it.
        """
        asked = self._check_request(room, prefill, **options)
        timeout_s = self._checks.timeout_of(asked.timeout_s)
        opened = msgspec.structs.replace(asked.opened, timeout_s=timeout_s, is_announced=True)
        return RoomReceiver(self, asked, opened, None)

    def decline(
        self, room: RoomId | None = None, *, prefill: Prefill, detail: str, capability: str | None = None
    ) -> None:
        """Tell prefill that a room will not be received here, so that it fails the room and frees its pages at once.

        For a request that the engine itself rejects. A `receive` or `announce` that raises has already told prefill,
        unless its arguments do not say whom. A room that is being received from the same instance is left alone: abort
        it instead. Only queues, and may be called from any thread.

        Args:
            room: As in `receive`.
            prefill: As in `receive`. A ticket may be for another model or protocol version.
            detail: Why, for log lines and for the failure on the prefill side (reason `aborted`).
            capability: As in `receive`; without a valid one, a prefill rank that requires it does not obey.

        Raises:
            ConfigError, TicketError, LocalProtocolError: As in `receive`.
            RankBroken: The rank is broken.
        """
        self._check_usable()
        asked = self._checks.check_request(room, prefill, capability=capability)
        self._decline_soon(_declined(asked.opened, self._new_failure(FailureReason.ABORTED, detail)))

    def _check_request(
        self, room: RoomId | None, prefill: Prefill, **options: Unpack[ReceiveOptions]
    ) -> ReceiveRequest:
        """Check the arguments that do not depend on pages; decline a room whose ticket cannot lead to a handshake."""
        asked = self._checks.check_request(room, prefill, **options)
        if asked.ticket is not None:
            try:
                asked.ticket.check_compatible(self.layout.fingerprint)
            except TicketError as error:
                self._decline_soon(_declined(asked.opened, self._new_failure(FailureReason.REFUSED, str(error))))
                raise
        return asked

    def _decline_soon(self, declined: ev.RoomDeclined) -> None:
        """Pass a decline to the core on the event loop, under a new generation. May be called from any thread."""
        if self._loop is None or not self._is_usable:
            return
        declined = msgspec.structs.replace(declined, generation=next(self._generations))
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._dispatch, declined)

    @override
    def _note_refused(self, event: ev.DecodeEvent, failure: Failure) -> None:
        if isinstance(event, ev.ReceiveOpened):
            self._decline_soon(_declined(event, failure))

    def _open_receiver(self, receiver: RoomReceiver, opened: ev.ReceiveOpened, wanted: Wanted | None) -> int:
        """Open a receiver under a new generation, which no other transfer of this incarnation uses, and return it.

        Raises as `_open_transfer`. Nothing is wanted of a room that is only announced.
        """
        if receiver.trace_context.is_malformed:
            self._anomalies.count("traceparent_malformed")
        generation = next(self._generations)
        # Cheaper by a large factor than reading random bytes from the system each time.
        number = generation.to_bytes(8, "little")
        secret = hashlib.blake2b(number, key=self._secret, digest_size=SECRET_BYTES).digest()
        if wanted is None:
            event = msgspec.structs.replace(opened, generation=generation, secret=secret)
            self._open_transfer(generation, receiver, event, Memory.SAFE)
            return generation
        event = msgspec.structs.replace(
            opened,
            generation=generation,
            secret=secret,
            ranges=wanted.ranges,
            pages=wanted.pages,
            timeout_s=wanted.timeout_s,
            footprint=wanted.footprint,
            digest=self._wants_digest(generation, wanted),
        )
        self._open_transfer(generation, receiver, event)
        return generation

    def _grant_pages(self, room: RoomId, generation: int, wanted: Wanted) -> None:
        """Provide the pages of an announced room. If this raises, nothing has changed."""
        digest = self._wants_digest(generation, wanted)
        self._request(
            ev.ReceiveGranted(room, generation, wanted.ranges, wanted.pages, wanted.timeout_s, wanted.footprint, digest)
        )

    def _wants_digest(self, generation: int, wanted: Wanted) -> bool:
        if wanted.digest is not None:
            return wanted.digest
        every = self.config.digest_every
        return bool(every) and generation % every == 0

    @override
    async def _own_host(self) -> str | None:
        advertise, towards = self.config.advertise, self._ports.control.host_towards
        registry = self.config.registry_endpoint
        if advertise is not None:
            return split_hosts(advertise)[0]
        return await (default_host(towards) if registry is None else towards(registry))

    @override
    def _open(self) -> None:
        backend, config = self._backend, self.config
        windows = None
        if self._staging is not None:
            windows = self._staging.windows(slot_bytes=config.staging_slot_bytes, num_slots=config.staging_slots)
        settings = DecodeSettings(
            timeouts=config.timeouts,
            limits=config.limits,
            layout=self.layout,
            backend=backend.name,
            backend_metadata=backend.metadata(),
            ends_with_process=backend.capabilities.ends_with_process,
            staging=windows,
            proofs=config.proofs,
            agent=backend.shared_agent,
            registry=config.registry or "",
            allowed_hosts=tuple(config.allowed_hosts),
        )
        self._directories = Directories(
            config.registry_endpoint,
            self._log,
            self._context,
            lambda instance, records, number: self._dispatch(ev.InstanceFound(instance, records, number)),
            lambda instance, detail, is_short: self._dispatch(ev.LookUpRefused(instance, detail, is_short)),
            self._trust,
        )
        self._resources.callback(self._directories.close)
        if config.directory is not None:
            self._directories.follow(
                open_directory(config.directory),
                self._checks.check_instance,
                lambda instance: self._dispatch(ev.InstanceDoubted(instance)),
            )
        self._core = DecodeCore(self.me, settings)
        self._connections = PeerConnections(self._context, self._trust)
        self._resources.callback(self._connections.close)
        self._compiler = RouteCompiler(self._context, self.layout)
        self._proofs = PeerProofs(self._context, backend)
        self._aggregate = Aggregate(self._context, self.layout, backend, self._staging)
        self._arrived.take = self._aggregate.handle_event
        self._start(self._core.handle, settings)

    @override
    def _perform(self, effect: ef.DecodeEffect) -> None:  # noqa: C901, PLR0912 - one case per effect
        match effect:
            case ef.SendMessage(peer, message):
                if isinstance(message, Ack):
                    self._connections.send_ack(peer, message)
                else:
                    self._connections.send(peer, message)
            case ef.ReportOffer(number, failure):
                self.offers.note_answer(number, failure)
            case ef.ReportReceiver():
                self._report_receiver(effect)
            case ef.WatchNotices(active):
                self._backend.watch(active=active)
            case ef.ScatterStaged():
                self._aggregate.scatter(effect)
            case ef.VerifyDigests():
                self._aggregate.verify(effect)
            case ef.LookUp(instance, number):
                self._directories.look_up(instance, number)
            case ef.CompileRoutes():
                self._compiler.start(effect)
            case ef.Connect(peer, endpoint):
                self._connections.connect(peer, endpoint)
            case ef.Disconnect(peer):
                self._connections.disconnect(peer)
            case ef.ProbePeer():
                self._proofs.probe(effect)
            case ef.ProbeAddress():
                self._proofs.probe_address(effect)
            case ef.WaitForFence():
                self._proofs.fence(effect)
            case ef.WaitForLanding():
                self._proofs.await_landing(effect)
            case ef.NoteEnds():
                self._proofs.note_ends(effect)
            case ef.CountAnomaly() | ef.LogEvent():
                self._anomalies.perform(effect)
            case _:
                assert_never(effect)

    def _report_receiver(self, effect: ef.ReportReceiver) -> None:
        receiver = self._transfers.by_key.get(effect.generation)
        if receiver is not None and effect.received is not None:
            handover = receiver._note_received(effect.received)
            totals = self._totals
            totals.received.append(
                Received(handover.elapsed_s, handover.first_notice_s, handover.num_bytes, handover.timeline)
            )
            if len(totals.received) >= RECEIVED_AT_ONCE:
                totals.count_received()
            if handover.elapsed_s > totals.slow_s:
                self._anomalies.log_some(logging.INFO, "receive_slow", slow_values(receiver._log_line()))
            self._times.stages[Stage.AGGREGATE].add(self._ports.now() - effect.received.first_notice_at)
        self._aggregate.follow(effect)
        self._transfers.report(effect.generation, effect)

    @override
    def _apply_trust(self, trust: Trust) -> None:
        self._connections.renew(trust)
        self._directories.renew(trust)

    @override
    def _say_goodbye(self, failure: Failure) -> None:
        for peer in self._core.peers_reachable():
            self._connections.send(peer, Goodbye(peer=self.me, failure=failure))


def _declined(opened: ev.ReceiveOpened, failure: Failure) -> ev.RoomDeclined:
    return ev.RoomDeclined(opened.room, 0, opened.instance, failure, opened.issuer, opened.capability)
