"""The prefill side: what an engine embeds in each prefill worker."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, assert_never

from typing_extensions import Unpack, override

from kvflow.addresses import split_hosts
from kvflow.backends.base import Backend
from kvflow.backends.shared import SharedBackend
from kvflow.bounds import Bounds
from kvflow.checks import check_argument, check_traceparent
from kvflow.config import PrefillConfig
from kvflow.control.reading import OrderedReading
from kvflow.directory import DIRECTORY_KINDS, DirectoryMessage, DirectoryService, RegistryClient, publish
from kvflow.errors import FailureReason, RemoteProtocolError, Stage, Unreachable
from kvflow.gate.identity import AUTHORIZED, message_denial, name_denial
from kvflow.gate.rates import ListenerGate
from kvflow.gate.sizes import Unread
from kvflow.gate.verdict import ACCEPTED
from kvflow.geometry.layout import KVLayout
from kvflow.hosts import host_of
from kvflow.offers import OfferQueue
from kvflow.options import SendOptions
from kvflow.packing.staging import LocalStaging
from kvflow.ports import Ports
from kvflow.rank import Rank
from kvflow.room import RoomId
from kvflow.sender import RoomSender
from kvflow.stages.bootstrap import HelloChecks
from kvflow.stages.context import PeerAgents
from kvflow.stages.enqueue import DeviceWaits
from kvflow.stages.grants import GrantCollector, RankMessage
from kvflow.stages.planning import Planning
from kvflow.stages.submit import Submit
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.settings import PrefillSettings
from kvflow.statistics import PostCounts
from kvflow.transfer import Tracer, check_room
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

__all__ = ["PrefillRank"]

Request = RankMessage | DirectoryMessage
REQUESTS: Final[Reader[Request]] = Reader(Request)
"""All messages that a prefill rank accepts."""


class PrefillRank(Rank[RoomSender, ev.PrefillEvent, ef.PrefillEffect]):
    """Sends the KV cache of rooms to the decode ranks that ask for it. Use it as an async context manager.

    Args:
        config: Settings.
        layout: The pools to send from; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the configured one; a `SharedBackend` if ranks of this process share it.
        ports: Replacement for the real sockets, clock, threads and random bytes (for tests).
        tracer: Makes a span of each transfer, see `kvflow.otel.TransferTracer`.

    Attributes:
        offers: Rooms that other instances offer to this one; needs `PrefillConfig.takes_offers`.

    Raises:
        ConfigError: `config` is not a `PrefillConfig`, `layout` is not a `KVLayout`, the control address cannot be
            bound, or the backend is unknown.
        BackendUnavailable: The transport's library is missing or broken.
        RegistrationError: The transport cannot register the memory.
        Shortage: There is not enough memory for `staging_bytes`; on entry: this process lacks descriptors or threads.
    """

    config: PrefillConfig
    _core: PrefillCore
    offers: OfferQueue
    _role = "prefill"

    def __init__(
        self,
        config: PrefillConfig,
        layout: KVLayout,
        backend: Backend | SharedBackend | None = None,
        *,
        ports: Ports | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        check_argument("config", config, PrefillConfig)
        check_argument("layout", layout, KVLayout)
        super().__init__(config, layout, backend, ports=ports, tracer=tracer)
        self._directory: DirectoryService | None = None
        self._registry: RegistryClient | None = None
        self._withdrawals: list[Callable[[], None]] = []
        self._endpoint: str | None = None
        self._next_call = itertools.count().__next__
        self.offers = OfferQueue(self._check_open, self._dispatch, self._new_failure)

    @property
    def endpoint(self) -> str:
        """Address of the control socket, "tcp://host:port"; available once the rank has been opened.

        Raises:
            LocalProtocolError: The rank has not been opened.
        """
        if self._endpoint is None:
            raise self._not_open()
        return self._endpoint

    def send(self, room: RoomId, **options: Unpack[SendOptions]) -> RoomSender:
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

    def ticket(self, room: RoomId, *, traceparent: str | None = None) -> dict[str, object]:
        """Return a ticket: what a decode rank needs to receive a room from this instance. Routers pass it on as is.

        It is a small JSON-serialisable dict. It identifies this process, so decode ranks reject it after this rank has
        restarted. It is signed if `trust` has a ticket key. The room need not be open. Never blocks, and can be called
        from any thread.

        Args:
            room: The router's ID for the request, the same on both sides.
            traceparent: W3C trace context of the request, for decode (`RoomReceiver.traceparent`). By default, that of
                the span that a tracer has made for the room.

        Raises:
            ConfigError: `traceparent` is malformed.
            LocalProtocolError: The room is invalid, or the rank is not open.
            RankBroken: The rank is broken.
        """
        self._check_usable()
        is_own = self.config.registry_endpoint is None
        address = self.config.registry_endpoint or self.endpoint
        tracer = self._transfers.tracer
        if traceparent is None and tracer is not None:
            traceparent = tracer.traceparent_of(self._transfers.by_key.get(check_room(room))) or None
        context = check_traceparent(traceparent)
        ticket = Ticket(
            check_room(room), address, self.me, self.layout.fingerprint, traceparent=context, own_address=is_own
        )
        return ticket.signed(self._trust.ticket_keys).as_dict()

    @override
    def _post_counts(self) -> PostCounts:
        return self._submit.counts()

    @override
    def _listens_at(self) -> str:
        return self.endpoint

    @override
    async def _own_host(self) -> str:
        bind, advertise = self.config.bind, self.config.advertise
        return split_hosts(advertise)[0] if advertise else host_of(bind)

    @override
    def _open(self) -> None:
        backend, capabilities = self._backend, self._backend.capabilities
        if self.config.registry_endpoint is not None:
            keys = self._registry_keys(self._trust)
            self._registry = RegistryClient(self.config.registry_endpoint, self._log, self._context, keys=keys)
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
            takes_offers=self.config.takes_offers,
        )
        self._core = PrefillCore(self.me, settings)
        self._line = self._core.line
        self._grants = GrantCollector(self._context, self._core, settings, self._send)
        self._start(self._handle, settings)
        self._device_waits = DeviceWaits(self._context)
        self._planning = Planning(self._context, self.layout, backend, self._submit, staging)
        self._gate = ListenerGate(self._listener.names_of)
        principal_of = self._gate.principal_of
        self._hellos = HelloChecks(self._context, settings, backend, agents, staging, principal_of)
        self._reading = OrderedReading(REQUESTS, self._context, principal_of, self._handle_request, self._reject)
        self._publish(backend.name)
        self._resources.callback(self._unregister)

    def _publish(self, backend: str) -> None:
        """Register this rank, or answer lookups of its instance if there is no registry."""
        num_ranks, endpoint = self.config.num_ranks, self.endpoint
        record = RankRecord(peer=self.me, num_ranks=num_ranks, endpoint=endpoint, backend=backend, layout=self.layout)
        if self._registry is not None:
            self._registry.publish(record)
            self._withdrawals.append(partial(self._registry.withdraw, self.me))
        else:
            self._directory = DirectoryService(self._listener, self._gate, self._ports.now, self._anomalies, record)
            self._resources.callback(self._directory.close)
            self._withdrawals.append(self._directory.withdraw)
        if self.config.directory is not None:
            publication = publish(self.config.directory, self._log, self.me, self.endpoint, self._context.start_task)
            self._withdrawals.append(publication.drain)

    @override
    def _perform(self, effect: ef.PrefillEffect) -> None:  # noqa: C901, PLR0912 - one case per effect
        match effect:
            case ef.PostPiece(piece):
                self._planning.post_piece(piece)
            case ef.Reply(connection, message):
                self._send(connection, self._submit.with_ends(self._core.peers.claimant(connection), message))
            case ef.ReportGranted(room, wanted):
                if (sender := self._transfers.by_key.get(room)) is not None:
                    self._transfers.totals.granted_s.add(sender._elapsed_s)
                    sender._report_granted(wanted)
            case ef.ReportQuiesced(room, resume_at):
                if (sender := self._transfers.by_key.get(room)) is not None:
                    sender._report_quiesced(resume_at)
            case ef.ReportSender(room):
                self._transfers.report(room, effect)
            case ef.PassOffer(peer, offer):
                self.offers.add_offer(peer, offer)
            case ef.WithdrawOffer(peer, number):
                self.offers.withdraw_offer(peer, number)
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
            case ef.AdmitChunk(room, call):
                if (sender := self._transfers.by_key.get(room)) is not None:
                    sender._admit_call(call)
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
                self._dispatch(ev.PeerRevoked(peer))
            elif not is_same:  # all peers with a valid key reconnect, within their lease
                self._dispatch(ev.ReplyLost(connection))

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
        elif not self._reading.parse_message(connection, unread):
            self._postpone(connection, unread)

    def _refuse_to_answer(self, connection: bytes, unread: Unread) -> None:
        """Drop a message for a registry, because none is here. Raises as `_reject`."""
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
        self._dispatch(ev.MessageArrived(connection, message, denied, principal, num_bytes))

    def _handle(self, event: ev.PrefillEvent, now: float) -> Sequence[ef.PrefillEffect]:
        effects = self._core.handle(event, now)
        if self._grants.waiting:
            self._grants.follow(event)
        return effects

    def _reject(
        self, connection: bytes, error: RemoteProtocolError, num_bytes: int, kind: str = "message_rejected"
    ) -> None:
        """Count a message that is malformed or dropped.

        Over the sender's limit, this raises RemoteProtocolError: its connection must be closed.
        """
        verdict = self._gate.reject(kind, connection, num_bytes, self._ports.now())
        peer, stage = self._core.peers.claimant(connection), Stage.BOOTSTRAP.value
        self._anomalies.carry_out(verdict, peer, stage=stage, detail=str(error))

    def _postpone(self, connection: bytes, unread: Unread) -> None:
        """Count a message over a budget that honest peers repeat, for its connection only.

        Beyond what an honest peer repeats, this raises as `_reject`.
        """
        self._anomalies.carry_out(
            self._gate.reject("", connection, len(unread.data), self._ports.now(), is_repeated=True)
        )

    def _send(self, connection: bytes, message: Message) -> None:
        """Send a message. If that fails, the message is lost: it is retransmitted if it matters, or the lease ends."""
        try:
            self._listener.send(connection, encode(message))
        except Unreachable as error:
            peer = self._core.peers.last_at(connection)
            self._dispatch(ev.ReplyLost(connection))
            self._anomalies.count("message_lost", peer, detail=str(error))

    @override
    def _say_goodbye(self, failure: Failure) -> None:
        for connection in list(self._core.peers.connections()):
            self._send(connection, Goodbye(peer=self.me, failure=failure))

    @override
    def _unregister(self) -> None:
        for withdraw in self._withdrawals:
            withdraw()

    @override
    def _note_refused(self, event: ev.PrefillEvent, failure: Failure) -> None:
        if isinstance(event, ev.SendOpened) and failure.reason is FailureReason.CAPACITY:  # else its room is in use
            self._dispatch(ev.SendRefused(event.room, failure))

    @override
    def _settle_after_break(self) -> None:
        """Report all source pages as safe: a closed transport no longer reads them.

        A shared transport stays open; until it has ended every post of this rank, there is no proof.
        """
        if self._submit.num_posted:
            return
        for key in list(self._transfers.by_key):
            self._transfers.release(key)
