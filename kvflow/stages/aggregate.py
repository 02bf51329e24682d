"""Fifth stage: what has arrived is collected, scattered out of staging slots, and compared with its digests.

Notices come in band with the bytes, or over the control channel. Worker threads scatter and compare; the core holds the
pages until they have answered, and closing the rank waits for them, because its memory may be gone afterwards.
"""

from typing import Final

import anyio

from kvflow.backends.base import Backend, BackendEvent, NoticeArrived
from kvflow.errors import FailureReason, PlanError, RemoteProtocolError, Stage
from kvflow.geometry.layout import KVLayout
from kvflow.packing.copier import PackWork
from kvflow.packing.scatter import Scattering
from kvflow.packing.staging import StagingMemory
from kvflow.stages.context import StageContext
from kvflow.stages.digests import find_difference
from kvflow.state.decode.core import DecodeCore
from kvflow.state.effects import ScatterStaged, VerifyDigests
from kvflow.state.events import DecodeEvent, DigestsVerified, NoticeDelivered, Scattered
from kvflow.wire.codec import Reader, encode
from kvflow.wire.messages import Failure, Notice

__all__ = ["Aggregate"]

SCATTERS_AT_ONCE: Final = 2

NOTICES: Final[Reader[Notice]] = Reader(Notice)
"""Anything else in band is refused unread."""


class Aggregate:
    """Collects what has arrived.

    Args:
        context: Of this rank.
        layout: Of this rank.
        backend: Delivers notices, and lets memory be read and written.
        staging: What peers write packed pieces into; nothing is staged here if None.
    """

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

    def take(self, event: BackendEvent) -> None:
        """Take in a notice that the transport has delivered; anybody can have sent it."""
        if not isinstance(event, NoticeArrived):
            self._context.anomalies.count("post_on_decode_rank")
            return
        try:
            notice = NOTICES.take([event.payload])
        except RemoteProtocolError as error:
            self._context.anomalies.count("notice_rejected", stage=Stage.AGGREGATE.value, detail=str(error))
        else:
            self._context.dispatch(NoticeDelivered(notice))

    def warm_up(self, core: DecodeCore, notice: Notice) -> None:
        """Do what `take` does with a notice, but for a core that is thrown away."""
        core.handle(NoticeDelivered(NOTICES.take([encode(notice)])), self._context.now())

    def scatter(self, effect: ScatterStaged) -> None:
        """Scatter what a notice has brought; the core hears how that ended."""
        self._context.start_task(self._scatter, effect)

    def verify(self, effect: VerifyDigests) -> None:
        """Compare digests; the core hears how that ended."""
        self._compared[effect.opened.generation] = None
        self._context.start_task(self._verify, effect)

    def stop_verifying(self, generation: int) -> None:
        """Stop a comparison early: its result is not needed any more."""
        self._compared.pop(generation, None)

    def drop(self, generation: int) -> None:
        """Forget what is kept for a transfer that is over."""
        if self._scattering is not None:
            self._scattering.drop(generation)

    async def _scatter(self, effect: ScatterStaged) -> None:
        failure: Failure | None = None
        async with self._scatters:
            began = self._context.now()
            try:
                work = self._scatter_work(effect)
                await self._context.in_thread(lambda: work.scatter(effect.notice.num_bytes))
            except (PlanError, MemoryError) as error:
                detail = f"{effect.rank.peer.rank}: {str(error) or 'out of memory'}"
                failure = self._context.failure(FailureReason.PROTOCOL, Stage.AGGREGATE, detail)
            self._context.times.add(Stage.AGGREGATE, self._context.now() - began)
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
