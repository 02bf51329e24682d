"""How processes of vLLM wait for each other while requests move.

For a second after each step a worker looks for the next one in a loop, and gives the interpreter's lock up so often and
so briefly that no other Python thread gets hold of it: kvflow's event loop was seen to stand still for hundreds of
milliseconds. The process of the scheduler looks for the end of a step in the same way, and takes a CPU that the move
could use. Without work vLLM sleeps on a socket instead, which wakes it at once. Let it do so while requests move, too.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

__all__ = ["sleep_instead_of_spinning"]

NAP_MS: Final = 1
"""How long it sleeps at most before it looks again, in milliseconds."""

_spin_or_sleep: Final = SpinCondition.wait


def sleep_instead_of_spinning(is_due: Callable[[], bool]) -> None:
    """Let this process sleep where vLLM would spin.

    Args:
        is_due: Whether to do so now; otherwise it waits as it would have done before this call.
    """
    wait_otherwise = SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        if not is_due() or time.monotonic() > self.last_read + self.busy_loop_s:  # then it sleeps by itself
            wait_otherwise(self, timeout_ms)
            return
        spin_s, self.busy_loop_s = self.busy_loop_s, -1
        try:
            _spin_or_sleep(self, NAP_MS)
        finally:
            self.busy_loop_s = spin_s

    SpinCondition.wait = wait
