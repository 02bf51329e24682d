"""Third stage: page tables become descriptors, or blocks of lists that the transport has prepared.

Small plans are worked out on the event loop as soon as it is their turn, which is quicker than handing them over; large
ones in a worker thread, so that the loop stays prompt. Digests, which a decode rank may ask for, always are; transfers
without them pass by.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
from msgspec.structs import replace

from kvflow.errors import FailureReason, PlanError, Stage
from kvflow.geometry.blocks import Blocks, RouteBlocks
from kvflow.geometry.debts import bytes_owed
from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pack import PackedPieces, Payload, is_head_major
from kvflow.geometry.pages import WIRE_PAGES, PageTable, Part, check_parts
from kvflow.geometry.plan import Descriptors, Share, outline
from kvflow.geometry.routes import BoundRoute, RoutePiece
from kvflow.geometry.tokens import TokenRange, closes
from kvflow.stages.context import StageContext
from kvflow.stages.digests import DigestWork, OwnMemory, check_digestible
from kvflow.stages.packing import PackWork
from kvflow.stages.staging import LocalStaging, PackPlan
from kvflow.state.events import DeliveryId, PlanFailed, ReceiveOpened
from kvflow.state.queue import ChunkJob
from kvflow.state.window import Cost
from kvflow.wire.messages import Grant, PeerId, Staged, StagingWindow

__all__ = ["PeerGeometry", "Plan", "PlanWork", "PlannedChunk", "Planning", "granted_pages"]

PLANS_AT_ONCE = 4
"""Small plans made before the event loop gets its turn."""


class PeerGeometry(msgspec.Struct, frozen=True):
    """What planning needs to know about a decode rank.

    Attributes:
        route: What it wants from here.
        layout: Where it keeps it.
        pieces: What it wants from here, as it said it.
        staging: Where it takes packed pieces; nowhere if None.
        packed: The pieces, where this rank has them, if any of them may be packed.
        blocks: The route in blocks, if it can be said so and the transport prepares lists.
    """

    route: BoundRoute
    layout: KVLayout
    pieces: tuple[RoutePiece, ...]
    staging: StagingWindow | None = None
    packed: Mapping[str, PackedPieces] = msgspec.field(default_factory=dict)
    blocks: RouteBlocks | None = None

    def cost(
        self,
        ranges: Mapping[str, TokenRange],
        wanted: Mapping[str, TokenRange],
        max_bytes: int | None,
        layers: LayerRange = ALL_LAYERS,
    ) -> Cost:
        """Say what a part of a transfer takes of this rank's window, without planning it.

        Args:
            ranges: By component, the tokens of the part.
            wanted: For the same components, all tokens of the transfer.
            max_bytes: Longest descriptor that the transport takes; no limit if None.
            layers: Of the part.
        """
        num_bytes = bytes_owed(self.route.debts, ranges, wanted, layers)
        num_rows = sum(self.route.max_rows(name, stop - start, layers) for name, (start, stop) in ranges.items())
        num_splits = num_bytes // max_bytes if max_bytes else 0
        return Cost(num_bytes, num_rows + num_splits)


class PlannedChunk(msgspec.Struct, frozen=True):
    """A job with its plan, and with the digest of each component if the grant asks for them.

    Attributes:
        moves: What to copy.
        staged: Where it will be, if it is packed: gathered already.
    """

    job: ChunkJob
    moves: Descriptors | Blocks
    staged: Staged | None = None
    digests: Mapping[str, int] = msgspec.field(default_factory=dict)


class Plan(NamedTuple):
    """How a job is moved.

    Attributes:
        moves: What to copy.
        staged: Where it will be, if it is packed: gathered already.
    """

    moves: Descriptors | Blocks
    staged: Staged | None = None


class PlanWork(msgspec.Struct, frozen=True):
    """A plan that is yet to be made; it may be made in any thread.

    Attributes:
        digests: What the grant asks for besides.
        layers: To move.
        packing: How the job is packed, if it has slots.
        blocks: The route in blocks, if that may do.
    """

    route: BoundRoute
    shares: Mapping[str, Share]
    max_bytes: int | None
    digests: DigestWork | None
    layers: LayerRange = ALL_LAYERS
    packing: PackPlan | None = None
    blocks: RouteBlocks | None = None

    def plan(self) -> Plan:
        """Make it; what is packed is gathered on the way.

        A job that has slots goes directly all the same if that turns out to be quicker.

        Raises:
            PlanError: Page tables do not reach over their tokens, or there are too many descriptors.
        """
        packing = self.packing
        if packing is not None and packing.is_settled:
            return self._pack(packing)
        blocks = None if packing is not None or self.blocks is None else self.blocks.plan(self.shares, self.layers)
        if blocks is not None:
            return Plan(blocks)
        direct = outline(self.route, self.shares, layers=self.layers, max_bytes=self.max_bytes)
        if packing is not None and packing.pays_off(direct.num_rows):
            return self._pack(packing)
        return Plan(direct.descriptors())

    def _pack(self, packing: PackPlan) -> Plan:
        return Plan(packing.gather(self.route, self.max_bytes), packing.staged)


class Planning:
    """Plans jobs one after another.

    Args:
        context: Of this rank.
        next_job: Gives the job whose turn it is, or None. It is asked when a plan can begin at once, so that whose turn
            it is gets decided as late as can be.
        offer: Takes what is planned.
        geometry: What is known about a peer; None if it is gone.
        end_job: Gives a job's credit back.
        memory: Of this rank.
        staging: Where packed jobs are gathered; none are if None.
        without_slots: Gives the slots of a job back that is not packed after all.
    """

    def __init__(  # noqa: PLR0913 - what a stage is connected to
        self,
        context: StageContext,
        next_job: Callable[[], ChunkJob | None],
        offer: Callable[[PlannedChunk], None],
        geometry: Callable[[PeerId], PeerGeometry | None],
        end_job: Callable[[ChunkJob], None],
        memory: OwnMemory,
        *,
        staging: LocalStaging | None = None,
        without_slots: Callable[[ChunkJob], ChunkJob] = lambda job: job,
    ) -> None:
        self._staging = staging
        self._without_slots = without_slots
        self._context = context
        self._memory = memory
        self._next_job = next_job
        self._offer = offer
        self._geometry = geometry
        self._end_job = end_job
        self._large_plans = anyio.CapacityLimiter(1)
        self._put_off: ChunkJob | None = None
        self._is_planning = False
        self._is_due = anyio.Event()
        self._digests = anyio.CapacityLimiter(1)
        self._tables: dict[int, dict[DeliveryId, Mapping[str, PageTable]]] = {}

    def drop(self, delivery: DeliveryId) -> None:
        """Forget what is kept for a delivery that has ended."""
        of_room = self._tables.get(delivery.room, {})
        of_room.pop(delivery, None)
        if not of_room:
            self.drop_room(delivery.room)

    def drop_room(self, room: int) -> None:
        """Forget what is kept for every delivery of a room."""
        self._tables.pop(room, None)

    def plan_next(self) -> None:
        """Plan the jobs whose turn it is, as far as that is quick; `run` sees to the rest.

        To be called whenever it may be somebody's turn.
        """
        if self._is_planning:
            return
        self._is_planning = True
        rows_left = self._context.config.limits.rows_planned_inline
        for _ in range(PLANS_AT_ONCE):
            job = self._next_job()
            if job is None:
                self._is_planning = False
                return
            effort = self._effort(job)
            if effort > rows_left:
                self._put_off = job
                break
            rows_left -= effort
            self._plan(job)
        self._is_due.set()

    async def run(self) -> None:
        """Make the plans that are not made at once, for ever."""
        while True:
            await self._is_due.wait()
            self._is_due = anyio.Event()
            job, self._put_off = self._put_off, None
            await anyio.lowlevel.checkpoint()
            if job is not None and self._effort(job) > self._context.config.limits.rows_planned_inline:
                await self._plan_in_thread(job)
            elif job is not None:
                self._plan(job)
            self._is_planning = False
            self.plan_next()

    def _plan(self, job: ChunkJob) -> None:
        began = self._context.now()
        try:
            work = self.prepare(job)
            plan = work.plan()
        except (PlanError, MemoryError) as error:
            self.fail(job, error)
        else:
            self._pass_on(job, work, plan, began)

    async def _plan_in_thread(self, job: ChunkJob) -> None:
        began = self._context.now()
        try:
            work = self.prepare(job)
            plan = await anyio.to_thread.run_sync(work.plan, limiter=self._large_plans)
        except (PlanError, MemoryError) as error:
            self.fail(job, error)
        else:
            self._pass_on(job, work, plan, began)

    def _pass_on(self, job: ChunkJob, work: PlanWork, plan: Plan, began: float) -> None:
        self._context.times.add(Stage.PLANNING, self._context.now() - began)
        chunk = self.planned(job, plan)
        if work.digests is None:
            self._offer(chunk)
        else:
            self._context.start_task(self._add_digests, chunk, work.digests)

    def _effort(self, job: ChunkJob) -> int:
        """What planning a job takes: its descriptors, or as many as can be planned while it is gathered."""
        if job.slots is None or self._staging is None:
            return job.cost.num_rows
        return self._staging.copier.effort(job.cost.num_bytes, self._context.config.limits.rows_planned_inline)

    def planned(self, job: ChunkJob, plan: Plan) -> PlannedChunk:
        """Put a job and its plan together; one that goes directly gives back the slots that it got."""
        if job.slots is not None and plan.staged is None:
            job = self._without_slots(job)
        return PlannedChunk(job, plan.moves, plan.staged)

    def prepare(self, job: ChunkJob) -> PlanWork:
        """Bring together what the plan of a job needs.

        Raises:
            PlanError: The peer is gone, its page tables do not fit, or it wants digests that cannot be had.
        """
        geometry = self._geometry(job.delivery.peer)
        if geometry is None:
            raise PlanError("peer is gone", peer=str(job.delivery.peer))
        digests = None
        if job.grant.digest:
            check_digestible(self._memory.layout)
            debts, wanted = geometry.route.debts, job.grant.ranges
            digests = DigestWork(self._memory, geometry.pieces, debts, job.pages, wanted, job.layers)
        granted = self._granted(job, geometry.layout)
        shares = {
            name: Share(tokens, job.pages[name], granted[name], closing=closes(tokens, job.grant.ranges[name]))
            for name, tokens in job.ranges.items()
        }
        packing = self._packing(job, geometry)
        return PlanWork(geometry.route, shares, self._memory.max_bytes, digests, job.layers, packing, geometry.blocks)

    def _packing(self, job: ChunkJob, geometry: PeerGeometry) -> PackPlan | None:
        if job.slots is None or self._staging is None or geometry.staging is None:
            return None
        staged = Staged(job.slots.remote, is_head_major(geometry.route))
        payload = Payload(geometry.route.debts, job.ranges, job.grant.ranges, staged.head_major, job.layers)
        work = PackWork(payload, geometry.packed, job.pages, self._staging.slot(job.slots.local), self._staging.copier)
        target = geometry.staging.slot_address(staged.slot)
        return PackPlan(work, job.cost.num_bytes, target, staged, self._staging)

    def fail(self, job: ChunkJob, error: PlanError | MemoryError) -> None:
        """Give up a job that cannot be planned."""
        self._end_job(job)
        self.drop(job.delivery)
        failure = self._context.failure(FailureReason.INVALID_PAGES, Stage.PLANNING, str(error) or "out of memory")
        self._context.dispatch(PlanFailed(job.delivery, job.seq, failure))

    async def _add_digests(self, chunk: PlannedChunk, work: DigestWork) -> None:
        try:
            digests = await anyio.to_thread.run_sync(work.digests, chunk.job.ranges, limiter=self._digests)
        except (PlanError, MemoryError) as error:
            self.fail(chunk.job, error)
        else:
            self._offer(replace(chunk, digests=digests))

    def _granted(self, job: ChunkJob, layout: KVLayout) -> Mapping[str, PageTable]:
        """The decode rank's page tables, checked when the first chunk of a delivery needs them."""
        granted = self._tables.get(job.delivery.room, {}).get(job.delivery)
        if granted is None:
            granted = granted_pages(job.grant, layout)
            if not job.is_last:
                self._tables.setdefault(job.delivery.room, {})[job.delivery] = granted
        elif job.is_last:
            self.drop(job.delivery)
        return granted


def granted_pages(grant: Grant | ReceiveOpened, layout: KVLayout) -> dict[str, PageTable]:
    """Read the page tables of a grant.

    Args:
        grant: From the decode rank, not trusted; or what the decode rank made it of.
        layout: The decode rank's.

    Raises:
        PlanError: A table is missing, malformed, or does not fit the pool or the tokens.
    """
    odd = [name for name, data in grant.pages.items() if len(data) % WIRE_PAGES.itemsize]
    if odd:
        raise PlanError("page table of a grant is cut off", components=odd)
    if grant.pages.keys() != grant.ranges.keys():
        raise PlanError("grant needs pages for what it wants", wanted=sorted(grant.ranges), pages=sorted(grant.pages))
    parts = {name: Part(tokens, np.frombuffer(grant.pages[name], WIRE_PAGES)) for name, tokens in grant.ranges.items()}
    return check_parts(parts, layout, distinct=True)
