"""What this process takes."""

import resource
import threading
import time
from pathlib import Path

import anyio

__all__ = ["cpu_share", "num_files", "num_threads", "resident_bytes"]


def resident_bytes() -> int:
    """Bytes that are in memory now."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()


def num_files() -> int:
    """Files that are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def num_threads() -> int:
    """Threads, without those that anyio keeps for a while after each use."""
    lent = [thread for thread in threading.enumerate() if thread.name == "AnyIO worker thread"]
    return len(list(Path("/proc/self/task").iterdir())) - len(lent)


async def cpu_share(seconds: float) -> float:
    """Sleep, and give the CPU time of this process meanwhile, every thread included, in % of a core."""
    began, cpu_began = time.monotonic(), time.process_time()
    await anyio.sleep(seconds)
    return 100 * (time.process_time() - cpu_began) / (time.monotonic() - began)
