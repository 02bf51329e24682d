"""The prefill side: what an engine embeds in each prefill worker."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self, assert_never

import anyio.lowlevel
from typing_extensions import Unpack, override

from kvflow.aio.flag import Flag
from kvflow.backends.base import Backend
from kvflow.backends.shared import SharedBackend
from kvflow.bounds import Bounds
from kvflow.checks import check_argument
from kvflow.config import PrefillConfig
from kvflow.control.reading import OrderedReading
from kvflow.directory import DIRECTORY_KINDS, DirectoryMessage, DirectoryService, RegistryClient
from kvflow.errors import FailureReason, KvflowError, LocalProtocolError, RemoteProtocolError, Stage, Unreachable
from kvflow.gate.identity import AUTHORIZED, message_denial, name_denial
from kvflow.gate.rates import ListenerGate
from kvflow.gate.sizes import Unread
from kvflow.gate.verdict import ACCEPTED
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import Pages
from kvflow.geometry.ranges import TokenRange
from kvflow.hosts import host_of
from kvflow.observe.trace import TransferLine
from kvflow.options import SendOptions
from kvflow.packing.staging import LocalStaging
from kvflow.ports import Ports
from kvflow.rank import Rank
from kvflow.room import RoomId
from kvflow.stages.agents import PeerAgents
from kvflow.stages.bootstrap import HelloChecks
from kvflow.stages.enqueue import CapacityLine, DeviceWaits, finish_chunk, make_chunk
from kvflow.stages.grants import GrantCollector, RankMessage
from kvflow.stages.planning import Planning
from kvflow.stages.submit import Submit
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.events import Chunk, LayersReady, ReadyEvent
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.quarantine import NO_MEMORY
from kvflow.state.settings import PrefillSettings
from kvflow.state.tables import Memory, Outcome
from kvflow.statistics import PostCounts
from kvflow.transfer import Transfer, check_room
from kvflow.trust import ClientKeys, Trust
from kvflow.wire.codec import Reader, encode
from kvflow.wire.messages import (
    MAX_DOMAIN_BYTES,
    Failure,
    Goodbye,
    Hello,
    Message,
    RankRecord,
    Refuse,
)
from kvflow.wire.ticket import Ticket

__all__ = ["PrefillRank", "RoomSender"]

Request = RankMessage | DirectoryMessage
REQUESTS: Final[Reader[Request]] = Reader(Request)
"""All messages that a prefill rank accepts."""


class PrefillRank(Rank["RoomSender", ev.PrefillEvent, ef.PrefillEffect]):
    """Sends the KV cache of rooms to the decode ranks that ask for it. Use it as an async context manager.

    Args:
        config: Settings.
        layout: The pools to send from; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the configured one; a `SharedBackend` if ranks of this process share it.
        ports: Replacement for the real sockets, clock, threads and random bytes (for tests).

    Raises:
        ConfigError: `config` is not a `PrefillConfig`, `layout` is not a `KVLayout`, the control address cannot be
            bound, the backend is unknown, or the device has not enough memory for `staging_bytes`.
        BackendUnavailable: The transport's library is missing or broken.
        RegistrationError: The transport cannot register the memory.
        Shortage: On entry: this process lacks descriptors or threads.
    """

    config: PrefillConfig
    _core: PrefillCore

    def __init__(
        self,
        config: PrefillConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        ports: Ports | None = None,
    ) -> None:
        check_argument("config", config, PrefillConfig)
        check_argument("layout", layout, KVLayout)
        super().__init__(config, layout, backend, ports=ports)
        self._directory: DirectoryService | None = None
        self._registry: RegistryClient | None = None
        self._endpoint: str | None = None

    @property
    def endpoint(self) -> str:
        """Address of the control socket, "tcp://host:port"; available once the rank has been opened.

        Raises:
            LocalProtocolError: The rank has not been opened.
        """
        if self._endpoint is None:
            raise self.not_open()
        return self._endpoint

    def send(self, room: RoomId, **options: Unpack[SendOptions]) -> "RoomSender":
        """Start sending a room; use the result as an async context manager.

        You can open it before any decode rank has asked for the room and before anything is computed. Once the block
        has exited, for whatever reason, no write reads the source pages any more, or `memory` is QUARANTINED.

        Args:
            room: The router's ID for the request, the same on both sides.
            options: See `kvflow.SendOptions`.

        Raises:
            LocalProtocolError: The room or label is invalid. On entry: the room is in use, or the rank is not open. On
                exit: `finish` was not called although nothing had failed; the transfer is aborted. Call `abort` to give
                up deliberately.
            CapacityExceeded: On entry: too many rooms are open, or too much memory is in quarantine.
            RankDraining: On entry: the rank is about to close.
            TransferFailed: On exit: the transfer failed, and the error was not raised inside the block.
        """
        return RoomSender(self, room, **options)

    def ticket(self, room: RoomId) -> dict[str, object]:
        """Return a ticket: what a decode rank needs to receive a room from this instance. Routers pass it on as is.

        It is a small JSON-serialisable dict. It identifies this process, so decode ranks reject it after this rank has
        restarted. It is signed if `trust` has a ticket key. The room need not be open. Never blocks, and can be called
        from any thread.

        Args:
            room: The router's ID for the request, the same on both sides.

        Raises:
            LocalProtocolError: The room is invalid, or the rank is not open.
            RankBroken: The rank is broken.
        """
        self.check_usable()
        address = self.config.registry or self.endpoint
        ticket = Ticket(check_room(room), address, self.me, self.layout.fingerprint)
        return ticket.signed(self._trust.ticket_keys).as_dict()

    @override
    def _post_counts(self) -> PostCounts:
        submit = self._submit
        return PostCounts(
            posted=submit.num_posted,
            packed_posts=submit.packed.num_posts,
            packed_bytes=submit.packed.num_bytes,
            direct_posts=submit.direct.num_posts,
            direct_bytes=submit.direct.num_bytes,
        )

    @override
    def _listens_at(self) -> str:
        return self.endpoint

    @override
    async def _own_host(self) -> str:
        bind, advertise = self.config.bind, self.config.advertise
        return advertise.strip("[]") if advertise else host_of(bind)

    @override
    def _open(self) -> None:
        backend, capabilities = self._backend, self._backend.capabilities
        if self.config.registry is not None:
            keys = self._registry_keys(self._trust)
            self._registry = RegistryClient(self.config.registry, self._log, self._context, keys=keys)
            self._resources.callback(self._registry.close)
        staging = None
        if self._staging is not None:
            overhead_s = capabilities.descriptor_overhead_s
            staging = LocalStaging(self._staging, self.layout, backend.view, self.config, overhead_s)
        agents = PeerAgents()
        self._submit = Submit(self._context, backend, agents)
        self._arrived.take = self._submit.handle_event
        self._listener = self._ports.control.listen(
            self.config.bind, self.config.advertise, self._on_message, trust=self._trust, on_refused=self._refused
        )
        self._endpoint = self._listener.endpoint
        self._resources.callback(self._close_listener)
        settings = PrefillSettings(
            timeouts=self.config.timeouts,
            limits=Bounds.from_limits(self.config.limits),
            layout=self.layout,
            backend=backend.name,
            in_band_notices=capabilities.in_band_notices,
            max_descriptor_bytes=capabilities.max_descriptor_bytes,
            staging=None if staging is None else staging.settings,
            domain=backend.domain()[:MAX_DOMAIN_BYTES],
            endpoint=self.endpoint,
        )
        self._core = PrefillCore(self.me, settings)
        self._grants = GrantCollector(self._context, self._core, settings, self._send)
        self._start(self._handle, settings)
        self.line = CapacityLine(self._core.queue.full, self._core.rooms.peers_of)
        self._device_waits = DeviceWaits(self._context)
        self._planning = Planning(self._context, self.layout, backend, self._submit, staging)
        self._gate = ListenerGate(self._listener.names_of)
        principal_of = self._gate.principal_of
        self._hellos = HelloChecks(self._context, settings, backend, agents, staging, principal_of)
        self._reading = OrderedReading(
            REQUESTS, self._context, principal_of, self._handle_request, self._reject, self._postpone
        )
        self._publish(backend.name)
        self._resources.callback(self._unregister)

    def _publish(self, backend: str) -> None:
        """Register this rank, or answer lookups of its instance if there is no registry."""
        record = RankRecord(
            peer=self.me,
            num_ranks=self.config.num_ranks,
            endpoint=self.endpoint,
            backend=backend,
            layout=self.layout,
        )
        if self._registry is not None:
            self._registry.publish(record)
        else:
            self._directory = DirectoryService(self._listener, self._gate, self._ports.now, self._anomalies, record)
            self._resources.callback(self._directory.close)

    @override
    def _perform(self, effect: ef.PrefillEffect) -> None:  # noqa: C901, PLR0912 - one case per effect
        match effect:
            case ef.PostPiece(piece):
                self._planning.post_piece(piece)
            case ef.Reply(connection, message):
                self._send(connection, self._submit.with_ends(self._core.peers.claimant(connection), message))
            case ef.ReportGranted(room, wanted):
                if (sender := self._transfers.by_key.get(room)) is not None:
                    sender.report_granted(wanted)
            case ef.ReportQuiesced(room, resume_at):
                if (sender := self._transfers.by_key.get(room)) is not None:
                    sender.report_quiesced(resume_at)
            case ef.ReportSender(room):
                self._transfers.report(room, effect)
            case ef.PlanPiece(piece):
                self._planning.plan_piece(piece)
            case ef.PostPlan(delivery, seq, notice):
                self._planning.post_plan(delivery, seq, notice)
            case ef.DropPlan(delivery, seq):
                self._planning.drop_plan(delivery, seq)
            case ef.AwaitData():
                self._device_waits.start(effect)
            case ef.YieldTurn():
                self._dispatcher.dispatch_soon(ev.TurnContinued())
            case ef.AdmitChunks():
                self.line.admit()
            case ef.CheckHello(connection, hello):
                self._hellos.start(connection, hello)
            case ef.DisconnectTransport(peer):
                self._grants.forget(peer)
                self._hellos.disconnect(peer)
            case ef.CountAnomaly() | ef.LogEvent():
                self._anomalies.perform(effect)
            case _:
                assert_never(effect)

    @override
    def _apply_trust(self, trust: Trust) -> None:
        is_same = trust.keeps(self._trust)
        self._listener.renew(trust)
        if self._registry is not None:
            self._registry.renew(self._registry_keys(trust))
        for connection, peer in self._core.peers.connections().items():
            if name_denial(self._listener.names_of(connection), peer):
                self.dispatch(ev.PeerRevoked(peer))
            elif not is_same:  # all peers with a valid key reconnect, within their lease
                self.dispatch(ev.ReplyLost(connection))

    def _registry_keys(self, trust: Trust) -> ClientKeys | None:
        """Return the keys expected from the registry, or from the rank that acts as the registry for this instance."""
        return trust.for_registry() if trust.registry else trust.for_instance(self.config.instance)

    def _refused(self, kind: str, detail: str) -> None:
        self._anomalies.count(kind, stage=Stage.BOOTSTRAP.value, detail=detail)

    def _close_listener(self) -> None:
        """Close the control socket. Keep its port if writes may still land: a refused port proves that none can."""
        keep_port = self._submit.may_still_land
        self._listener.close(keep_port=keep_port)
        if keep_port:
            self._log.warning("port_kept", endpoint=self.endpoint)

    def _on_message(self, connection: bytes, frames: Sequence[bytes]) -> None:
        try:
            unread = REQUESTS.identify_message(frames)
        except RemoteProtocolError as error:
            self._reject(connection, error, sum(map(len, frames)))
            return
        is_known = self._core.peers.claimant(connection) is not None
        verdict = self._gate.admit(connection, unread, self._ports.now(), is_known=is_known)
        if verdict is not ACCEPTED:
            self._anomalies.carry_out(verdict)
        elif unread.kind in DIRECTORY_KINDS and self._directory is None:
            self._refuse_to_answer(connection, unread)
        else:
            self._reading.parse_message(connection, unread)

    def _refuse_to_answer(self, connection: bytes, unread: Unread) -> None:
        """Drop a message for a registry, because none is here.

        Raises:
            RemoteProtocolError: As in `_reject`.
        """
        detail = f"{self.me.rank} does not answer for its instance: it has a registry"
        self._send(connection, Refuse(peer=self.me, to=None, detail=detail))
        self._anomalies.count(f"unexpected_{unread.kind.__struct_config__.tag}")
        if unread.is_long:
            self._postpone(connection, unread)

    def _handle_request(self, connection: bytes, message: Request, num_bytes: int) -> None:
        denied = ""
        if isinstance(message, AUTHORIZED):
            names, sender = self._listener.names_of(connection), self._core.peers.claimant(connection)
            keys, unix_time = self._trust.capability_keys, self._ports.unix_time()
            denied = message_denial(message, names, sender, self.me.rank.instance, keys, unix_time)
        try:
            if isinstance(message, DirectoryMessage):
                if self._directory is not None:
                    self._directory.handle_message(connection, message)
                return
            if not denied and self._grants.collect_message(connection, message):
                return
        except RemoteProtocolError as error:
            kind = "registration_rejected" if isinstance(message, DirectoryMessage) else "message_rejected"
            self._reject(connection, error, num_bytes, kind)
            return
        principal = self._gate.principal_of(connection) if isinstance(message, Hello) else ""
        self.dispatch(ev.MessageArrived(connection, message, denied, principal, num_bytes))

    def _handle(self, event: ev.PrefillEvent, now: float) -> Sequence[ef.PrefillEffect]:
        effects = self._core.handle(event, now)
        if self._grants.waiting:
            self._grants.follow(event)
        return effects

    def _reject(
        self, connection: bytes, error: RemoteProtocolError, num_bytes: int, kind: str = "message_rejected"
    ) -> None:
        """Count a message that is malformed or dropped.

        Raises:
            RemoteProtocolError: The sender's limit is exceeded, and its connection must be closed.
        """
        verdict = self._gate.reject(kind, connection, num_bytes, self._ports.now())
        peer, stage = self._core.peers.claimant(connection), Stage.BOOTSTRAP.value
        self._anomalies.carry_out(verdict, peer, stage=stage, detail=str(error))

    def _postpone(self, connection: bytes, unread: Unread) -> None:
        """Count a message over a budget that honest peers repeat, for its connection only.

        Raises:
            RemoteProtocolError: It is far more than an honest peer repeats, and the connection must be closed.
        """
        self._anomalies.carry_out(
            self._gate.reject("", connection, len(unread.data), self._ports.now(), is_repeated=True)
        )

    def _send(self, connection: bytes, message: Message) -> None:
        """Send a message. If that fails, the message is lost: it is retransmitted if it matters, or the lease ends."""
        try:
            self._listener.send(connection, encode(message))
        except Unreachable as error:
            self.dispatch(ev.ReplyLost(connection))
            self._anomalies.count("message_lost", stage=Stage.BOOTSTRAP.value, detail=str(error))

    @override
    def _say_goodbye(self, failure: Failure) -> None:
        for connection in list(self._core.peers.connections()):
            self._send(connection, Goodbye(peer=self.me, failure=failure))

    @override
    def _unregister(self) -> None:
        if self._directory is not None:
            self._directory.withdraw()
        if self._registry is not None:
            self._registry.withdraw(self.me)

    @override
    def _note_refused(self, event: ev.PrefillEvent, failure: Failure) -> None:
        if isinstance(event, ev.SendOpened) and failure.reason is FailureReason.CAPACITY:  # else its room is in use
            self.dispatch(ev.SendRefused(event.room, failure))

    @override
    def _settle_after_break(self) -> None:
        """Report all source pages as safe: a closed transport no longer reads them.

        A shared transport stays open; until it has ended every post of this rank, there is no proof.
        """
        if self._submit.num_posted:
            return
        for key in list(self._transfers.by_key):
            self._transfers.release(key)


class RoomSender(Transfer):
    """The sending side of one room. Returned by `PrefillRank.send`.

    Attributes:
        wanted: The tokens `[start, stop)` that decode wants of each component; None until every decode rank has
            granted. Decode already has the tokens before `start`.
        is_quiesced: True if nothing reads the pages of any chunk, and no chunk was offered since `quiesce`.
        resume_at: After `quiesce`, the token at which to continue; None if everything was posted, including the last
            chunk.
    """

    __slots__ = (
        "_footprint",
        "_granted",
        "_has_lease",
        "_is_finished",
        "_is_quiescing",
        "_num_quiesced",
        "_quiesced",
        "_rank",
        "is_quiesced",
        "resume_at",
        "wanted",
    )

    def __init__(self, rank: PrefillRank, room: RoomId, label: str | None = None, *, defer_lease: bool = False) -> None:
        super().__init__(rank, room, label)
        self._has_lease = not defer_lease
        self._rank = rank
        self.wanted: Mapping[str, TokenRange] | None = None
        self.is_quiesced = False
        self.resume_at: int | None = None
        self._quiesced = Flag()
        self._is_quiescing = False
        self._num_quiesced = 0
        self._granted = Flag()
        self._is_finished = False
        self._footprint = NO_MEMORY

    @property
    def layout(self) -> KVLayout:
        """The layout of the pools that the room is sent from."""
        return self._rank.layout

    @property
    def max_metadata_bytes(self) -> int:
        """Maximum length of the metadata for `finish`, in bytes."""
        return self._rank.config.limits.metadata_bytes

    async def chunk(
        self,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        *,
        ready: ReadyEvent | None = None,
        layers: Sequence[LayersReady] = (),
    ) -> None:
        """Send a range of tokens, either computed already, or becoming ready with `ready` or layer by layer (`layers`).

        Returns immediately, unless 1,024 pieces are already waiting for one of this room's decode ranks. If cancelled
        while waiting, nothing has been offered. Do not change the pages until the block has exited or `quiesce` has
        returned.

        Args:
            tokens: Positions `[start, stop)` in the request; must start where the previous chunk stopped.
            pages: For each component that comes with this chunk, the pool pages that hold `tokens`: one for each
                page-sized block that the range touches, so a chunk that begins or ends within a page lists that page
                too. Use a `TokenPages` for tokens other than the chunk's (a window that reaches back); for a component
                of kind "slot", pass its one slot. By the end, everything that decode wants must have been offered;
                anything else is ignored.
            ready: An event to wait for first, such as a `torch.cuda.Event` recorded after the last kernel that writes
                the pages. Its `synchronize` method is called in a worker thread.
            layers: Use instead of `ready` if layers are computed one after another. Each entry says when the pages of
                all (global) layers below its `stop` are ready; entries are in ascending order. The last entry covers
                all remaining layers, whatever its `stop`. Groups are merged until they are large enough for a write
                (`Limits.bytes_per_layer_piece`), so a short chunk is sent in one piece after its last event. Offer the
                chunk after all layers have been launched and their events recorded, or pass an object that also waits
                for that.

        Raises:
            PlanError: A page table does not match the pool or the tokens, layers are out of order, or an event was
                never recorded and would count as done. Nothing was sent, and the room stays open.
            LocalProtocolError: The tokens do not continue the previous chunk (or start after `resume_at`), `finish` was
                called, or `quiesce` has not returned yet.
            TransferFailed: The transfer has failed in the meantime; you need not compute the rest.
        """
        await self.offer(make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers))

    async def finish(
        self,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        *,
        metadata: bytes = b"",
        ready: ReadyEvent | None = None,
        layers: Sequence[LayersReady] = (),
    ) -> None:
        """Send the last tokens (possibly none) and the metadata that the decode engine needs to continue.

        Args:
            tokens: As in `chunk`; `(n, n)` if everything was sent.
            pages: As in `chunk`.
            metadata: Opaque bytes (first token, logprobs, ...). The decode side uses the metadata of the lowest rank
                that sent any.
            ready: As in `chunk`.
            layers: As in `chunk`.

        Raises:
            As in `chunk`; and PlanError if the metadata is too long.
        """
        chunk = make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers)
        await self.offer(finish_chunk(chunk, metadata, self.max_metadata_bytes))

    async def offer(self, chunk: Chunk) -> None:
        """Send a chunk whose arguments have been checked; `chunk` and `finish` use this.

        Raises:
            LocalProtocolError, TransferFailed: As in `chunk`.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if not self.offer_nowait(chunk):
            line, num_quiesced = self._rank.line, self._num_quiesced
            await line.wait(self.room)
            try:
                if num_quiesced == self._num_quiesced:  # else `quiesce` has dropped all waiting chunks of the room
                    self._raise_if_failed()
                    self._offer(chunk)
            finally:
                line.admit()
        if not chunk.last:  # let other tasks run; after the last chunk, the engine waits anyway
            await anyio.lowlevel.cancel_shielded_checkpoint()

    def offer_nowait(self, chunk: Chunk) -> bool:
        """Send a chunk whose arguments have been checked, unless it has to wait for capacity.

        Returns:
            Whether it was offered.

        Raises:
            LocalProtocolError, TransferFailed: As in `chunk`.
        """
        self._check_begun()
        self._raise_if_failed()
        if self._is_quiescing:
            raise LocalProtocolError("room is being quiesced", room=self.room, tokens=chunk.tokens)
        if not self._rank.line.is_open(self.room):
            return False
        self._offer(chunk)
        return True

    def _offer(self, chunk: Chunk) -> None:
        if self._is_finished:  # by now, the room may belong to a later transfer in the core
            raise LocalProtocolError("cannot send chunks after `finish`", room=self.room)
        footprint = self._rank.footprint(chunk.pages)
        self._rank.request(ev.ChunkOffered(self.room, chunk, footprint))
        self._raise_if_failed()
        self._is_finished = chunk.last
        self.is_quiesced = False
        self._footprint = self._footprint.plus(footprint)

    def report_granted(self, wanted: Mapping[str, TokenRange]) -> None:
        """Record that every decode rank has granted."""
        self.wanted = wanted
        self._granted.set()
        self.tell_engine()

    async def quiesce(self) -> int | None:
        """Get the source pages back but keep the room open, for an engine that preempts a request.

        Waits for posted writes and, if some layers of a chunk have been sent, for the rest of that chunk, including its
        device events. Everything else that was offered is dropped, including `finish`. When this returns, nothing reads
        the pages any more and they may be overwritten. Call `chunk` and `finish` again when the tokens have been
        recomputed, in any pages; nothing is sent twice.

        Calling it again while it is in progress, or cancelling it, does not start it a second time.

        Returns:
            The token at which to continue (or earlier): from there on, offer everything again, including windows and
            slots, and call `finish`. None if everything was posted, including the last chunk, and nothing is left to
            offer.

        Raises:
            LocalProtocolError: The transfer was not entered, or this is the wrong event loop.
            TransferFailed: The transfer has failed, or it fails because the pages are still in use after `drain_s`;
                check its `memory`.
        """
        self.quiesce_nowait()
        await self._quiesced.wait()
        self._raise_if_failed()
        return self.resume_at

    def quiesce_nowait(self) -> None:
        """Start `quiesce` without waiting; `is_quiesced` becomes true when it is done.

        Raises:
            LocalProtocolError, TransferFailed: As in `quiesce`.
        """
        self._check_begun()
        self._raise_if_failed()
        if self.outcome is not Outcome.PENDING:  # by now, the room may belong to a later transfer in the core
            self.report_quiesced(None)
        elif not self._is_quiescing:
            self._is_quiescing, self.is_quiesced, self._quiesced = True, False, Flag()
            try:
                self._rank.request(ev.QuiesceAsked(self.room))
            except KvflowError:
                self._is_quiescing = False
                raise
            self._num_quiesced += 1
            self._rank.line.leave(self.room)

    def report_quiesced(self, resume_at: int | None) -> None:
        """Record that nothing reads the posted pages any more."""
        self._note_quiesced(resume_at)
        self.tell_engine()

    def _note_quiesced(self, resume_at: int | None) -> None:
        self._is_quiescing, self.is_quiesced, self.resume_at = False, True, resume_at
        self._is_finished = resume_at is None
        self._quiesced.set()

    @override
    def report(self, outcome: Outcome, memory: Memory, failure: Failure | None) -> None:
        if outcome is Outcome.SUCCESS and self._is_quiescing:
            self._note_quiesced(None)
        super().report(outcome, memory, failure)
        if outcome is not Outcome.PENDING:
            self._granted.set()  # end all waits
            self._quiesced.set()
        if failure is not None:
            self._rank.line.leave(self.room)

    def start_lease(self) -> None:
        """Start `Timeouts.grant_s`, once the other side could ask: the ticket has left. See `PrefillRank.send`.

        Raises:
            LocalProtocolError: The transfer was not entered, or this is the wrong event loop.
        """
        self._check_begun()
        if self.outcome is Outcome.PENDING and not self._has_lease:
            self._has_lease = True
            self._rank.dispatch(ev.LeaseStarted(self.room))

    def reclaim(self, *, with_announced: bool = False) -> None:
        """Fail the transfer because its pages are needed for another one, unless decode needs them.

        Does nothing if a decode rank has granted or announced the room, so it is safe at any time. For engines whose
        memory is short while the pages of finished requests wait for decode ranks that may be dead.

        Args:
            with_announced: An announcement does not count. Decode has no pages for the room yet, so it can compute the
                request itself.

        Raises:
            LocalProtocolError: The transfer was not entered, or this is the wrong event loop.
        """
        self._check_begun()
        if self.outcome is Outcome.PENDING:
            detail = "prefill needs the pages for another request"
            failure = self._rank.failure(FailureReason.CAPACITY, detail)
            self._rank.dispatch(ev.ReclaimAsked(self.room, with_announced, failure))

    async def granted(self) -> Mapping[str, TokenRange]:
        """Wait until every decode rank has granted, and return `wanted`.

        Raises:
            TransferFailed: The transfer failed first.
        """
        self._check_begun()
        await self._granted.wait()
        self._raise_if_failed()
        return self.wanted or {}

    async def delivered(self) -> None:
        """Wait until every decode rank has confirmed that it has received everything.

        The source pages are free earlier: `memory` is SAFE as soon as every write has ended.

        Raises:
            TransferFailed: The transfer has failed.
        """
        await self._wait_until_decided()

    @override
    def log_line(self) -> TransferLine:
        return TransferLine(
            role="send",
            room=self.room,
            outcome=self.outcome,
            prefill=None,
            num_bytes=self._footprint.num_bytes,
            num_pages=self._footprint.num_pages,
            elapsed_s=self._rank.now() - self._opened_at,
            failure=self.failure,
            label=self.label,
        )

    @override
    def open(self) -> None:
        self._rank.open_transfer(self.room, self, ev.SendOpened(self.room, self._has_lease))

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rank.check_loop()
        is_forgotten = exc is None and not self._is_finished and self.outcome is Outcome.PENDING
        try:
            if exc is None and self._is_finished:
                await self._decided.wait()
        finally:
            await self._wait_until_settled()
        if is_forgotten:
            raise LocalProtocolError(
                "block exited without `finish` or `abort`; the transfer was aborted", room=self.room
            )
        if exc is None:
            self._raise_if_untold()

    @override
    def _abort(self) -> None:
        detail = "the prefill engine aborted the transfer"
        self._rank.dispatch(ev.SendAborted(self.room, self._rank.failure(FailureReason.ABORTED, detail)))
