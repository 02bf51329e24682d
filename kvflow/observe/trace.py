"""Log lines for the events of the cores."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvflow.errors import RemoteProtocolError, shorten
from kvflow.gate.verdict import Action, Verdict
from kvflow.observe.breakdown import Breakdown
from kvflow.observe.logs import LOGGER, BoundLogger
from kvflow.room import RoomId
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.tables import Outcome
from kvflow.wire.messages import Drained, Failed, Failure, Notice, PeerId

__all__ = ["AnomalyLog", "TransferLine", "describe", "log_transfer", "slow_values"]

CARRIERS: Final = ("delivery", "notice", "message", "chunk", "hello")
"""Fields whose own fields are also shown."""

SHOWN: Final = (
    "room",
    "generation",
    "peer",
    "seq",
    "tokens",
    "ranges",
    "num_bytes",
    "last",
    "staged",
    "attempt",
    "endpoint",
    "is_gone",
    "lingers",
)
"""Fields of events, and of the objects they carry, that are shown in log lines."""


def describe(item: ev.PrefillEvent | ev.DecodeEvent) -> tuple[str, dict[str, object]]:
    """Return the name of a line, like "post_ended", and those of its values that are short and known."""
    values: dict[str, object] = {}
    for carrier in CARRIERS:
        if hasattr(item, carrier):
            values.update(_fields(getattr(item, carrier)))
    values.update(_fields(item))
    if isinstance(item, ev.MessageReceived | ev.MessageArrived):
        values["message"] = _snake_case(type(item.message))
    return _snake_case(type(item)), values


def _snake_case(kind: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _fields(item: object) -> dict[str, object]:
    shown: dict[str, object] = {
        field: getattr(item, field) for field in SHOWN if getattr(item, field, None) is not None
    }
    if hasattr(item, "instance"):
        shown["prefill"] = str(item.instance)  # the line's own "instance" is the logging rank's
    if "peer" in shown:
        shown["peer"] = str(shown["peer"])
    if isinstance(item, (Notice, Drained, Failed)):
        shown["from_rank"] = item.engine_rank
    failure = getattr(item, "failure", None)
    if isinstance(failure, Failure):
        shown |= failure_values(failure)
    else:
        detail = failure or getattr(item, "detail", None)
        if isinstance(detail, str):
            shown["detail"] = shorten(detail)
    return shown


def failure_values(failure: Failure) -> dict[str, object]:
    """Return the values of a failure for a log line."""
    return {"reason": failure.reason.value, "detected_by": failure.detected_by, "detail": shorten(failure.detail)}


@dataclass(frozen=True, slots=True)
class TransferLine:
    """The values of the log line for a transfer that has ended.

    Attributes:
        prefill: Instance that computed it; None if this is that instance.
        num_bytes: Bytes moved; None if unknown.
        num_pages: Pages of this rank's pools that they were moved from or into.
        elapsed_s: Seconds since the engine opened it.
        label: The engine's own ID for the request.
        breakdown: Where the time went, if that is known.
        page_bytes: Size of these pages; not logged.
    """

    role: Literal["send", "receive"]
    room: RoomId
    outcome: Outcome
    prefill: str | None
    num_bytes: int | None
    num_pages: int
    elapsed_s: float
    failure: Failure | None = None
    label: str | None = None
    page_bytes: int = 0
    breakdown: Breakdown | None = None


NAMES_OF_LINES: Final = {
    ("send", True): "send_failed",
    ("send", False): "send_finished",
    ("receive", True): "receive_failed",
    ("receive", False): "receive_finished",
}


def log_transfer(log: BoundLogger, line: TransferLine) -> None:
    """Write the log line of a transfer: as a warning if it failed, else at DEBUG.

    A transfer that an engine aborted is logged at DEBUG, because the engine knows.
    """
    has_failed = line.outcome is Outcome.FAILED
    level = logging.WARNING if has_failed else logging.DEBUG
    if not LOGGER.isEnabledFor(level):  # the common case; building the values costs more than this check
        return
    known: dict[str, object] = {"room": line.room, "outcome": line.outcome.value}
    if line.failure is not None:
        known |= {"stage": line.failure.stage.value, **failure_values(line.failure)}
    known |= {
        "prefill": line.prefill,
        "label": line.label,
        "num_bytes": line.num_bytes,
        "num_pages": line.num_pages,
        "elapsed_ms": round(line.elapsed_s * 1e3, 3),
    }
    if line.breakdown is not None:
        parts = line.breakdown.parts | {"clock_error": line.breakdown.clock_error_s}
        known |= {f"{part}_ms": round(part_s * 1e3, 3) for part, part_s in parts.items() if part != "engine_noticed"}
    values = {name: value for name, value in known.items() if value is not None}
    log.log(level, NAMES_OF_LINES[line.role, has_failed], **values)


def slow_values(line: TransferLine) -> dict[str, object]:
    """Return the values of the log line for a transfer that took long: what took longest, and how long."""
    values: dict[str, object] = {"room": line.room, "prefill": line.prefill, "label": line.label}
    values["elapsed_ms"] = round(line.elapsed_s * 1e3, 3)
    if line.breakdown is not None:
        slowest = line.breakdown.slowest
        values |= {"slowest": slowest, "slowest_ms": round(line.breakdown.parts[slowest] * 1e3, 3)}
        values["from_rank"] = line.breakdown.engine_rank
    return {name: value for name, value in values.items() if value is not None}


MAX_SOURCES = 1_024
"""Maximum number of (kind, peer) pairs whose last line is remembered; bounds memory if peers keep appearing."""


MAX_LINES = 16
"""Maximum number of lines of one kind per interval over all peers, because inventing peer names costs nothing."""


STARVED_S: Final = 0.5
"""How long the event loop may be held up before that is logged: less than a second is left until peers notice."""


class AnomalyLog:
    """Counts ignored messages and similar events, and logs each kind at a bounded rate, per peer and overall.

    `postponed` counts messages over a budget. Honest peers send them, too, and repeat them.
    """

    def __init__(self, log: BoundLogger, clock: Callable[[], float], interval_s: float = 1.0) -> None:
        self.counts: dict[str, int] = {}
        self.postponed: dict[str, int] = {}
        self._log = log
        self._clock = clock
        self._interval_s = interval_s
        self._logged_at: dict[tuple[str, PeerId | None], float] = {}
        self._lines: dict[str, tuple[float, int]] = {}

    def count(self, kind: str, peer: PeerId | None = None, **values: object) -> None:
        """Count an anomaly, and log it unless one of its kind was logged for this peer within the interval."""
        self._count(self.counts, logging.WARNING, kind, peer, values)

    def postpone(self, kind: str, peer: PeerId | None = None, **values: object) -> None:
        """Count a message that is over a budget and that its sender repeats; log it as `count` does, but at INFO."""
        self._count(self.postponed, logging.INFO, kind, peer, values)

    def carry_out(self, verdict: Verdict, peer: PeerId | None = None, **values: object) -> bool:
        """Count a message as the gate has judged it; return whether it is accepted.

        Raises:
            RemoteProtocolError: Its connection must be closed.
        """
        if verdict.kind:
            (self.postpone if verdict.action is Action.POSTPONE else self.count)(verdict.kind, peer, **values)
        if verdict.cut:
            raise RemoteProtocolError(verdict.cut)
        return verdict.action is Action.ACCEPT

    def _count(
        self, counts: dict[str, int], level: int, kind: str, peer: PeerId | None, values: Mapping[str, object]
    ) -> None:
        counts[kind] = counts.get(kind, 0) + 1
        now = self._clock()
        if now - self._logged_at.get((kind, peer), -math.inf) < self._interval_s:
            return
        if not self._has_line(kind, now):
            return
        if len(self._logged_at) >= MAX_SOURCES:
            self._logged_at.clear()
        self._logged_at[kind, peer] = now
        known = {"peer": None if peer is None else str(peer), **values, "count": counts[kind]}
        self._log.log(level, kind, **_shorten_all({name: value for name, value in known.items() if value is not None}))

    def perform(self, effect: ef.CountAnomaly | ef.LogEvent) -> None:
        """Count an anomaly, or log an event, as a core asks for."""
        if isinstance(effect, ef.CountAnomaly):
            self.count(effect.kind, effect.peer, room=effect.room, detail=effect.detail or None)
        else:
            self.log(logging.WARNING if effect.is_warning else logging.INFO, effect.name, effect.values)

    def note_hold(self, held_s: float, prefix: str = "") -> None:
        """Count how long the event loop was held up, in seconds, if it was for long."""
        if held_s > STARVED_S:
            detail = f"{prefix}the engine held the GIL or the event loop, or this process was suspended"
            self.count("event_loop_starved", held_s=round(held_s, 3), detail=detail)

    def log(self, level: int, name: str, values: Mapping[str, object]) -> None:
        """Log an event that peers can cause at will, unless the limit of lines with that name is reached.

        Omitted lines are counted.
        """
        if not self.log_some(level, name, values):
            self.count("log_lines_omitted", detail=name)

    def log_some(self, level: int, name: str, values: Mapping[str, object]) -> bool:
        """Log an event unless the limit of lines with that name is reached; return whether it was logged."""
        has_line = self._has_line(name, self._clock())
        if has_line:
            self._log.log(level, name, **_shorten_all(values))
        return has_line

    def _has_line(self, name: str, now: float) -> bool:
        since, num_lines = self._lines.get(name, (now, 0))
        if now - since >= self._interval_s:
            since, num_lines = now, 0
        if num_lines >= MAX_LINES:
            return False
        self._lines[name] = since, num_lines + 1
        return True


def _shorten_all(values: Mapping[str, object]) -> dict[str, object]:
    return {name: shorten(value) if isinstance(value, str) else value for name, value in values.items()}
