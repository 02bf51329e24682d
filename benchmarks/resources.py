"""Resource usage of this process."""

import resource
import threading
import time
from pathlib import Path

import anyio

__all__ = ["cpu_share", "num_files", "num_threads", "resident_bytes"]


def resident_bytes() -> int:
    """Return the resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()


def num_files() -> int:
    """Return the number of open file descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


def num_threads() -> int:
    """Return the number of threads, without anyio's pooled worker threads."""
    lent = [thread for thread in threading.enumerate() if thread.name == "AnyIO worker thread"]
    return len(list(Path("/proc/self/task").iterdir())) - len(lent)


async def cpu_share(seconds: float) -> float:
    """Sleep, and return the CPU time of all threads of this process meanwhile, in % of a core."""
    began, cpu_began = time.monotonic(), time.process_time()
    await anyio.sleep(seconds)
    return 100 * (time.process_time() - cpu_began) / (time.monotonic() - began)
