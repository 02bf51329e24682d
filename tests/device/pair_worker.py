"""`benchmarks.pair.worker` with pools on the fake device: `python -m tests.device.pair_worker OPTIONS`."""

import sys
from typing import Final

from benchmarks.pair import worker
from benchmarks.pool_memory import MEMORIES

__all__ = ["MODULE"]

MODULE: Final = "tests.device.pair_worker"

if __name__ == "__main__":
    from tests.device.devices import FakePoolMemory

    MEMORIES["cuda"] = FakePoolMemory
    sys.exit(worker.main())
