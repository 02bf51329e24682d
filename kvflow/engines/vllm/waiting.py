"""How a worker of vLLM waits for its next step.

For a second after each step the worker looks for the next one in a loop, and gives the interpreter's lock up so often
and so briefly that no other Python thread gets hold of it: kvflow's event loop was seen to stand still for hundreds of
milliseconds. Without work vLLM's worker sleeps on a socket instead, which wakes it as soon as there is a step. Let it
do so while requests move, too.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

__all__ = ["sleep_between_steps"]

NAP_MS: Final = 1
"""How long it sleeps at most before it looks whether there is a step, in milliseconds."""

_spin_or_sleep: Final = SpinCondition.wait


def sleep_between_steps(is_moving: Callable[[], bool]) -> None:
    """Let this process sleep until its next step for as long as requests move.

    Args:
        is_moving: Whether any does.
    """

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        if not is_moving() or time.monotonic() > self.last_read + self.busy_loop_s:  # then it sleeps by itself
            _spin_or_sleep(self, timeout_ms)
            return
        spin_s, self.busy_loop_s = self.busy_loop_s, -1
        try:
            _spin_or_sleep(self, NAP_MS)
        finally:
            self.busy_loop_s = spin_s

    SpinCondition.wait = wait
