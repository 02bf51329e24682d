"""Between the fifth stage and the core: what was staged is scattered into its pages, by worker threads.

The core counts a staged notice only when its bytes are in the pages, and holds the pages until then. Closing the rank
waits for the threads, because its memory may be gone afterwards.
"""

import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import anyio
import anyio.to_thread

from kvflow.errors import FailureReason, PlanError, Stage
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, MemoryRange
from kvflow.geometry.pack import PackedPieces, Payload
from kvflow.geometry.pages import PageTable
from kvflow.geometry.routes import RoutePiece
from kvflow.stages.context import StageContext
from kvflow.stages.packing import PackWork, PageMemory
from kvflow.stages.planning import granted_pages
from kvflow.stages.staging import StagingMemory
from kvflow.state.effects import ScatterStaged
from kvflow.state.events import GreetedRank, ReceiveOpened, Scattered
from kvflow.wire.messages import Failure, PeerId

__all__ = ["Scatter"]

SCATTERS_AT_ONCE: Final = 2
MAX_KEPT: Final = 256
"""Ranks whose pieces are kept for their next notices."""


class Scatter:
    """Scatters what notices have brought.

    Args:
        context: Of this rank.
        layout: Of this rank.
        view: Lets its memory be written, if it is host memory.
        staging: What peers write into; nothing is staged here if None.
    """

    def __init__(self, context: StageContext, layout: KVLayout, view: View, staging: StagingMemory | None) -> None:
        self._context = context
        self._layout = layout
        self._pages = None if staging is None else functools.cache(functools.partial(staging.pages, layout, view))
        self._threads = anyio.CapacityLimiter(SCATTERS_AT_ONCE)
        self._tables: dict[int, Mapping[str, PageTable]] = {}
        self._pieces: OrderedDict[PeerId, tuple[tuple[RoutePiece, ...], Mapping[str, PackedPieces]]] = OrderedDict()

    def start(self, effect: ScatterStaged) -> None:
        """Begin to scatter, as the core said; it hears how it ended."""
        self._context.start_task(self._scatter, effect)

    def drop(self, generation: int) -> None:
        """Forget what is kept for a transfer that is over."""
        self._tables.pop(generation, None)

    async def _scatter(self, effect: ScatterStaged) -> None:
        began = self._context.now()
        failure: Failure | None = None
        try:
            work = self.prepare(effect)
            run = functools.partial(work.scatter, effect.notice.num_bytes)
            await anyio.to_thread.run_sync(run, limiter=self._threads)
        except (PlanError, MemoryError) as error:
            failure = self.failure(effect, error)
        self._context.times.add(Stage.AGGREGATE, self._context.now() - began)
        self._context.dispatch(Scattered(effect.opened.generation, effect.notice, failure))

    def failure(self, effect: ScatterStaged, error: PlanError | MemoryError) -> Failure:
        """Why a notice could not be scattered."""
        detail = f"{effect.rank.peer.rank}: {str(error) or 'out of memory'}"
        return self._context.failure(FailureReason.PROTOCOL, Stage.AGGREGATE, detail)

    def prepare(self, effect: ScatterStaged) -> PackWork:
        """Bring together what scattering a notice needs.

        Raises:
            PlanError: The notice has no place, or its pieces are not here.
        """
        window, notice = effect.rank.staging, effect.notice
        if window is None or notice.staged is None or self._pages is None:
            raise PlanError("notice is not staged", seq=notice.seq)
        opened = effect.opened
        head_major = notice.staged.head_major
        payload = Payload(effect.rank.debts, notice.ranges, opened.ranges, head_major, notice.layer_range)
        slot = MemoryRange(window.slot_address(notice.staged.slot), window.slot_bytes)
        pages = self._pages()
        return PackWork(payload, self._pieces_of(effect.rank, pages), self._tables_of(opened), slot, pages.copier)

    def _pieces_of(self, rank: GreetedRank, pages: PageMemory) -> Mapping[str, PackedPieces]:
        known = self._pieces.get(rank.peer)
        if known is not None and known[0] == rank.pieces:  # others of its instance may have changed, and its route too
            return known[1]
        found = pages.find(rank.pieces)
        self._pieces[rank.peer] = rank.pieces, found
        while len(self._pieces) > MAX_KEPT:
            self._pieces.popitem(last=False)
        return found

    def _tables_of(self, opened: ReceiveOpened) -> Mapping[str, PageTable]:
        if opened.generation not in self._tables:
            self._tables[opened.generation] = granted_pages(opened, self._layout)
        return self._tables[opened.generation]
