"""When requests went through an engine, for a log line at DEBUG. Pure, except for the log."""

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Final

__all__ = ["RequestTimes"]

FIRST_STEPS: Final = ("first step began", "second step began")
"""On decode, the first token is out before the second."""

LAST_STEP: Final = "last step began"

MAX_REQUESTS: Final = 4_096
"""Maximum number of requests whose times are kept; the oldest are dropped, in case that their ends are not told."""


class RequestTimes:
    """Notes when each request reaches the stages of a server, and logs them when it ends, unless DEBUG is off.

    Args:
        logger: Of the adapter.
        now: Returns monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float]) -> None:
        self._logger = logger
        self._now = now
        self._times: dict[Hashable, dict[str, float]] = {}

    def arrived(self, request_id: Hashable) -> None:
        """Begin to note the times of a request."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._times[request_id] = {"arrived": self._now()}
            if len(self._times) > MAX_REQUESTS:
                del self._times[next(iter(self._times))]

    def note(self, request_ids: Iterable[Hashable], stage: str) -> None:
        """Note that requests have reached a stage, for the first time."""
        if self._times:
            for request_id in request_ids:
                if request_id in self._times:
                    self._times[request_id].setdefault(stage, self._now())

    def step(self, request_ids: Iterable[Hashable]) -> None:
        """Note that a step begins, which computes tokens of these requests."""
        if not self._times:
            return
        now = self._now()
        for request_id in request_ids:
            times = self._times.get(request_id)
            if times is not None:
                stage = next((stage for stage in FIRST_STEPS if stage not in times), LAST_STEP)
                times[stage] = now

    def ended(self, request_id: Hashable) -> None:
        """Log the times of a request that has ended; on prefill, the reply to the router leaves now."""
        times = self._times.pop(request_id, None)
        if times is None:
            return
        at = times.pop("arrived")
        passed = [(after - at, stage) for stage, after in (*times.items(), ("ended", self._now()))]
        shown = ", ".join(f"{stage} after {after_s * 1e3:.1f} ms" for after_s, stage in sorted(passed))
        self._logger.debug("kvflow: %s arrived; %s", request_id, shown)
