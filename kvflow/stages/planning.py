"""Third stage: turns page tables into descriptors, or into blocks of lists that the transport has prepared.

The core decides where a piece is planned. Small pieces are planned on the event loop and posted immediately. Large
pieces, and all pieces with digests, are planned in a worker thread, which reports to the core before they are posted.
"""

from collections.abc import Mapping
from typing import NamedTuple

import anyio
import msgspec
from msgspec.structs import replace

from kvflow.backends.base import Backend
from kvflow.errors import FailureReason, PlanError, Stage
from kvflow.geometry.blocks import Blocks, RouteBlocks
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pack import PackedSlices
from kvflow.geometry.plan import ComponentSlice, Descriptors, plan_extents
from kvflow.geometry.ranges import is_final
from kvflow.packing.staging import Gathering, LocalStaging
from kvflow.stages.context import StageContext
from kvflow.stages.digests import digests_of
from kvflow.stages.submit import Submit, TimedPlan
from kvflow.state import events as ev
from kvflow.state.effects import Piece
from kvflow.state.events import DeliveryId
from kvflow.state.packing import pays_off
from kvflow.wire.messages import Notice, Staged

__all__ = ["Plan", "PlanWork", "Planning", "PreparedRoute"]


class PreparedRoute(msgspec.Struct, frozen=True):
    """What is computed once per route, stored in `PeerRoute.prepared`.

    Attributes:
        blocks: The route in blocks; None if it cannot be expressed in blocks or the transport does not prepare lists.
        packed: The route's slices in this rank's memory; empty if no piece may be packed.
        head_major: Order of the cells of a packed piece.
    """

    blocks: RouteBlocks | None
    packed: Mapping[str, PackedSlices]
    head_major: bool


class Plan(NamedTuple):
    """How a piece is written; if it is `staged` in a slot at the decode rank, it is already gathered."""

    moves: Descriptors | Blocks
    staged: Staged | None = None


class PlanWork(msgspec.Struct, frozen=True):
    """The input of a plan, which may be made in any thread.

    Attributes:
        components: Tokens of the piece and the page tables of both sides, by component.
        max_bytes: Longest descriptor that the transport accepts; None for no limit.
        gathering: How to pack the piece; None if it has no slots.
        descriptor_overhead_s: Seconds that the transport takes per descriptor, in addition to the time for its bytes.
    """

    piece: Piece
    components: Mapping[str, ComponentSlice]
    max_bytes: int | None
    gathering: Gathering | None
    descriptor_overhead_s: float

    def plan(self) -> Plan:
        """Make the plan, and gather the piece if it is packed.

        A piece with slots is still written directly if that is faster, unless it must be packed.

        Raises:
            PlanError: Page tables do not cover their tokens, or there are too many descriptors.
            MemoryError: Out of memory.
        """
        piece, gathering = self.piece, self.gathering
        route, layers = piece.link.route, piece.layers
        if gathering is None:
            route_blocks: RouteBlocks | None = piece.link.prepared.blocks
            blocks = None if route_blocks is None else route_blocks.plan(self.components, layers)
            if blocks is not None:
                return Plan(blocks)
        elif piece.must_pack:
            return Plan(gathering.gather(route, self.max_bytes), gathering.staged)
        direct = plan_extents(route, self.components, layers=layers, max_bytes=self.max_bytes)
        if gathering is not None and pays_off(gathering.num_bytes, direct.num_descriptors, self.descriptor_overhead_s):
            return Plan(gathering.gather(route, self.max_bytes), gathering.staged)
        return Plan(direct.descriptors())


