"""Memory usage of this process."""

import os
from pathlib import Path

__all__ = ["resident_mib"]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
