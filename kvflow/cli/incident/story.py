"""What happened, in one time line, what went wrong first, and which rooms are still open."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvflow.cli.incident.clocks import Offset
from kvflow.cli.incident.sides import Pair, Side
from kvflow.observe.trace import describe
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.replay import Moment
from kvflow.wire.messages import Announce, Failure, Goodbye, Grant, PeerId

__all__ = ["Line", "Story", "tell_story"]

PEER_EVENTS: Final = (
    *(ev.ConnectFailed, ev.ConnectionLost, ev.ConnectionRefused, ev.FenceImpossible, ev.HelloChecked),
    *(ev.PeerFenced, ev.PeerRevoked, ev.ProbeFinished, ev.ReplyLost, ev.RoutesCompiled),
    *(ev.DrainStarted, ev.CloseStarted, ev.TransportClosed),
)
"""Events about a peer or a whole rank, which are shown while a room is open."""

ALWAYS_WRONG: Final[Mapping[type, str]] = {
    ev.ConnectionLost: "the connection to {event.peer} was lost",
    ev.ReplyLost: "the connection to a decode rank was lost",
    ev.ReceiveAborted: "the engine gave the room up: {detail}",
    ev.SendAborted: "the engine gave the room up: {detail}",
    ev.RoomDeclined: "the room was declined: {detail}",
    ev.SendRefused: "the room was refused: {detail}",
    ev.ConnectFailed: "{event.peer} cannot be connected to: {detail}",
    ev.ConnectionRefused: "{event.peer} has refused the connection: {detail}",
    ev.InstanceDoubted: "the directory does not list {event.instance} any more",
    ev.LookUpRefused: "the directory does not answer: {detail}",
    ev.PlanFailed: "the pages could not be read: {detail}",
    ev.PostInDoubt: "a write to {event.delivery.peer} may not have ended: {detail}",
}
"""What events say that come only if something has gone wrong."""

FAILED: Final[Mapping[type, str]] = {
    ev.PostEnded: "a write to {event.delivery.peer} failed: {detail}",
    ev.DataReady: "the pages could not be read: {detail}",
    ev.DigestsVerified: "what has arrived is not what was sent: {detail}",
    ev.Scattered: "what has arrived could not be copied: {detail}",
    ev.HelloChecked: "the two sides do not match: {detail}",
    ev.RoutesCompiled: "the two sides do not match: {detail}",
}
"""What others say if they have a failure."""

PATIENCE_S: Final = 0.5
"""A message is called lost if the other side was recorded for so much longer, besides the error of its clock."""

MAX_VALUES: Final = 160


class Line(NamedTuple):
    """An event on the common clock, in seconds.

    Attributes:
        rooms: Which rooms it is about; none for an event about a peer or the rank.
        wrong: What it says has gone wrong; empty if nothing.
    """

    at: float
    side: Side
    moment: Moment
    rooms: frozenset[RoomId]
    text: str
    wrong: str


class Story(NamedTuple):
    """All events in order, and what was sent.

    Attributes:
        lost: What did not arrive, although the other side was there.
        open: The events of each room that has not ended, by room and side, in the order in which they began.
    """

    lines: Sequence[Line]
    pairs: Sequence[Pair]
    lost: Sequence[Pair]
    open: Mapping[tuple[RoomId, PeerId], Sequence[Line]]

    def lines_of(self, room: RoomId) -> list[Line]:
        """Return the events about a room, and those about peers and ranks while it was open."""
        times = [line.at for line in self.lines if room in line.rooms]
        if not times:
            return []
        is_open = any(room == one for one, _ in self.open)
        first, last = min(times), math.inf if is_open else max(times)
        return [
            line
            for line in self.lines
            if room in line.rooms or (not line.rooms and line.text and first <= line.at <= last)
        ]

    def first_wrong(self, room: RoomId) -> Line | None:
        """Return the first event that says that something went wrong with a room."""
        return next((line for line in self.lines_of(room) if line.wrong), None)

    def lost_of(self, room: RoomId) -> Pair | None:
        """Return the first message about a room that did not arrive."""
        return next((pair for pair in self.lost if pair.what[1] == room), None)

    def under_way(self, room: RoomId) -> list[Pair]:
        """Return the writes for a room that have not ended."""
        return [pair for pair in self.pairs if pair.what[1] == room and pair.is_under_way]

    def end_of(self, room: RoomId, side: Side) -> str:
        """Return the last state of a room that a side has reported to its engine."""
        for line in reversed(self.lines):
            if line.side is side and room in line.rooms:
                for name, fields in reversed(line.moment.effects):
                    if name in ("ReportSender", "ReportReceiver") and fields["room"] == room:
                        return _told_report(fields)
        is_known = any(line.side is side and room in line.rooms for line in self.lines)
        return "not reported yet" if is_known else "nothing is recorded of it"


def tell_story(sides: Sequence[Side], pairs: Sequence[Pair], offsets: dict[PeerId, Offset]) -> Story:
    """Merge the sides."""
    lines = [
        Line(
            moment.now - offsets[side.me].shift_s,
            side,
            moment,
            frozenset(rooms := side.rooms_of(moment)),
            _told(moment) if rooms or _is_about_peer(moment.event) else "",
            _wrong(moment),
        )
        for side in sides
        for moment in side.moments
    ]
    lost = [
        pair
        for pair in pairs
        if pair.heard_at is None
        and not pair.is_under_way
        and _is_covered(pair, offsets[pair.sender.me], offsets[pair.receiver.me])
    ]
    at = {side.me: offsets[side.me].shift_s for side in sides}
    lines.sort(key=lambda line: line.at)
    return Story(lines, pairs, sorted(lost, key=lambda pair: pair.sent_at - at[pair.sender.me]), _find_open(lines))


def _find_open(lines: Iterable[Line]) -> dict[tuple[RoomId, PeerId], list[Line]]:
    """Return the events of each room that has begun and not ended, or that decode has asked for and not got."""
    found: dict[tuple[RoomId, PeerId], list[Line]] = {}
    opened: set[tuple[RoomId, PeerId]] = set()
    for line in lines:
        event = line.moment.event
        is_opening = isinstance(event, ev.SendOpened | ev.ReceiveOpened) and not line.moment.error
        is_asking = _is_asking(line.moment)
        for room in line.rooms:
            key = (room, line.side.me)
            if is_opening:
                opened.add(key)
            if key in found:
                found[key].append(line)
            elif is_opening or is_asking:
                found[key] = [line]
            if _ends(line.moment.effects, room, was_opened=key in opened):
                opened.discard(key)
                found.pop(key, None)
    return found


def _is_asking(moment: Moment) -> bool:
    """Return whether decode asks for a room: once when it is opened, and again as long as nothing arrives."""
    if isinstance(moment.event, ev.MessageArrived):
        return isinstance(moment.event.message, Announce | Grant)
    sent = [fields["message"]["type"] for name, fields in moment.effects if name == "SendMessage"]
    return "grant" in sent or "announce" in sent


def _ends(effects: Iterable[tuple[str, Any]], room: RoomId, *, was_opened: bool) -> bool:
    """Return whether effects end a room: they report an outcome or, if it was only asked for, refuse it."""
    for name, fields in effects:
        if name in ("ReportSender", "ReportReceiver") and fields["room"] == room and fields["outcome"] != "pending":
            return True
        message = fields["message"] if name == "Reply" and not was_opened else {}
        if message.get("type") in ("failed", "drained") and message["room"] == room:
            return True
    return False


def _is_about_peer(event: object) -> bool:
    is_goodbye = isinstance(getattr(event, "message", None), Goodbye)
    return is_goodbye or isinstance(event, PEER_EVENTS)


def _is_covered(pair: Pair, sender: Offset, receiver: Offset) -> bool:
    """Return whether the receiver was recorded for long enough after a message to have heard it."""
    sent_at = pair.sent_at - sender.shift_s + receiver.shift_s
    first, last = pair.receiver.span
    return first <= sent_at and sent_at + PATIENCE_S + sender.error_s + receiver.error_s <= last


def _told(moment: Moment) -> str:
    name, values = describe(moment.event)
    shown = " ".join(f"{key}={value}" for key, value in values.items())
    shown = shown if len(shown) <= MAX_VALUES else f"{shown[:MAX_VALUES]}..."
    effects = [moment.error] if moment.error else list(_told_effects(moment.effects))
    return f"{name} {shown}".rstrip() + (f" -> {', '.join(effects)}" if effects else "")


def _told_effects(effects: Iterable[tuple[str, Any]]) -> Iterable[str]:
    for name, fields in effects:
        match name:
            case "SendMessage" | "Reply":
                yield f"sends {fields['message']['type']}"
            case "PostPiece" | "PostPlan":
                cost = fields.get("cost")
                yield f"writes {cost[0]} bytes" if cost else f"writes plan {fields['seq']}"
            case "ReportSender" | "ReportReceiver":
                yield _told_report(fields)
            case "CountAnomaly":
                yield f"ignored: {fields['kind']}"
            case "ProbeAddress":
                yield "probes the address of a ticket"
            case "ProbePeer":
                yield "probes its port"
            case "WaitForFence" | "WaitForLanding":
                yield "waits for the last bytes to land"
            case "LogEvent":
                yield fields["name"]


def _told_report(fields: Any) -> str:
    failure = fields["failure"]
    return f"{fields['outcome']}, {fields['memory']}" + (f" ({failure['reason']})" if failure else "")


def _wrong(moment: Moment) -> str:
    """Return what an event says has gone wrong; empty if nothing."""
    event: Any = moment.event
    failure = getattr(event, "failure", None)
    detail = failure.detail if isinstance(failure, Failure) else failure or getattr(event, "detail", "")
    form = ALWAYS_WRONG.get(type(event)) or (FAILED.get(type(event)) if failure else None)
    if form is not None:
        return form.format(event=event, detail=detail)
    if isinstance(event, ev.ProbeFinished) and event.is_gone:
        return f"the process of {event.peer} has ended"
    if isinstance(event, ev.AddressProbed) and event.is_refused:
        return f"{event.instance.address} refuses connections"
    if isinstance(event, ev.MessageArrived) and event.denied:
        return f"{event.message.__struct_config__.tag} was denied: {event.denied}"
    if moment.error:
        return f"the engine's request was refused, or has broken the rank: {moment.error}"
    return _wrong_in(moment.effects, has_decided=isinstance(event, ev.TimePassed))


def _wrong_in(effects: Iterable[tuple[str, Any]], *, has_decided: bool) -> str:
    """Return what is wrong by the effects: a time that is over, or something that was ignored."""
    for name, fields in effects:
        if name in ("ReportSender", "ReportReceiver") and fields["outcome"] == "failed" and has_decided:
            return f"{fields['failure']['reason']}: {fields['failure']['detail']}"
        if name == "CountAnomaly" and fields["room"] is not None:
            return f"it ignored {fields['kind']} {fields['detail']}".rstrip()
    return ""
