"""The service that an engine's decode worker embeds."""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, assert_never

import msgspec
import numpy as np
from typing_extensions import override

from kvflow.backends.base import Backend, BackendEvent
from kvflow.backends.shared import SharedBackend
from kvflow.config import (
    DecodeConfig,
    Endpoint,
    check_argument,
    check_duration,
    check_num_ranks,
    check_priority,
    is_instance_name,
)
from kvflow.directory import Directories
from kvflow.errors import ConfigError, FailureReason, LocalProtocolError, PlanError, Stage
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import WIRE_PAGES, Pages, PageTable, TokenPages, build_page_tables, normalize
from kvflow.geometry.ranges import TokenRange
from kvflow.observe.trace import TransferLine
from kvflow.ports import Ports
from kvflow.rank import Rank
from kvflow.room import RoomId
from kvflow.stages.aggregate import Aggregate
from kvflow.stages.bootstrap import PeerConnections, PeerProofs, RouteCompiler
from kvflow.stages.digests import check_digestible
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.decode.core import DecodeCore
from kvflow.state.settings import DecodeSettings
from kvflow.state.tables import Memory, Outcome
from kvflow.statistics import RankStatistics, StagingStatistics
from kvflow.transfer import Transfer, check_room
from kvflow.wire.hosts import default_host
from kvflow.wire.messages import Ack, Failure, Goodbye, PeerId, RankRecord
from kvflow.wire.ticket import Ticket

__all__ = ["DecodeRank", "Handover", "Prefill", "RoomReceiver"]

SECRET_BYTES = 16

Prefill = str | Endpoint | Mapping[str, object]
"""How an engine refers to a prefill instance: by name, by address, or by a ticket."""


@dataclass(frozen=True)
class Handover:
    """What a complete transfer brought.

    Attributes:
        metadata: From the prefill engine: that of the lowest engine rank that sent any; empty if none did.
        metadata_by_rank: All of it.
        num_bytes: Bytes written into this rank's pages.
        num_notices: Pieces they came in, over all prefill ranks.
        elapsed_s: From the start of the receive to the last notice.
        first_notice_s: From the start to the first notice.
    """

    metadata: bytes
    metadata_by_rank: Mapping[int, bytes]
    num_bytes: int
    num_notices: int
    elapsed_s: float
    first_notice_s: float


