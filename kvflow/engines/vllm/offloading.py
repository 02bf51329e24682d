"""vLLM's OffloadingConnector, for servers where another connector writes to vLLM's blocks.

vLLM copies the blocks of a request into the tier up to a few steps after the request has ended. Before it gives such a
block to another request, it waits for the copy; but in 0.32 not if that request is loaded by another connector of a
MultiConnector. Then the tier has blocks of another prompt, and returns them whenever the first prompt is asked again.
"""

from typing import Any, NamedTuple

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

__all__ = ["KvflowOffloadingConnector"]


class _Store(NamedTuple):
    """A copy into the tier: the blocks that it reads, and the number of workers that have not finished it."""

    blocks: frozenset[int]
    num_workers: int


class KvflowOffloadingConnector(OffloadingConnector):
    """OffloadingConnector that finishes copying blocks before any connector may write to them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_workers: int = vllm_config.parallel_config.world_size
        self._stores: dict[int, _Store] = {}
        self._given: set[int] = set()

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        # Blocks with a hash were found in the prefix cache, and are not written to.
        self._given.update(one.block_id for group in blocks.blocks for one in group if one.block_hash is None)

    @override
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = super().build_connector_meta(scheduler_output)
        for job_id, job in orders.store_jobs.items():
            self._stores[job_id] = _Store(frozenset(job.src_spec.block_ids.tolist()), self._num_workers)
        orders.jobs_to_flush = {
            *(orders.jobs_to_flush or ()),
            *(job_id for job_id, store in self._stores.items() if not store.blocks.isdisjoint(self._given)),
        }
        self._given.clear()
        return orders

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        completed = getattr(connector_output.kv_connector_worker_meta, "completed_jobs", {})
        for job_id, count in completed.items():
            if (store := self._stores.pop(job_id, None)) is not None and store.num_workers > count:
                self._stores[job_id] = store._replace(num_workers=store.num_workers - count)
