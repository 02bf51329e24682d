"""Log lines for the events and effects of the cores."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvflow.errors import Stage, shorten
from kvflow.observe.logs import LOGGER, BoundLogger
from kvflow.room import RoomId
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.state.tables import Outcome
from kvflow.wire.messages import (
    Ack,
    Announce,
    Cancel,
    Decline,
    Drained,
    Failed,
    Failure,
    Grant,
    Notice,
    PeerId,
    SlotQuery,
    SlotReleased,
)

__all__ = ["AnomalyLog", "TransferLine", "describe", "log_transfer"]

STAGES: Final[dict[type, Stage]] = {
    ev.SendOpened: Stage.ENQUEUE,
    ev.SendRefused: Stage.ENQUEUE,
    ev.ChunkOffered: Stage.ENQUEUE,
    ev.QuiesceAsked: Stage.ENQUEUE,
    ev.LeaseStarted: Stage.ENQUEUE,
    ev.ReclaimAsked: Stage.ENQUEUE,
    ev.SendAborted: Stage.ENQUEUE,
    ev.HelloChecked: Stage.BOOTSTRAP,
    ev.ReplyLost: Stage.BOOTSTRAP,
    ev.DataReady: Stage.ENQUEUE,
    ev.PlanFinished: Stage.PLANNING,
    ev.PieceWentDirect: Stage.PLANNING,
    ev.PlanFailed: Stage.PLANNING,
    ev.PostEnded: Stage.SUBMIT,
    ev.PostInDoubt: Stage.SUBMIT,
    ev.ReceiveOpened: Stage.BOOTSTRAP,
    ev.ReceiveGranted: Stage.ENQUEUE,
    ev.ReceiveAborted: Stage.AGGREGATE,
    ev.RoomDeclined: Stage.BOOTSTRAP,
    ev.InstanceFound: Stage.BOOTSTRAP,
    ev.RoutesCompiled: Stage.BOOTSTRAP,
    ev.ConnectFailed: Stage.BOOTSTRAP,
    ev.ConnectionLost: Stage.BOOTSTRAP,
    ev.ConnectionObstructed: Stage.BOOTSTRAP,
    ev.ConnectionRefused: Stage.BOOTSTRAP,
    ev.LookUpRefused: Stage.BOOTSTRAP,
    ev.PeerRevoked: Stage.BOOTSTRAP,
    ev.ProbeFinished: Stage.BOOTSTRAP,
    ev.PeerFenced: Stage.BOOTSTRAP,
    ev.Landed: Stage.AGGREGATE,
    ev.FenceImpossible: Stage.BOOTSTRAP,
    ev.NoticeDelivered: Stage.AGGREGATE,
    ev.DigestsVerified: Stage.AGGREGATE,
    ev.Scattered: Stage.AGGREGATE,
    ef.CheckHello: Stage.BOOTSTRAP,
    ef.DisconnectTransport: Stage.BOOTSTRAP,
    ef.AwaitData: Stage.ENQUEUE,
    ef.PlanPiece: Stage.PLANNING,
    ef.DropPlan: Stage.PLANNING,
    ef.PostPiece: Stage.SUBMIT,
    ef.PostPlan: Stage.SUBMIT,
    ef.ReportGranted: Stage.ENQUEUE,
    ef.ReportQuiesced: Stage.SUBMIT,
    ef.ReportSender: Stage.SUBMIT,
    ef.LookUp: Stage.BOOTSTRAP,
    ef.CompileRoutes: Stage.BOOTSTRAP,
    ef.Connect: Stage.BOOTSTRAP,
    ef.Disconnect: Stage.BOOTSTRAP,
    ef.ProbePeer: Stage.BOOTSTRAP,
    ef.WaitForFence: Stage.BOOTSTRAP,
    ef.WaitForLanding: Stage.AGGREGATE,
    ef.NoteEnds: Stage.AGGREGATE,
    ef.ScatterStaged: Stage.AGGREGATE,
    ef.VerifyDigests: Stage.AGGREGATE,
    ef.ReportReceiver: Stage.AGGREGATE,
}
"""Stage of each event and effect. Those that concern the rank as a whole have none."""

MESSAGE_STAGES: Final[dict[type, Stage]] = {
    Announce: Stage.ENQUEUE,
    Grant: Stage.ENQUEUE,
    Decline: Stage.ENQUEUE,
    Cancel: Stage.ENQUEUE,
    SlotQuery: Stage.SUBMIT,
    SlotReleased: Stage.SUBMIT,
    Ack: Stage.AGGREGATE,
    Notice: Stage.AGGREGATE,
    Drained: Stage.AGGREGATE,
    Failed: Stage.AGGREGATE,
}
"""Stage of each message. All other messages concern the connection between two ranks, and count as bootstrap."""

NAMES: Final[dict[type, str]] = {
    ef.ReportGranted: "grants_reported",
    ef.ReportQuiesced: "quiesced_reported",
    ef.ReportSender: "sender_reported",
    ef.ReportReceiver: "receiver_reported",
}
"""Names of lines that are not derived from the class name."""

CARRIERS: Final = ("piece", "delivery", "notice", "message", "chunk", "hello", "opened", "rank")
"""Fields whose own fields are also shown."""

Described = ev.PrefillEvent | ev.DecodeEvent | ef.PrefillEffect | ef.DecodeEffect

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
    "active",
)
"""Fields of events, and of the objects they carry, that are shown in log lines."""


def describe(item: Described) -> tuple[str, dict[str, object]]:
    """Return the name and values of a line.

    Returns:
        A name like "post_ended", and those of the values room, generation, engine_rank, peer, stage and others that are
        short and known.
    """
    if isinstance(item, ef.LogEvent):
        return item.name, {**item.values}
    name = NAMES.get(type(item)) or _snake_case(type(item))
    values: dict[str, object] = {}
    for carrier in CARRIERS:
        if hasattr(item, carrier):
            values.update(_fields(getattr(item, carrier)))
    if isinstance(item, ef.PostPiece | ef.PlanPiece):
        values.update(_fields(item.piece.delivery), num_bytes=item.piece.cost.num_bytes)
    values.update(_fields(item))
    if type(item) in STAGES:
        values["stage"] = STAGES[type(item)].value
    if isinstance(item, ev.MessageReceived | ev.MessageArrived | ef.SendMessage | ef.Reply):
        values["message"] = _snake_case(type(item.message))
        values["stage"] = MESSAGE_STAGES.get(type(item.message), Stage.BOOTSTRAP).value
    return name, values


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
    for field in ("outcome", "memory"):
        if hasattr(item, field):
            shown[field] = getattr(item, field).value
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
        role: "send" or "receive".
        room: The router's ID for the request.
        prefill: Instance that computed it; None if this is that instance.
        num_bytes: Bytes moved; None if unknown.
        num_pages: Pages of this rank's pools that they were moved from or into.
        elapsed_s: Seconds since the engine opened it.
        failure: None if it succeeded.
        label: The engine's own ID for the request.
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
    values = {name: value for name, value in known.items() if value is not None}
    log.log(level, NAMES_OF_LINES[line.role, has_failed], **values)


MAX_SOURCES = 1_024
"""Maximum number of (kind, peer) pairs whose last line is remembered; bounds memory if peers keep appearing."""


MAX_LINES = 16
"""Maximum number of lines of one kind per interval over all peers, because inventing peer names costs nothing."""


class AnomalyLog:
    """Counts ignored messages and similar events, and logs each kind at a bounded rate, per peer and overall.

    Args:
        log: Where to log.
        clock: Returns monotonic seconds.
        interval_s: Minimum interval between two lines for one kind and peer.

    Attributes:
        counts: Number of anomalies, by kind.
        postponed: Number of messages over a budget, by kind. Honest peers send them, too, and repeat them.
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

    def log(self, level: int, name: str, values: Mapping[str, object]) -> None:
        """Log an event that peers can cause at will, unless the limit of lines with that name is reached.

        Omitted lines are counted.
        """
        if self._has_line(name, self._clock()):
            self._log.log(level, name, **_shorten_all(values))
        else:
            self.count("log_lines_omitted", detail=name)

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
