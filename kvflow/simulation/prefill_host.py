"""A prefill rank in virtual time: the real stages, and by hand what their tasks and threads do, in an order of its own.

A job is taken when it is its turn, and planned up to `PLANNING_S` later, as one that is put off is.
"""

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

import msgspec
import numpy as np

from kvflow.backends.base import BackendEvent, PostEnded, PostInDoubt
from kvflow.config import RankConfig
from kvflow.errors import FailureReason, KvflowError, PlanError, RemoteProtocolError, Unreachable
from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import PageTable
from kvflow.geometry.routes import BoundRoute
from kvflow.geometry.tokens import TokenRange
from kvflow.simulation.device import DeviceEvent, SimEnqueue
from kvflow.simulation.host import Host
from kvflow.simulation.network import Line
from kvflow.simulation.requests import Request, Sending
from kvflow.simulation.shapes import KV, STATE, CellTable
from kvflow.stages.bootstrap import PrefillBootstrap
from kvflow.stages.digests import DigestWork, OwnMemory
from kvflow.stages.planning import PlannedChunk, Planning
from kvflow.stages.staging import LocalStaging, slots_of
from kvflow.stages.submit import Submit, agent_name
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.events import Chunk, LayersReady
from kvflow.state.queue import ChunkJob
from kvflow.state.tables import Memory
from kvflow.state.window import Cost
from kvflow.wire.channel import Listener
from kvflow.wire.codec import decode
from kvflow.wire.messages import Hello, Message, PeerId

if TYPE_CHECKING:
    from kvflow.simulation.world import World

__all__ = ["PrefillHost"]

PLANNING_S: Final = 0.002


class SimListener:
    """What `PrefillBootstrap` needs of a `Listener`.

    Args:
        host: Whose it is.
    """

    def __init__(self, host: "PrefillHost") -> None:
        self._host = host
        self.lines: dict[bytes, Line] = {}

    def send(self, to: bytes, payload: bytes) -> None:
        """Send over a line.

        Raises:
            Unreachable: It is gone.
        """
        line = self.lines.get(to)
        if line is None:
            raise Unreachable("peer is not connected", connection=to.hex())
        self._host.world.network.to_dialer(line, payload)


