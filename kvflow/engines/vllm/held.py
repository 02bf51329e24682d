"""References to blocks of vLLM's pool, which keep them from being used for anything else."""

import time
from collections.abc import Iterable
from typing import Any, Final

from kvflow.engines.vllm.metadata import WorkerReport

__all__ = ["HeldBlocks"]

PROOF_S: Final = 60.0
"""How long vLLM continues to step only to learn that held blocks are safe.

Later, it learns it with the next request.
"""


class HeldBlocks:
    """Blocks that are being sent, and those that are not safe yet although their request has ended.

    Attributes:
        pool: The pool that blocks belong to, once vLLM has one.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self._sent: dict[str, list[int]] = {}
        self._num_unsafe = 0
        self._unsafe_at = 0.0

    def keep(self, request_id: str, blocks: list[int]) -> None:
        """Keep blocks that are sent until they were: vLLM may preempt the request, or its window moves on."""
        self._sent[request_id] = blocks
        self.pool.touch(self._of_pool(blocks))

    def let_go(self, request_id: str) -> None:
        """Return the blocks of a request, if any were kept."""
        self.pool.free_blocks(self._of_pool(self._sent.pop(request_id, [])))

    def num_kept(self, request_id: str) -> int:
        """Return how many blocks are kept for a request."""
        return len(self._sent.get(request_id, ()))

    def take_report(self, report: WorkerReport) -> None:
        """Keep blocks of ended requests that are not safe yet, and return those that are by now."""
        self.pool.touch(self._of_pool(report.held))
        self.pool.free_blocks(self._of_pool(report.freed))
        self._num_unsafe += len(report.held) - len(report.freed)
        if report.held:
            self._unsafe_at = time.monotonic()

    @property
    def awaits_proof(self) -> bool:
        """Whether workers may still report that blocks are safe."""
        return self._num_unsafe > 0 and time.monotonic() < self._unsafe_at + PROOF_S

    def _of_pool(self, blocks: Iterable[int]) -> list[Any]:
        return [self.pool.blocks[block] for block in blocks]
