"""The service that an engine's prefill worker embeds."""

import itertools
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from types import TracebackType

import anyio
import anyio.lowlevel
import msgspec
from typing_extensions import Self, override

from kvflow.backends.base import Backend, BackendEvent, PostEnded, PostInDoubt
from kvflow.config import PrefillConfig
from kvflow.errors import FailureReason, PlanError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import Pages, check_parts, spell_out
from kvflow.geometry.tokens import TokenRange, check_range
from kvflow.rank import Rank
from kvflow.registry import RegistryClient
from kvflow.stages.bootstrap import PrefillBootstrap
from kvflow.stages.digests import OwnMemory
from kvflow.stages.enqueue import Enqueue
from kvflow.stages.planning import Planning
from kvflow.stages.staging import local_staging, slots_of
from kvflow.stages.submit import Submit
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.events import Chunk, LayersReady, ReadyEvent
from kvflow.state.tables import Memory, Outcome
from kvflow.state.window import Cost
from kvflow.statistics import RankStatistics, StagingStatistics
from kvflow.transfer import Transfer
from kvflow.wire.channel import Listener
from kvflow.wire.messages import Card, Failure, Message, PeerId

__all__ = ["PrefillRank", "RoomSender"]


class PrefillRank(Rank["RoomSender"]):
    """Sends the KV cache of rooms to the decode ranks that ask for it. Use it as an async context manager.

    Args:
        config: Settings.
        layout: The pools to send from; they must stay allocated until the rank is closed.
        backend: A transport to use instead of the one that the settings name.

    Raises:
        ConfigError: The control address cannot be bound, the backend is not known, or the device has no memory left for
            `staging_bytes`.
        BackendUnavailable: The transport's library is missing or broken.
        RegistrationError: The transport does not take the memory.
    """

    def __init__(self, config: PrefillConfig, layout: KVLayout, backend: Backend | None = None) -> None:
        super().__init__(config, layout, backend)
        self._bind = (config.bind, config.advertise)
        self._settings = config
        self._is_turn = False

    @property
    def endpoint(self) -> str:
        """Address of the control socket, once the rank is open."""
        return self._listener.endpoint

    def send(self, room: int) -> "RoomSender":
        """Start to send a room; use the result as an async context manager.

        It may be started before any decode rank has asked, and before anything is computed. Leaving the block, by any
        way, means that no post can read the source pages any more (or `memory` says that they are quarantined).

        Args:
            room: The router's id of the request, the same on both sides.

        Raises:
            LocalProtocolError: On entry: the room is in use, or the rank is not open.
            CapacityExceeded: On entry: too many rooms are open, or too much memory is in quarantine.
            RankDraining: On entry: the rank is about to close.
            TransferFailed: On exit: the transfer failed.
        """
        return RoomSender(self, room)

    def _open(self) -> None:
        self._listener = self._resources.enter_context(closing(Listener(*self._bind)))
        self._registry = self._resources.enter_context(closing(RegistryClient(self.config.registry, self._log)))
        self._resources.callback(self._registry.unregister, self.me)
        staging = local_staging(self._staging, self._settings, self.layout, self._backend)
        self._slots = slots_of(staging, self._core.slots)
        self._bootstrap = PrefillBootstrap(
            self._context, self.layout, self._backend, self._listener, self._on_message, staging=staging
        )
        geometry = self._bootstrap.geometry
        self._enqueue = Enqueue(self._context, self._cost, self._plan_next, self._slots)
        memory = OwnMemory(self.layout, self._backend.view, self._backend.capabilities.max_descriptor_bytes)
        end_job = self._enqueue.end
        self._submit = Submit(self._context, self._backend, end_job, self._send)
        self._planning = Planning(
            self._context,
            self._enqueue.next_job,
            self._submit.offer,
            geometry,
            end_job,
            memory,
            staging=staging,
            without_slots=self._enqueue.without_slots,
        )

    def _runners(self) -> list[Callable[[], Awaitable[None]]]:
        card = Card(
            peer=self.me,
            num_ranks=self.config.num_ranks,
            endpoint=self.endpoint,
            backend=self._backend.name,
            layout=self.layout,
        )
        return [
            self._bootstrap.run,
            self._planning.run,
            self._registry.run,
            lambda: self._registry.keep_registered(card),
        ]

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.EnqueueChunk():
                self._enqueue.put(effect)
            case ef.OfferSlots(peer):
                self._enqueue.offer_slots(peer)
            case ef.PostPlan():
                self._submit.post(effect)
            case ef.DropPlan(delivery):
                self._submit.drop(effect)
                self._planning.drop(delivery)
            case ef.DropChunks(delivery):
                self._enqueue.drop(delivery)
                self._planning.drop(delivery)
            case ef.ReportSender():
                if effect.memory is Memory.SAFE:
                    self._planning.drop_room(effect.room)
                self._report(effect.room, effect)

    def _send(self, peer: PeerId, message: Message) -> None:
        self._bootstrap.send(peer, message)

    def _forget(self, peer: PeerId) -> None:
        self._bootstrap.forget(peer)

    def _withdraw(self) -> None:
        self._registry.unregister(self.me)

    def _on_message(self, peer: PeerId, message: Message) -> None:
        self.dispatch(ev.MessageReceived(peer, message))

    def _take_backend_event(self, event: BackendEvent) -> None:
        match event:
            case PostEnded():
                self._submit.ended(event)
            case PostInDoubt():
                self._submit.in_doubt(event)
            case _:
                self._ignore("notice_on_prefill_rank")

    def _after_dispatch(self) -> None:
        if self._is_turn:
            self._is_turn = False
            self._planning.plan_next()

    def _plan_next(self) -> None:
        self._is_turn = self._is_dispatching
        if not self._is_dispatching:  # what is carried out may still drop what it has brought
            self._planning.plan_next()

    def _cost(self, effect: ef.EnqueueChunk) -> Cost:
        """What a part of a chunk takes of its peer's window; nothing if the peer is gone."""
        geometry = self._bootstrap.geometry(effect.delivery.peer)
        if geometry is None:
            return Cost(0, 0)
        max_bytes = self._backend.capabilities.max_descriptor_bytes
        return geometry.cost(effect.ranges, effect.grant.ranges, max_bytes, effect.layers)

    def _staging_statistics(self) -> StagingStatistics:
        return self._submit.statistics(self._slots.local, self._core.slots)

    @override
    def statistics(self) -> RankStatistics:
        return super().statistics()._replace(queued_chunks=self._enqueue.num_queued, posted=self._submit.num_posted)

    def has_room(self, room: int) -> bool:
        """Say whether a chunk of this room may be offered without waiting."""
        return self._enqueue.has_room(self._peers(room))

    async def wait_for_room(self, room: int) -> None:
        """Wait while too many chunks wait for a decode rank that has asked for this room."""
        await self._enqueue.wait_for_room(lambda: self._peers(room))

    def _peers(self, room: int) -> list[PeerId]:
        sender = self._core.senders.rooms.get(room)
        return list(sender.deliveries) if sender is not None else []


