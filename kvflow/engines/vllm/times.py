"""When requests went through vLLM's scheduler, for a log line at DEBUG. Pure, except for the log."""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from kvflow.engines.logs import adapter_logger

__all__ = ["RequestTimes"]

LOGGER = adapter_logger("vllm.kvflow")

FIRST_STEPS: Final = ("first step began", "second step began")
"""On decode, the first token is out before the second."""

LAST_STEP: Final = "last step began"


class RequestTimes:
    """Notes when each request reaches the stages of a server, and logs them when it ends, unless DEBUG is off.

    Args:
        now: Returns monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._times: dict[str, dict[str, float]] = {}

    def arrived(self, request_id: str) -> None:
        """Begin to note the times of a request."""
        if LOGGER.isEnabledFor(logging.DEBUG):
            self._times[request_id] = {"arrived": self._now()}

    def note(self, request_ids: Iterable[str], stage: str) -> None:
        """Note that requests have reached a stage, for the first time."""
        if self._times:
            for request_id in request_ids:
                if request_id in self._times:
                    self._times[request_id].setdefault(stage, self._now())

    def step(self, request_ids: Iterable[str]) -> None:
        """Note that a step begins, which computes tokens of these requests."""
        if not self._times:
            return
        now = self._now()
        for request_id in request_ids:
            times = self._times.get(request_id)
            if times is not None:
                stage = next((stage for stage in FIRST_STEPS if stage not in times), LAST_STEP)
                times[stage] = now

    def ended(self, request_id: str) -> None:
        """Log the times of a request that has ended; on prefill, the reply to the router leaves now."""
        times = self._times.pop(request_id, None)
        if times is None:
            return
        at = times.pop("arrived")
        passed = [(after - at, stage) for stage, after in (*times.items(), ("ended", self._now()))]
        shown = ", ".join(f"{stage} after {after_s * 1e3:.1f} ms" for after_s, stage in sorted(passed))
        LOGGER.debug("kvflow: %s arrived; %s", request_id, shown)
