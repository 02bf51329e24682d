"""Whether a process is suspended."""

from pathlib import Path

__all__ = ["is_stopped"]


def is_stopped(pid: int) -> bool:
    """Return whether all threads of a process have stopped. A thread may run for a while after SIGSTOP was sent."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
