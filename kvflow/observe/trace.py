"""Core events and effects as log lines: a name, and who and what it is about."""

import math
import re
from collections.abc import Callable
from typing import Final

from kvflow.errors import Stage
from kvflow.observe.logs import BoundLogger
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.wire.messages import Cancel, Drained, Failed, Failure, Grant, Notice, PeerId, Received

__all__ = ["OddityLog", "describe"]

STAGES: Final[dict[type, Stage]] = {
    ev.SendOpened: Stage.ENQUEUE,
    ev.ChunkOffered: Stage.ENQUEUE,
    ev.SendAborted: Stage.ENQUEUE,
    ev.PeerGreeted: Stage.BOOTSTRAP,
    ev.PlanFinished: Stage.PLANNING,
    ev.PlanFailed: Stage.PLANNING,
    ev.PostSettled: Stage.SUBMIT,
    ev.PostDoubted: Stage.SUBMIT,
    ev.ReceiveOpened: Stage.BOOTSTRAP,
    ev.ReceiveAborted: Stage.AGGREGATE,
    ev.InstanceGreeted: Stage.BOOTSTRAP,
    ev.InstanceUnreachable: Stage.BOOTSTRAP,
    ev.NoticeDelivered: Stage.AGGREGATE,
    ev.DigestsVerified: Stage.AGGREGATE,
    ev.PeerLeft: Stage.BOOTSTRAP,
    ef.ReportSender: Stage.SUBMIT,
    ef.ReportReceiver: Stage.AGGREGATE,
}

MESSAGE_STAGES: Final[dict[type, Stage]] = {
    Grant: Stage.ENQUEUE,
    Cancel: Stage.ENQUEUE,
    Received: Stage.AGGREGATE,
    Notice: Stage.AGGREGATE,
    Drained: Stage.AGGREGATE,
    Failed: Stage.AGGREGATE,
}
"""Every other message is about the acquaintance."""

NAMES: Final[dict[type, str]] = {ef.ReportSender: "sender_reported", ef.ReportReceiver: "receiver_reported"}
"""Lines that are not named after their class."""

SHOWN: Final = ("room", "generation", "peer", "seq", "tokens", "ranges", "num_bytes", "last", "staged")
"""Fields worth a place in a log line, of events and of what they carry."""


def describe(item: ev.Event | ef.Effect) -> tuple[str, dict[str, object]]:
    """Give the name of a line and its values.

    Returns:
        A name like "post_settled", and values among room, generation, engine_rank, peer, stage and whatever else is
        short and known.
    """
    name = NAMES.get(type(item)) or re.sub(r"(?<!^)(?=[A-Z])", "_", type(item).__name__).lower()
    values: dict[str, object] = {}
    for carrier in ("delivery", "notice", "message", "chunk"):
        if hasattr(item, carrier):
            values.update(_fields(getattr(item, carrier)))
    values.update(_fields(item))
    if type(item) in STAGES:
        values["stage"] = STAGES[type(item)].value
    if isinstance(item, (ev.MessageReceived, ef.SendMessage)):
        values["message"] = type(item.message).__name__.lower()
        values["stage"] = MESSAGE_STAGES.get(type(item.message), Stage.BOOTSTRAP).value
    return name, values


def _fields(item: object) -> dict[str, object]:
    shown: dict[str, object] = {
        field: getattr(item, field) for field in SHOWN if getattr(item, field, None) is not None
    }
    if hasattr(item, "instance"):
        shown["prefill"] = item.instance  # the line's own "instance" is the rank that writes it
    if "peer" in shown:
        shown["peer"] = str(shown["peer"])
    if isinstance(item, (Notice, Drained, Failed)):
        shown["from_rank"] = item.engine_rank
    for field in ("outcome", "memory"):
        if hasattr(item, field):
            shown[field] = getattr(item, field).value
    failure = getattr(item, "failure", None)
    if isinstance(failure, Failure):
        shown |= {"reason": failure.reason.value, "noticed_by": failure.rank, "detail": failure.detail}
    return shown


MAX_SOURCES = 1_024
"""Pairs of kind and peer whose last line is remembered; peers that appear without end must not fill the memory."""


class OddityLog:
    """Counts what was ignored, and logs each kind at a bounded rate for each peer.

    Args:
        log: Where to log.
        clock: Gives monotonic seconds.
        interval_s: At most one line for each kind and peer in this time.
    """

    def __init__(self, log: BoundLogger, clock: Callable[[], float], interval_s: float = 1.0) -> None:
        self.counts: dict[str, int] = {}
        self._log = log
        self._clock = clock
        self._interval_s = interval_s
        self._logged_at: dict[tuple[str, PeerId | None], float] = {}

    def count(self, kind: str, peer: PeerId | None = None, **values: object) -> None:
        """Count it, and log it unless its kind was logged for this peer just now."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        now = self._clock()
        if now - self._logged_at.get((kind, peer), -math.inf) < self._interval_s:
            return
        if len(self._logged_at) >= MAX_SOURCES:
            self._logged_at.clear()
        self._logged_at[kind, peer] = now
        self._log.warning(kind, peer=str(peer) if peer else None, **values, count=self.counts[kind])
