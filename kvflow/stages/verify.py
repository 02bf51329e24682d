"""After the last stage: what has arrived is compared with the digests that came with its notices, if that was wanted.

A worker thread reads the pages, one transfer after another. The core holds them until the thread has answered, and
closing the rank waits for the thread, because its memory may be gone afterwards.
"""

import anyio
import anyio.to_thread
from msgspec.structs import replace

from kvflow.errors import FailureReason, PlanError, Stage
from kvflow.stages.context import StageContext
from kvflow.stages.digests import DigestWork, OwnMemory
from kvflow.stages.planning import granted_pages
from kvflow.state.effects import VerifyDigests, WrittenBy
from kvflow.state.events import DigestsVerified
from kvflow.wire.messages import Failure

__all__ = ["Verify"]


class Verify:
    """Compares digests.

    Args:
        context: Of this rank.
        memory: Of this rank.
    """

    def __init__(self, context: StageContext, memory: OwnMemory) -> None:
        self._context = context
        self._memory = memory
        self._threads = anyio.CapacityLimiter(1)
        self._running: dict[int, _Comparison] = {}

    def start(self, effect: VerifyDigests) -> None:
        """Begin to compare, as the core said; it hears how it ended."""
        comparison = _Comparison(self._context, self._memory, effect)
        self._running[effect.opened.generation] = comparison
        self._context.start_task(self._compare, effect.opened.generation, comparison)

    def stop(self, generation: int) -> None:
        """Let a comparison end soon because nobody wants to know any more."""
        comparison = self._running.get(generation)
        if comparison is not None:
            comparison.is_wanted = False

    async def _compare(self, generation: int, comparison: "_Comparison") -> None:
        try:
            failure = await anyio.to_thread.run_sync(comparison.run, limiter=self._threads)
        except (PlanError, MemoryError) as error:
            detail = f"digests cannot be compared: {str(error) or 'out of memory'}"
            failure = self._context.failure(FailureReason.PROTOCOL, Stage.AGGREGATE, detail)
        finally:
            del self._running[generation]
        self._context.dispatch(DigestsVerified(generation, failure))


class _Comparison:
    """One transfer's; `run` may be called in any thread."""

    def __init__(self, context: StageContext, memory: OwnMemory, effect: VerifyDigests) -> None:
        self.is_wanted = True
        self._context = context
        self._memory = memory
        self._effect = effect

    def run(self) -> Failure | None:
        """Compare until the first difference."""
        opened = self._effect.opened
        tables = granted_pages(opened, self._memory.layout)
        for written in self._effect.written:
            rank = written.rank
            work = DigestWork(self._memory, rank.pieces, rank.debts, tables, opened.ranges)
            failure = self._find_difference(written, work)
            if failure is not None:
                return failure
        return None

    def _find_difference(self, written: WrittenBy, work: DigestWork) -> Failure | None:
        for notice in written.notices:
            of_layers = replace(work, layers=notice.layer_range)
            for name, (start, stop) in notice.ranges.items():
                if not self.is_wanted:
                    return None
                where = f"{written.rank.peer.rank}: tokens {start}:{stop} of component {name}"
                sent = notice.digests.get(name)
                if sent is None:
                    return self._failure(FailureReason.PROTOCOL, f"{where} came without the digest that was asked for")
                found = of_layers.digest(name, (start, stop))
                if found != sent:
                    detail = f"{where} have digest {found:08x}, what was sent has {sent:08x}"
                    return self._failure(FailureReason.CORRUPT, detail)
        return None

    def _failure(self, reason: FailureReason, detail: str) -> Failure:
        return self._context.failure(reason, Stage.AGGREGATE, detail)