class DecodeRank(Rank["RoomReceiver", ev.DecodeEvent, ef.DecodeEffect]):
    """Receives the KV cache of rooms from prefill instances. Use it as an async context manager.

    Args:
        config: Settings.
        layout: The pools to receive into; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name; one that it shares with other ranks of
            this process is a `SharedBackend`.
        ports: The world to use instead of the real one.

    Raises:
        ConfigError: The settings are not those of a decode rank, the layout is none, the backend is not known, the
            settings ask for digests of device memory, or the device has no memory left for `staging_bytes`.
        BackendUnavailable: The transport's library is missing or broken.
        RegistrationError: The transport does not take the memory.
        Unreachable: On entry: this process has no sockets left.
    """

    config: DecodeConfig
    _core: DecodeCore

    def __init__(
        self,
        config: DecodeConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        ports: Ports | None = None,
    ) -> None:
        check_argument("config", config, DecodeConfig)
        check_argument("layout", layout, KVLayout)
        if config.digest_every and not layout.is_on_host:
            raise ConfigError("digests need host memory", digest_every=config.digest_every, memory_kind="VRAM")
        super().__init__(config, layout, backend, ports=ports)
        if config.proofs.queue_pairs_die_with_process_s is not None and not self._backend.capabilities.queue_pairs:
            raise ConfigError(
                "time proves nothing over a transport without queue pairs",
                setting="proofs.queue_pairs_die_with_process_s",
                value=config.proofs.queue_pairs_die_with_process_s,
                backend=self._backend.name,
            )
        self._generations = itertools.count(1)
        self._secret = self._ports.random_bytes(SECRET_BYTES)

    def receive(  # noqa: PLR0913 - each one is a choice of the engine, by name
        self,
        room: RoomId | None = None,
        *,
        prefill: Prefill,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        digest: bool | None = None,
        priority: int = 0,
        label: str | None = None,
    ) -> "RoomReceiver":
        """Start to receive a room; use the result as an async context manager.

        Leaving the block, by any way, means that no write can reach the pages any more (or they are in quarantine).

        Args:
            room: The router's id of the request, the same on both sides; a ticket has it.
            prefill: The instance that computes it: a name in the registry, the `Endpoint` of a rank that answers for
                it, or the ticket that `PrefillRank.ticket` gave.
            tokens: Positions `[start, stop)` that are wanted; `start` is past a prefix that this side has already,
                and `(n, n)` asks for the metadata only.
            pages: For each component of the layout, the pool pages to write `tokens` to: one for each page-sized
                block that the range touches. A `TokenPages` asks for other tokens (a window); for a component of kind
                "slot", the one slot; None says that a component is not wanted.
            num_ranks: Decode ranks that receive this room; all ranks of this instance by default.
            timeout_s: How long the whole transfer may take; from the settings by default.
            digest: Compare what has arrived with digests of what was sent before it counts as complete; a difference
                fails the transfer with the reason `corrupt`. As the settings say (`digest_every`) by default.
            priority: Class of the transfer on every prefill rank, 0 (first) to 7 (last). Where chunks wait for this
                rank, lower ones go first; each `Timeouts.ageing_s` of the prefill rank lifts a chunk by one class.
            label: The engine's own id of the request, for log lines; it does not travel.

        Raises:
            PlanError: A page table does not fit the pool or the tokens, or digests are wanted of device memory.
            ConfigError: `num_ranks`, `timeout_s`, `priority` or `digest` is unusable, or `prefill` needs a registry.
            TicketError: The ticket is malformed, or it is for another room, model or protocol version.
            LocalProtocolError: On entry: the room is being received already, or the rank is not open.
            PagesInUse: On entry: another transfer may still be written to one of the pages.
            CapacityExceeded, RankDraining: On entry: too much is open or in quarantine; the rank is about to close.
            TransferFailed: On exit: the transfer failed, and nobody has been told by `done`.
        """
        digest = _check_digest(digest)
        room, instance, issuer = self._meaning(room, prefill)
        parts, tables = self._wanted(tokens, pages, digest=bool(digest))
        opened = ev.ReceiveOpened(
            room=room,
            generation=0,
            instance=instance,
            ranges={name: part.tokens for name, part in parts.items()},
            pages={name: table.pages.astype(WIRE_PAGES, copy=False).tobytes() for name, table in tables.items()},
            num_decode_ranks=check_num_ranks(self.config.num_ranks if num_ranks is None else num_ranks),
            timeout_s=self._timeout(timeout_s),
            secret=b"",
            footprint=self.footprint(tables),
            priority=check_priority("priority", priority),
            issuer=issuer,
        )
        return RoomReceiver(self, opened, digest, label)

    def _meaning(self, room: RoomId | None, prefill: Prefill) -> tuple[RoomId, ev.InstanceRef, PeerId | None]:
        """Give the room, how its instance is referred to, and who gave its ticket.

        Raises:
            LocalProtocolError, ConfigError, TicketError: As in `receive`.
        """
        if isinstance(prefill, Mapping):
            ticket = Ticket.parse(prefill)
            ticket.check(None if room is None else check_room(room), self.layout.fingerprint)
            return ticket.room, ev.InstanceAt(ticket.address, ticket.issuer.rank.instance), ticket.issuer
        if room is None:
            raise LocalProtocolError("room must be an integer or a string, or come with a ticket", room=room)
        room = check_room(room)
        if isinstance(prefill, Endpoint):
            return room, ev.InstanceAt(str(prefill)), None
        if not is_instance_name(prefill):
            raise LocalProtocolError(
                "prefill must be the name of an instance, an Endpoint or a ticket", prefill=prefill
            )
        if self.config.registry is None:
            raise ConfigError("prefill by name needs a registry", setting="registry", prefill=prefill)
        return room, prefill, None

    def _timeout(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.config.timeouts.transfer_s
        check_duration("timeout_s", timeout_s)
        return timeout_s

    def _wanted(
        self, tokens: TokenRange, pages: Mapping[str, Pages], *, digest: bool
    ) -> tuple[dict[str, TokenPages], dict[str, PageTable]]:
        if digest:
            check_digestible(self.layout)
        parts = normalize(pages, self.layout, tokens)
        if not pages.keys() >= self.layout.by_name.keys():
            unsaid = [name for name in self.layout.by_name if name not in pages]
            raise PlanError("pages must be given for each component, or None", missing=unsaid, given=sorted(pages))
        if not parts:
            raise PlanError("nothing is wanted", components=sorted(pages))
        return parts, build_page_tables(parts, self.layout, distinct=True)

    def open_receiver(self, receiver: "RoomReceiver", opened: ev.ReceiveOpened, digest: bool | None) -> None:
        """Put a receiver on record, under a generation that no transfer of this incarnation has had.

        Args:
            receiver: To be opened.
            opened: What it asks for; generation, digest and secret are filled in here.
            digest: Digests are wanted; as the settings say if None.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining, RankBroken: It may not begin; nothing has changed.
        """
        generation = next(self._generations)
        if digest is None:
            every = self.config.digest_every
            digest = bool(every) and generation % every == 0
        # Asking the system for random bytes each time takes many times as long.
        number = generation.to_bytes(8, "little")
        secret = hashlib.blake2b(number, key=self._secret, digest_size=SECRET_BYTES).digest()
        event = msgspec.structs.replace(opened, generation=generation, digest=digest, secret=secret)
        self.open_transfer(generation, receiver, event)

    def rehearse(self, room: RoomId) -> bool:
        """Run through what will be done when a room that is granted is complete; see `kvflow.PrefillRank.rehearse`.

        Args:
            room: One that is being received.

        Returns:
            Whether it is granted.

        Raises:
            LocalProtocolError: The rank is not open, or this is another event loop or thread.
            RankBroken: It is broken.
        """
        self.check_open()
        rehearsal = self._core.understudy(room, self.now())
        if rehearsal is None:
            return False
        core, notices = rehearsal
        for notice in notices:
            self._aggregate.rehearse(core, notice)
        return True

    def statistics(self) -> RankStatistics:
        """Give counts at this moment.

        Raises:
            LocalProtocolError: The rank was not opened yet.
        """
        self.check_opened()
        core = self._core
        return RankStatistics(
            rooms=core.num_rooms,
            quarantined=core.num_quarantined,
            quarantined_pages=core.quarantine.total.num_pages,
            quarantined_bytes=core.quarantine.total.num_bytes,
            waiting_grants=0,
            queued_chunks=0,
            posted=0,
            timers=len(core.timers),
            peers=core.num_peers,
            anomalies=dict(self._anomalies.counts),
            times=self._times,
            loop_lag=dataclasses.replace(self._loop_lag),
            staging=StagingStatistics(windows_taken=core.windows_taken, windows_free=core.windows_free),
        )

    @override
    async def _own_host(self) -> str | None:
        advertise, registry, towards = self.config.advertise, self.config.registry, self._ports.control.host_towards
        if advertise is not None:
            return advertise.strip("[]")
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
        )
        self._directories = Directories(config.registry, self._ports, self._log, self._take_records)
        self._resources.callback(self._directories.close)
        self._core = DecodeCore(self.me, settings)
        self._record(settings)
        self._connections = PeerConnections(self._context)
        self._resources.callback(self._connections.close)
        self._compiler = RouteCompiler(self._context, self.layout)
        self._proofs = PeerProofs(self._context, backend)
        self._aggregate = Aggregate(self._context, self.layout, backend, self._staging)

    @override
    def _perform(self, effect: ef.DecodeEffect) -> None:  # noqa: C901, PLR0912 - one arm an effect
        match effect:
            case ef.SendMessage(peer, message):
                if isinstance(message, Ack):
                    self._connections.send_ack(peer, message)
                else:
                    self._connections.send(peer, message)
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
            case ef.AwaitFence():
                self._proofs.fence(effect)
            case ef.CountAnomaly(kind, peer, room):
                self._anomalies.count(kind, peer, room=room)
            case ef.LogEvent():
                self._log_event(effect)
            case _:
                assert_never(effect)

    def _report_receiver(self, effect: ef.ReportReceiver) -> None:
        if effect.outcome is not Outcome.PENDING:
            self._aggregate.stop_verifying(effect.generation)
        receiver = self._transfers.get(effect.generation)
        if receiver is not None and effect.received is not None:
            receiver.take(effect.received)
            self._times.add(Stage.AGGREGATE, self._ports.now() - effect.received.first_notice_at)
        if effect.memory is Memory.SAFE:
            self._aggregate.drop(effect.generation)
        self._report(effect.generation, effect)

    @override
    def _take_backend_event(self, event: BackendEvent) -> None:
        self._aggregate.take(event)

    def _take_records(self, instance: ev.InstanceRef, records: tuple[RankRecord, ...], number: int) -> None:
        self.dispatch(ev.InstanceFound(instance, records, number))

    @override
    def _say_goodbye(self, failure: Failure) -> None:
        for peer in self._core.peers_reachable():
            self._connections.send(peer, Goodbye(peer=self.me, failure=failure))


