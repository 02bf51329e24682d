"""vLLM's tier in host memory, for caches that are in host memory, too.

vLLM's own copies pages with streams of a GPU, and refuses others. Its scheduler, its bookkeeping and the tiers below it
are used as they are; only the copies are made by a thread instead of a stream.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["HostTieringSpec"]

POLL_S: Final = 0.01


class HostTieringSpec(TieringOffloadingSpec):
    """Tiers for `spec_name`. While the file that the option `held` names exists, nothing is copied into the tier."""

    @override
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, region, Path(self.extra_config["held"]))


class HostWorker(OffloadingWorker):
    """Copies blocks between vLLM's caches and the tier, one block a chunk, in the order of the jobs."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, held: Path) -> None:
        self._caches = [one.tensor for one in kv_caches.tensors]
        self._tier = [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors]
        self._groups = kv_caches.group_data_refs
        self._region = region
        self._held = held
        self._copier = ThreadPoolExecutor(1, "tier")
        self._jobs: dict[int, Future[int]] = {}

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, self._store, src_spec, dst_spec)

    @override
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, self._load, dst_spec, src_spec)

    def _submit(self, job_id: int, copy: Callable[[int, int, int, int], None], caches: Any, tier: Any) -> bool:
        places = []
        first = 0
        for size, refs in zip(caches.group_sizes, self._groups, strict=True):
            for block, chunk in zip(caches.block_ids[first:][:size], tier.block_ids[first:][:size], strict=True):
                places += [(one.tensor_idx, int(block), int(chunk), one.page_size_bytes) for one in refs]
            first += size

        def run() -> int:
            while copy == self._store and self._held.exists():
                time.sleep(POLL_S)
            for place in places:
                copy(*place)
            return sum(place[-1] for place in places)

        self._jobs[job_id] = self._copier.submit(run)
        return True

    def _store(self, number: int, block: int, chunk: int, size: int) -> None:
        self._tier[number][chunk, :size] = self._caches[number][block, :size]

    def _load(self, number: int, block: int, chunk: int, size: int) -> None:
        self._caches[number][block, :size] = self._tier[number][chunk, :size]

    @override
    def get_finished(self) -> list[Any]:
        ended = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [TransferResult(job_id, success=True, transfer_size=self._jobs.pop(job_id).result()) for job_id in ended]

    @override
    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    @override
    def shutdown(self) -> None:
        self._copier.shutdown(cancel_futures=True)
        self._caches.clear()
        self._tier.clear()
        self._region.cleanup()