class PrefillHost(Host):
    """One life of a prefill rank. Arguments as in `Host`."""

    def __init__(self, world: "World", config: RankConfig, me: PeerId, table: CellTable) -> None:
        super().__init__(world, config, me, table)
        self._listener = SimListener(self)
        self._jobs: deque[ChunkJob] = deque()
        self._is_planning = False
        layout = self.pool.table.layout
        listener = cast("Listener", self._listener)
        staging = self._local_staging(layout)
        self._bootstrap = PrefillBootstrap(
            self.context, layout, self.backend, listener, self._on_message, staging=staging
        )
        slots = slots_of(staging, self.core.slots)
        self._local = slots.local
        self._enqueue = SimEnqueue(self.context, self._cost, lambda: None, slots)  # jobs are taken by hand
        geometry = self._bootstrap.geometry
        memory = OwnMemory(layout, self.backend.view)
        take, end = self._enqueue.next_job, self._enqueue.end
        self._submit = Submit(self.context, self.backend, end, self.send)
        self._planning = Planning(
            self.context,
            take,
            self._submit.offer,
            geometry,
            end,
            memory,
            staging=staging,
            without_slots=self._enqueue.without_slots,
        )

    def _local_staging(self, layout: KVLayout) -> LocalStaging | None:
        shape = self.world.staging
        if self.staging is None or shape is None:
            return None
        pages = functools.partial(self.staging.pages, layout, self.backend.view)
        return LocalStaging(self.staging.range, shape.slot_bytes, pages, row_overhead_s=0.0, packing="always")

    # The engine ------------------------------------------------------------------------------------------------------

    def open_room(self, request: Request) -> Sending | None:
        """Start to send a room; None if the pool has no pages left.

        Raises:
            LocalProtocolError, CapacityExceeded: It may not be sent now.
        """
        table = self.pool.table
        counts = {KV: -(-request.num_tokens // table.layout.component(KV).tokens_per_slot)}
        if STATE in table.first_page:
            counts[STATE] = 1
        lease = self.pool.take(f"{request} on {self.me}", counts)
        if lease is None:
            return None
        sending = Sending(request, self, lease, self.world.schedule.now, self.frozen_s)
        self.open_transfer(request.room, sending, ev.SendOpened(request.room))
        self.world.oracle.opened(sending)
        return sending

    def compute(self, sending: Sending, stop: int, *, is_last: bool, pauses: Sequence[tuple[int, float]] = ()) -> bool:
        """Compute tokens up to `stop` and offer them; False if the queue is full.

        Args:
            sending: Whose.
            stop: Where the chunk ends.
            is_last: No chunk follows.
            pauses: If the chunk is offered before it is computed: for each group of layers, where it ends, and how long
                the device takes for it.
        """
        if self.transfers.get(sending.request.room) is not sending or sending.decided_at is not None:
            return True
        sender = self.core.senders.rooms.get(sending.request.room)
        if sender is not None and any(self._enqueue.is_full(peer) for peer in sender.deliveries):
            return False
        request, layout = sending.request, self.pool.table.layout
        tokens = (sending.position, stop)
        size = layout.component(KV).tokens_per_slot
        slots = sending.lease.pages[KV][tokens[0] // size : -(-stop // size)] if tokens[0] < stop else ()
        ranges = {KV: tokens}
        pages = {KV: page_table(size, tokens, slots)}
        if is_last and STATE in sending.lease.pages:
            ranges[STATE] = (0, 1)
            pages[STATE] = page_table(1, (0, 1), sending.lease.pages[STATE])
        metadata = metadata_of(request) if is_last else b""
        sending.position = stop
        if is_last:
            sending.is_finished = True
            sending.finished_at = self.world.schedule.now
            self.world.oracle.finished(sending)
        footprint = self.footprint(sending.lease, {name: len(table.pages) for name, table in pages.items()})
        layers = self._run_device(sending, ranges, pauses)
        chunk = Chunk(tokens, ranges, pages, layers=layers, last=is_last, metadata=metadata)
        self.dispatch(ev.ChunkOffered(request.room, chunk, footprint))
        return True

    def _run_device(
        self, sending: Sending, ranges: Mapping[str, TokenRange], pauses: Sequence[tuple[int, float]]
    ) -> tuple[LayersReady, ...]:
        """Compute now, or group after group if there are pauses; the last group has all layers that remain."""
        if not pauses:
            self._compute_layers(sending, ranges, ALL_LAYERS)
            return ()
        groups = []
        start, when = 0, self.world.schedule.now
        for number, (stop, pause_s) in enumerate(pauses):
            layers = (start, stop if number < len(pauses) - 1 else None)
            event = DeviceEvent()
            groups.append(LayersReady(stop, event))
            start, when = stop, when + pause_s
            self.world.schedule.at(when, self.call, self._finish_layers, (sending, dict(ranges), layers), event)
        return tuple(groups)

    def _finish_layers(self, work: tuple[Sending, dict[str, TokenRange], LayerRange], event: DeviceEvent) -> None:
        if not work[0].lease.is_free:
            self._compute_layers(*work)
        event.happen()
        self._after_dispatch()

    def _compute_layers(self, sending: Sending, ranges: Mapping[str, TokenRange], layers: LayerRange) -> None:
        for name, tokens in ranges.items():
            self.pool.compute(sending.lease, name, tokens, sending.request.content, layers)

    def abort_room(self, sending: Sending) -> None:
        """Give a room up."""
        if self.transfers.get(sending.request.room) is sending and sending.decided_at is None:
            detail = "the prefill engine left the room before it was delivered"
            self.dispatch(ev.SendAborted(sending.request.room, self.failure(FailureReason.ABORTED, detail)))

    # As in kvflow.prefill --------------------------------------------------------------------------------------------

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.EnqueueChunk():
                self._enqueue.put(effect)
            case ef.OfferSlots(peer):
                self._enqueue.offer_slots(peer)
            case ef.PostPlan(delivery):
                self.backend.posts_digest = bool(effect.notice.digests)
                self.backend.posting = (delivery, self.transfers[delivery.room].lease)
                self._submit.post(effect)
                self.backend.posting = None
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

    def send(self, peer: PeerId, message: Message) -> None:
        """Send to a greeted peer."""
        self._bootstrap.send(peer, message)

    def _forget(self, peer: PeerId) -> None:
        self._bootstrap.forget(peer)

    def take_bytes(self, line: Line, data: bytes) -> None:
        """Take a message, as `PrefillBootstrap.run` does."""
        if not line.is_closed:
            self._listener.lines[line.name] = line
        try:
            message = decode(data)
        except RemoteProtocolError:
            self.context.oddities.count("message_rejected")
            return
        if isinstance(message, Hello):
            self._answer(line.name, message)
        else:
            self._bootstrap._take(line.name, message)

    def line_closed(self, line: Line) -> None:
        """Learn that a decode rank has closed its line, or died."""
        self._listener.lines.pop(line.name, None)

    def _answer(self, connection: bytes, hello: Hello) -> None:
        """Welcome or refuse, as `PrefillBootstrap._answer` does, with a transport that connects at once."""
        try:
            route: BoundRoute = self._bootstrap.check(hello)
            if route.legs:
                self.backend.connect_now(agent_name(hello.peer), hello.backend_metadata)
        except KvflowError as error:
            self.context.oddities.count("hello_refused", hello.peer)
            self._bootstrap._refuse(connection, hello.peer, str(error))
        else:
            self._bootstrap.admit(connection, hello, route)

    def _on_message(self, peer: PeerId, message: Message) -> None:
        self.dispatch(ev.MessageReceived(peer, message))

    def take_backend_event(self, event: BackendEvent) -> None:
        """Take in how a post goes."""
        match event:
            case PostEnded():
                self._submit.ended(event)
            case PostInDoubt():
                self._submit.in_doubt(event)

    def take_notice(self, payload: bytes) -> None:
        """Nobody writes to a prefill rank."""
        self.context.oddities.count("notice_on_prefill_rank")

    def _cost(self, effect: ef.EnqueueChunk) -> Cost:
        geometry = self._bootstrap.geometry(effect.delivery.peer)
        return geometry.cost(effect.ranges, effect.grant.ranges, None, effect.layers) if geometry else Cost(0, 0)

    def _after_dispatch(self) -> None:
        while (job := self._enqueue.next_job()) is not None:
            self._jobs.append(job)
        if self._jobs and not self._is_planning:
            self._is_planning = True
            self.world.schedule.after(PLANNING_S * self.world.rng.random(), self.call, self._plan_next)

    def _plan_next(self) -> None:
        """Plan one job, as `Planning` does, and offer it to the core."""
        job = self._jobs.popleft()
        self._is_planning = False
        try:
            work = self._planning.prepare(job)
            plan = work.plan()
        except PlanError as error:
            self._planning.fail(job, error)
            return
        chunk = self._planning.planned(job, plan)
        if work.digests is None:
            self._submit.offer(chunk)
        else:
            delay_s = PLANNING_S * self.world.rng.random()
            self.world.schedule.after(delay_s, self.call, self._add_digests, chunk, work.digests)

    def _add_digests(self, chunk: PlannedChunk, work: DigestWork) -> None:
        """Read what is about to be sent, as a worker thread does, and offer the chunk then."""
        self._submit.offer(msgspec.structs.replace(chunk, digests=work.digests(chunk.job.ranges)))

    def leftovers(self) -> dict[str, int]:
        """What is still kept for transfers."""
        senders = self.core.senders
        return {
            "rooms": len(senders.rooms),
            "waiting grants": len(senders.waiting),
            "queued chunks": self._enqueue.num_queued,
            "jobs": len(self._jobs),
            "windows": len(self._enqueue.queue._windows),
            "page tables": len(self._planning._tables),
            "plans": len(self._submit._waiting),
            "posts": self._submit.num_posted,
            "local slots": int(self._local.may_come),
            "remote slots": self.core.slots.num_awaited,
            "released posts": sum(delivery.has_posts for delivery in senders.unproved),
        }


@functools.lru_cache(maxsize=65_536)
def page_table(page_size: int, tokens: TokenRange, slots: tuple[int, ...]) -> PageTable:
    """What `check_part` makes of pages that are right; it is kept, because pools are small."""
    pages = np.array(slots, np.uint32)
    pages.flags.writeable = False
    return PageTable(pages, tokens[0] - tokens[0] % page_size, page_size)


def metadata_of(request: Request) -> bytes:
    """What the prefill engine hands over with a room."""
    return b"metadata of room %d" % request.room
