"""Fifth stage: receives notices, scatters staging slots into pages, and verifies digests.

Notices arrive in band with the bytes, or over the control channel. Worker threads scatter and verify. The core holds
the pages until they have finished, and closing the rank waits for them, because its memory may be freed afterwards.
"""

import time
from typing import Final

import anyio

from kvflow.backends.base import Backend, BackendEvent, NoticeArrived
from kvflow.errors import FailureReason, PlanError, RemoteProtocolError, Stage
from kvflow.geometry.layout import KVLayout
from kvflow.packing.copier import PackWork
from kvflow.packing.staging import Scattering, StagingMemory
from kvflow.stages.context import StageContext
from kvflow.stages.digests import find_difference
from kvflow.state.effects import ReportReceiver, ScatterStaged, VerifyDigests
from kvflow.state.events import DecodeEvent, DigestsVerified, NoticeDelivered, Scattered
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.codec import Reader
from kvflow.wire.messages import Failure, Notice

__all__ = ["Aggregate"]

SCATTERS_AT_ONCE: Final = 2

NOTICES: Final[Reader[Notice]] = Reader(Notice)
"""Other messages that arrive in band are rejected unparsed."""


class Aggregate:
    """Handles arrived data; without `staging`, this rank accepts no packed pieces."""

    def __init__(
        self, context: StageContext[DecodeEvent], layout: KVLayout, backend: Backend, staging: StagingMemory | None
    ) -> None:
        self._context = context
        self._layout = layout
        self._view = backend.view
        self._scattering = None if staging is None else Scattering(staging, layout, backend.view)
        self._scatters = anyio.CapacityLimiter(SCATTERS_AT_ONCE)
        self._comparisons = anyio.CapacityLimiter(1)
        self._compared: dict[int, None] = {}

    def handle_event(self, event: BackendEvent) -> None:
        """Handle a notice from the transport. It is untrusted: any process could have sent it."""
        if not isinstance(event, NoticeArrived):
            self._context.anomalies.count("post_on_decode_rank")
            return
        try:
            notice = NOTICES.read(NOTICES.identify_message([event.payload]))
        except RemoteProtocolError as error:
            self._context.anomalies.count("notice_rejected", stage=Stage.AGGREGATE.value, detail=str(error))
        else:
            waited_s = time.monotonic() - event.found_at if event.found_at else 0.0
            self._context.dispatch(NoticeDelivered(notice, waited_s))

    def scatter(self, effect: ScatterStaged) -> None:
        """Scatter a notice's staging slot into pages, and dispatch Scattered."""
        self._context.start_task(self._scatter, effect)

    def verify(self, effect: VerifyDigests) -> None:
        """Verify the digests of a transfer, and dispatch DigestsVerified."""
        self._compared[effect.opened.generation] = None
        self._context.start_task(self._verify, effect)

    def follow(self, report: ReportReceiver) -> None:
        """Stop verifying a transfer whose outcome is decided, and discard the state of one whose pages are safe."""
        if report.outcome is not Outcome.PENDING:
            self._compared.pop(report.generation, None)
        scattering = self._scattering
        if report.memory is Memory.SAFE and scattering is not None and report.generation in scattering.tables:
            scattering.drop(report.generation)

    async def _scatter(self, effect: ScatterStaged) -> None:
        failure: Failure | None = None
        async with self._scatters:
            began = self._context.now()
            try:
                await self._context.in_thread(lambda: self._scatter_work(effect).scatter(effect.notice.num_bytes))
            except (PlanError, MemoryError) as error:
                detail = f"{effect.rank.peer.rank}: {str(error) or 'out of memory'}"
                failure = self._context.failure(FailureReason.PROTOCOL, Stage.AGGREGATE, detail)
            self._context.times.stages[Stage.AGGREGATE].add(self._context.now() - began)
        self._context.dispatch(Scattered(effect.opened.generation, effect.notice, failure))

    def _scatter_work(self, effect: ScatterStaged) -> PackWork:
        if self._scattering is None:
            raise PlanError("this rank has no staging memory", seq=effect.notice.seq)
        return self._scattering.work(effect)

    async def _verify(self, effect: VerifyDigests) -> None:
        generation = effect.opened.generation
        failure: Failure | None = None
        async with self._comparisons:
            try:
                difference = await self._context.in_thread(
                    lambda: find_difference(effect, self._layout, self._view, lambda: generation in self._compared)
                )
            except (PlanError, MemoryError) as error:
                detail = f"digests cannot be compared: {str(error) or 'out of memory'}"
                failure = self._context.failure(FailureReason.PROTOCOL, Stage.AGGREGATE, detail)
            else:
                if difference is not None:
                    failure = self._context.failure(difference.reason, Stage.AGGREGATE, difference.detail)
        self._compared.pop(generation, None)
        self._context.dispatch(DigestsVerified(generation, failure))