class RoomSender(Transfer):
    """One room, as the prefill engine sends it. Made by `PrefillRank.send`."""

    __slots__ = ("_is_finished", "_rank", "_waits")

    def __init__(self, rank: PrefillRank, room: int) -> None:
        super().__init__(room)
        self._rank = rank
        self._is_finished = False
        self._waits: list[anyio.CancelScope] = []

    async def chunk(
        self,
        tokens: TokenRange,
        pages: Mapping[str, Pages],
        *,
        ready: ReadyEvent | None = None,
        layers: Sequence[LayersReady] = (),
    ) -> None:
        """Send tokens that are computed, or will be when `ready` is, or layer by layer as `layers` says.

        Returns at once unless too many chunks wait already for a decode rank of this room (`Limits.queued_chunks`);
        cancelled while it waits, it has offered nothing. The pages must stay as they are until the block is left.

        Args:
            tokens: Positions `[start, stop)` in the request; must continue the chunk before.
            pages: For each component that comes with this chunk, the pool pages that hold `tokens`: one for each
                page-sized block that the range touches, so a chunk that begins or ends within a page lists that page
                too. A `Part` names other tokens than those of the chunk (a window that reaches back); for a component
                of kind "slot", the one slot. What decode wants must have come by the end; what it does not want is
                ignored.
            ready: What to wait for first: its `synchronize` is called in a worker thread. A `torch.cuda.Event` that
                was recorded after the last kernel that writes the pages.
            layers: Instead of `ready`, if layers are computed one after another: when what `pages` has of all global
                layers below each `stop` is there, in ascending order. The last entry stands for all layers that remain,
                whatever its `stop`. Groups are joined until they are worth a write (`Limits.bytes_per_layer_piece`), so
                that a short chunk goes in one piece after its last event. A `torch.cuda.Event` that was never recorded
                counts as done: offer the chunk when all layers are launched, or pass an object that waits for that too.

        Raises:
            PlanError: A page table does not fit the pool or the tokens, or layers are out of order. Nothing was sent;
                the room stays open.
            LocalProtocolError: The tokens do not continue the chunk before, or the room is not open.
            TransferFailed: The transfer has failed in the meantime; there is no need to compute the rest.
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
        """Send the last tokens, which may be none, and what the decode engine needs to go on.

        Args:
            tokens: As in `chunk`; `(n, n)` if everything was sent.
            pages: As in `chunk`.
            metadata: Opaque: first token, logprobs, ... The decode side takes that of the lowest rank that sent any.
            ready: As in `chunk`.
            layers: As in `chunk`.

        Raises:
            As in `chunk`; and PlanError if the metadata is too long.
        """
        chunk = make_chunk(self._rank.layout, tokens, pages, ready=ready, layers=layers)
        await self.offer(finish_chunk(chunk, metadata))

    async def offer(self, chunk: Chunk) -> None:
        """Send a chunk whose page tables are checked already; `chunk` and `finish` come down to this.

        Raises:
            As in `finish`.
        """
        limit = self._rank.config.limits.metadata_bytes
        if len(chunk.metadata) > limit:
            raise PlanError("metadata is too long", room=self.room, num_bytes=len(chunk.metadata), limit=limit)
        await anyio.lowlevel.checkpoint_if_cancelled()
        if not self._rank.has_room(self.room):
            await self._wait_for_room()
        self._raise_if_failed()
        self._rank.dispatch(ev.ChunkOffered(self.room, chunk, self._rank.footprint(chunk.pages)))
        self._is_finished = chunk.last
        await anyio.lowlevel.cancel_shielded_checkpoint()  # others get their turn, but the chunk is on its way before

    @override
    def report(self, outcome: Outcome, memory: Memory, failure: Failure | None) -> None:
        super().report(outcome, memory, failure)
        if failure is not None:
            for wait in self._waits:
                wait.cancel()

    async def _wait_for_room(self) -> None:
        """Wait until a chunk may be offered, or until the room has failed: it must hear of that at once."""
        if self.failure is not None:
            return
        with anyio.CancelScope() as wait:
            self._waits.append(wait)
            try:
                await self._rank.wait_for_room(self.room)
            finally:
                self._waits.remove(wait)

    async def delivered(self) -> None:
        """Wait until every decode rank has said that it has everything.

        The source pages are free before that: `memory` is SAFE as soon as every write has ended.

        Raises:
            TransferFailed: That will not happen.
        """
        self._check_begun()
        await self._decided.wait()
        self._raise_if_failed()

    @override
    def open(self) -> None:
        self._rank.open_transfer(self.room, self, ev.SendOpened(self.room))

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_abandoned = exc is None and not self._is_finished
        try:
            if exc is None and self._is_finished:
                await self._decided.wait()
        finally:
            await self._end(exc)
        if exc is None and not is_abandoned:
            self._raise_if_failed()

    def _abort(self) -> None:
        detail = "the prefill engine left the room before it was delivered"
        self._rank.dispatch(ev.SendAborted(self.room, self._rank.failure(FailureReason.ABORTED, detail)))


def finish_chunk(chunk: Chunk, metadata: bytes) -> Chunk:
    """Make a chunk the last one.

    Raises:
        PlanError: The metadata is not bytes.
    """
    if not isinstance(metadata, (bytes, bytearray, memoryview)):
        raise PlanError("metadata must be bytes", type=type(metadata).__name__)
    return msgspec.structs.replace(chunk, last=True, metadata=bytes(metadata))


def make_chunk(
    layout: KVLayout,
    tokens: TokenRange,
    pages: Mapping[str, Pages],
    *,
    ready: ReadyEvent | None = None,
    layers: Sequence[LayersReady] = (),
) -> Chunk:
    """Check what an engine says about a chunk; `RoomSender.chunk` has the meaning of the arguments.

    Raises:
        PlanError: A page table does not fit the pool or the tokens, or layers are out of order.
    """
    tokens = check_range(tokens)
    parts = spell_out(pages, layout, tokens)
    tables = check_parts(parts, layout)
    ranges = {name: part.tokens for name, part in parts.items()}
    return Chunk(tokens, ranges, tables, ready=ready, layers=check_layers(layers, ready))


def check_layers(layers: Sequence[LayersReady], ready: ReadyEvent | None) -> tuple[LayersReady, ...]:
    """Check the groups of layers in which a chunk gets ready.

    Raises:
        PlanError: They are no such groups, are not in ascending order, or there is an event for the whole chunk too.
    """
    if not layers:
        return ()
    if ready is not None:
        raise PlanError("a chunk gets ready as a whole or by layers, not both", groups=len(layers))
    try:
        groups = tuple(LayersReady(operator.index(stop), event) for stop, event in layers)
    except (TypeError, ValueError):
        raise PlanError("layers must be given as LayersReady", layers=layers) from None
    stops = [0, *(group.stop for group in groups)]
    if any(stop <= start for start, stop in itertools.pairwise(stops)):
        raise PlanError("layers must be given in ascending order", stops=stops[1:])
    return groups