class RoomReceiver(Transfer):
    """One room, as the decode engine receives it. Made by `DecodeRank.receive`.

    Attributes:
        handover: What it has brought, once it is a success.
    """

    __slots__ = ("_digest", "_opened", "_rank", "handover")

    def __init__(self, rank: DecodeRank, opened: ev.ReceiveOpened, digest: bool | None, label: str | None) -> None:
        super().__init__(rank, opened.room, label)
        self.handover: Handover | None = None
        self._rank = rank
        self._opened = opened
        self._digest = digest

    async def done(self) -> Handover:
        """Wait until the pages are complete.

        Raises:
            TransferFailed: They never will be; raised as soon as that is decided. The pages may not be quiet before
                the block is left: `memory` says how they stand.
        """
        await self._wait_until_decided()
        if self.handover is None:
            raise LocalProtocolError("transfer has no result", room=self.room, outcome=self.outcome.value)
        return self.handover

    def take(self, received: ef.ReceivedRoom) -> None:
        """Take in what the core says a complete transfer brought."""
        first = min(received.metadata, default=None)
        self.handover = Handover(
            metadata=b"" if first is None else received.metadata[first],
            metadata_by_rank=received.metadata,
            num_bytes=received.num_bytes,
            num_notices=received.num_notices,
            elapsed_s=self._rank.now() - self._opened_at,
            first_notice_s=received.first_notice_at - self._opened_at,
        )

    @override
    def log_line(self) -> TransferLine:
        return TransferLine(
            role="receive",
            room=self.room,
            outcome=self.outcome,
            prefill=str(self._opened.instance),
            num_bytes=0 if self.handover is None else self.handover.num_bytes,
            num_pages=self._opened.footprint.num_pages,
            elapsed_s=self._rank.now() - self._opened_at,
            failure=self.failure,
            label=self.label,
        )

    @override
    def open(self) -> None:
        self._rank.open_receiver(self, self._opened, self._digest)

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rank.check_loop()
        await self._wait_until_settled()
        if exc is None:
            self._raise_if_untold()

    @override
    def _abort(self) -> None:
        detail = "the decode engine left the room before it was complete"
        self._rank.dispatch(ev.ReceiveAborted(self.room, self._rank.failure(FailureReason.ABORTED, detail)))


def _check_digest(digest: object) -> bool | None:
    """Turn any kind of bool into one; None stays what it is.

    Raises:
        ConfigError: It is neither.
    """
    if digest is None:
        return None
    if not isinstance(digest, (bool, np.bool_)):
        raise ConfigError("digest must be a bool, or None", digest=digest)
    return bool(digest)
