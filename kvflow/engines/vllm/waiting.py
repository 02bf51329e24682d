"""Makes vLLM's processes sleep instead of spin while requests move.

For a second after each step, a worker polls for the next one in a loop. It releases the GIL so often and so briefly
that no other Python thread can acquire it: kvflow's event loop was seen to stand still for hundreds of milliseconds.
The scheduler's process polls for the end of a step in the same way, and occupies a CPU that a transfer could use. When
idle, vLLM sleeps on a socket instead, which wakes it at once. This module replaces `SpinCondition.wait` while requests
move, so that vLLM sleeps then, too, and puts vLLM's own method back as soon as none does.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

__all__ = ["sleep_while"]

NAP_MS: Final = 1
"""Maximum sleep before the next check, in milliseconds."""

_due: Final[set[Callable[[], bool]]] = set()
"""Of the scheduler and of a worker, which may share a process."""

_spin_or_sleep: Final = SpinCondition.wait


def sleep_while(is_due: Callable[[], bool]) -> None:
    """Make this process sleep where vLLM would spin, until `is_due` returns False. Call it whenever it becomes due."""
    _due.add(is_due)
    SpinCondition.wait = _wait


def _wait(self: Any, timeout_ms: int | None = None) -> None:
    _due.difference_update([is_due for is_due in [*_due] if not is_due()])
    if not _due:
        SpinCondition.wait = _spin_or_sleep
    if not _due or time.monotonic() > self.last_read + self.busy_loop_s:  # then it sleeps anyway
        _spin_or_sleep(self, timeout_ms)
        return
    spin_s, self.busy_loop_s = self.busy_loop_s, -1
    try:
        _spin_or_sleep(self, NAP_MS)
    finally:
        self.busy_loop_s = spin_s
