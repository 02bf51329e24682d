"""What vLLM's workers do to the connector in sleep mode from 0.33, for the version under test, which does not."""

from vllm.distributed.kv_transfer import get_kv_transfer_group

__all__ = ["SleepingWorker"]


class SleepingWorker:
    """Methods that vLLM adds to its workers (`--worker-extension-cls`), to be called over HTTP."""

    def unmap_caches(self) -> None:
        """Go to sleep."""
        get_kv_transfer_group().unregister_kv_caches()

    def map_caches(self) -> None:
        """Wake up."""
        get_kv_transfer_group().restore_kv_caches()