class Planning:
    """Plans pieces, and passes them to `Submit`; without `staging`, nothing is packed."""

    def __init__(
        self,
        context: StageContext[ev.PrefillEvent],
        layout: KVLayout,
        backend: Backend,
        submit: Submit,
        staging: LocalStaging | None,
    ) -> None:
        self._context = context
        self._layout = layout
        self._view = backend.view
        self._max_bytes = backend.capabilities.max_descriptor_bytes
        self._descriptor_overhead_s = backend.capabilities.descriptor_overhead_s
        self._submit = submit
        self._staging = staging
        self._plans = anyio.CapacityLimiter(1)
        self._plans_with_digests = anyio.CapacityLimiter(1)
        self._planned: dict[tuple[DeliveryId, int], TimedPlan] = {}

    def post_piece(self, piece: Piece) -> None:
        """Plan a piece on the event loop, and post it."""
        began = self._context.now()
        self._context.times.stages[Stage.ENQUEUE].add(began - piece.queued_at)
        try:
            plan = self.prepare(piece).plan()
        except (PlanError, MemoryError) as error:
            self._fail(piece, error)
            return
        planned_at = self._context.now()
        self._context.times.stages[Stage.PLANNING].add(planned_at - began)
        notice = piece.notice
        if piece.slots is not None and plan.staged is None:
            notice = replace(notice, staged=None)
            self._context.dispatch(ev.PieceWentDirect(piece.delivery, piece.seq))
        before = (piece.granted_at, piece.queued_at, began, planned_at)
        self._submit.post(piece.delivery, piece.seq, TimedPlan(plan.moves, before), notice)

    def plan_piece(self, piece: Piece) -> None:
        """Plan a piece in a worker thread, and dispatch PlanFinished or PlanFailed."""
        taken_at = self._context.now()
        self._context.times.stages[Stage.ENQUEUE].add(taken_at - piece.queued_at)
        self._context.start_task(self._plan_in_thread, self.prepare(piece), taken_at)

    def post_plan(self, delivery: DeliveryId, seq: int, notice: Notice) -> None:
        """Post a piece that was planned by `plan_piece`."""
        self._submit.post(delivery, seq, self._planned.pop((delivery, seq)), notice)

    def drop_plan(self, delivery: DeliveryId, seq: int) -> None:
        """Discard a plan made by `plan_piece`."""
        del self._planned[delivery, seq]

    def prepare(self, piece: Piece) -> PlanWork:
        """Collect the input for planning a piece."""
        granted, wanted = piece.granted, piece.grant.ranges
        components = {
            name: ComponentSlice(tokens, piece.pages[name], granted[name], final=is_final(tokens, wanted[name]))
            for name, tokens in piece.ranges.items()
        }
        gathering = None
        if piece.slots is not None and self._staging is not None:
            prepared: PreparedRoute = piece.link.prepared
            gathering = self._staging.gathering(piece, prepared.packed, head_major=prepared.head_major)
        return PlanWork(piece, components, self._max_bytes, gathering, self._descriptor_overhead_s)

    async def _plan_in_thread(self, work: PlanWork, taken_at: float) -> None:
        piece = work.piece
        async with self._plans_with_digests if piece.grant.digest else self._plans:
            began = self._context.now()
            try:
                plan, digests = await self._context.in_thread(lambda: self._plan_with_digests(work))
            except (PlanError, MemoryError) as error:
                self._fail(piece, error)
                return
            planned_at = self._context.now()
            self._context.times.stages[Stage.PLANNING].add(planned_at - began)
        before = (piece.granted_at, piece.queued_at, taken_at, planned_at)
        self._planned[piece.delivery, piece.seq] = TimedPlan(plan.moves, before)
        self._context.dispatch(ev.PlanFinished(piece.delivery, piece.seq, digests, plan.staged))

    def _plan_with_digests(self, work: PlanWork) -> tuple[Plan, dict[str, int]]:
        plan = work.plan()
        return plan, digests_of(work.piece, self._layout, self._view) if work.piece.grant.digest else {}

    def _fail(self, piece: Piece, error: PlanError | MemoryError) -> None:
        detail = str(error) or "out of memory"
        failure = self._context.failure(FailureReason.INVALID_PAGES, Stage.PLANNING, detail)
        self._context.dispatch(ev.PlanFailed(piece.delivery, piece.seq, failure))
