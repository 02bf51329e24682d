"""Makes vLLM's processes sleep instead of spin while requests move.

For a second after each step, a worker polls for the next one in a loop. It releases the GIL so often and so briefly
that no other Python thread can acquire it: kvflow's event loop was seen to stand still for hundreds of milliseconds.
The scheduler's process polls for the end of a step in the same way, and occupies a CPU that a transfer could use. When
idle, vLLM sleeps on a socket instead, which wakes it at once. This module makes it do so while requests move, too.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

__all__ = ["sleep_instead_of_spinning"]

NAP_MS: Final = 1
"""Maximum sleep before the next check, in milliseconds."""

_spin_or_sleep: Final = SpinCondition.wait


def sleep_instead_of_spinning(is_due: Callable[[], bool]) -> None:
    """Make this process sleep where vLLM would spin, whenever it `is_due`; otherwise it waits as before this call."""
    wait_otherwise = SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        if not is_due() or time.monotonic() > self.last_read + self.busy_loop_s:  # then it sleeps anyway
            wait_otherwise(self, timeout_ms)
            return
        spin_s, self.busy_loop_s = self.busy_loop_s, -1
        try:
            _spin_or_sleep(self, NAP_MS)
        finally:
            self.busy_loop_s = spin_s

    SpinCondition.wait = wait
