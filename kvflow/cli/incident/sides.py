"""The recordings of an incident: one side for each rank, and what they have said to each other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvflow.errors import ConfigError
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.part_replay import room_of, rooms_in
from kvflow.state.recorder import Cause, Header
from kvflow.state.replay import Moment, Recording, read_recording
from kvflow.wire.messages import Hello, PeerId

__all__ = ["Pair", "Side", "Spoken", "pair_messages", "read_sides"]


class Spoken(NamedTuple):
    """A message, or a write, as one side has seen it.

    Attributes:
        at: When, in seconds of that side's clock.
        what: Its kind, room, generation and number, which are the same on both sides.
        other: The other side; None if this side's recording begins too late to know.
    """

    at: float
    what: tuple[object, ...]
    other: PeerId | None


class Side:
    """What one incarnation of a rank has recorded.

    Attributes:
        header: Of the newest file.
        moments: Its events, in order.
        has_gap: Whether events are missing between them.
        room_of: The rooms of a decode rank by generation.
        writes_ended: Writes that have ended well: room, peer, generation and number.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        newest = max(recordings, key=lambda one: one.header.first + len(one.moments))
        known = {moment.number: moment for one in recordings for moment in one.moments}
        causes = {cause: None for one in recordings for cause in one.header.causes}
        oldest = min(recordings, key=lambda one: one.header.first)
        self.header: Header = msgspec.structs.replace(
            newest.header, first=oldest.header.first, lasting=oldest.header.lasting, causes=tuple(causes)
        )
        self._lasting = oldest.lasting
        self.moments: Sequence[Moment] = [known[number] for number in sorted(known)]
        self.has_gap = bool(known) and max(known) - min(known) + 1 != len(known)
        self.room_of: dict[int, RoomId] = {
            event.generation: event.room
            for event in (moment.event for moment in self.moments)
            if isinstance(event, ev.ReceiveOpened)
        }
        self.writes_ended: set[tuple[object, ...]] = {
            (*event.delivery, event.seq)
            for event in (moment.event for moment in self.moments)
            if isinstance(event, ev.PostEnded) and event.failure is None
        }
        self._peer_at: dict[bytes, PeerId] = {
            event.connection: event.message.peer
            for event in (moment.event for moment in self.moments)
            if isinstance(event, ev.MessageArrived) and isinstance(event.message, Hello)
        }

    @property
    def me(self) -> PeerId:
        """The incarnation."""
        return self.header.me

    @property
    def name(self) -> str:
        """Name of the rank, "instance/engine_rank"."""
        return str(self.me.rank)

    @property
    def causes(self) -> Sequence[Cause]:
        """Why it was written."""
        return self.header.causes

    @property
    def recording(self) -> Recording:
        """Everything, to be replayed."""
        return Recording(self.header, self.moments, self._lasting)

    @property
    def span(self) -> tuple[float, float]:
        """When the first event happened, and until when nothing is missing: the last event, or why it was written."""
        if not self.moments:
            return (0.0, 0.0)
        return (self.moments[0].now, max(self.moments[-1].now, *(cause.at for cause in self.causes), -math.inf))

    def rooms_of(self, moment: Moment) -> set[RoomId]:
        """Return the rooms that an event, or its effects, are about."""
        event: Any = moment.event
        found = {room for room in [room_of(event)] if room is not None}
        generations = [getattr(event, "generation", None)]
        for _, fields in moment.effects:
            found.update(rooms_in(fields))
            generations += [fields.get("generation")] if isinstance(fields, dict) else []
        return found | {self.room_of[one] for one in generations if one in self.room_of}

    def sent(self) -> Iterable[Spoken]:
        """Yield what it has sent, at the time of the event that made it send."""
        for moment in self.moments:
            for name, fields in moment.effects:
                if name == "SendMessage":
                    yield Spoken(moment.now, _ident(fields["message"]), _peer(fields["peer"]))
                elif name == "Reply":
                    yield Spoken(moment.now, _ident(fields["message"]), self._peer_at.get(fields["connection"]))
                elif name in ("PostPiece", "PostPlan"):
                    room, peer, generation = fields["delivery"]
                    notice = {"type": "notice", "room": room, "generation": generation, "seq": fields["seq"]}
                    notice["engine_rank"] = self.me.rank.engine_rank
                    yield Spoken(moment.now, _ident(notice), _peer(peer))

    def heard(self) -> Iterable[Spoken]:
        """Yield what has arrived."""
        for moment in self.moments:
            match moment.event:
                case ev.MessageReceived(peer, message):
                    yield Spoken(moment.now, _ident(msgspec.to_builtins(message)), peer)
                case ev.MessageArrived(connection, message):
                    yield Spoken(moment.now, _ident(msgspec.to_builtins(message)), self._peer_at.get(connection))
                case ev.NoticeDelivered(notice):
                    yield Spoken(moment.now, _ident(msgspec.to_builtins(notice)), None)


def read_sides(paths: Sequence[Path]) -> list[Side]:
    """Read files, several of which may be of one rank; prefill comes first.

    Raises:
        ConfigError: A file cannot be read, or is not a recording.
    """
    found: dict[PeerId, list[Recording]] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                recording = read_recording(file)
        except OSError as error:
            raise ConfigError("recording cannot be read", path=str(path), detail=error.strerror) from error
        found.setdefault(recording.header.me, []).append(recording)
    sides = [Side(recordings) for recordings in found.values()]
    return sorted(sides, key=lambda side: (side.header.role != "prefill", side.me))


class Pair(NamedTuple):
    """A message, or a write with its notice: sent by one side, and when it arrived; None if it did not."""

    what: tuple[object, ...]
    sender: Side
    sent_at: float
    receiver: Side
    heard_at: float | None

    @property
    def is_under_way(self) -> bool:
        """Whether it is the notice of a write that has not ended."""
        kind, room, generation, _, seq, *_ = self.what
        is_write = kind == "notice" and self.heard_at is None
        return is_write and (room, self.receiver.me, generation, seq) not in self.sender.writes_ended


def pair_messages(sides: Sequence[Side]) -> list[Pair]:
    """Pair what sides have sent with what others have heard, in order of its repetitions.

    A recording may begin between a message and its repetition, so a message is only paired if the recording of its
    sender has the beginning of the room.
    """
    pairs = []
    for sender in sides:
        begun = _rooms_begun(sender)
        for receiver in sides:
            if sender.header.role == receiver.header.role:
                continue
            heard: dict[tuple[object, ...], list[float]] = {}
            for one in receiver.heard():
                if one.other in (None, sender.me) and _comes_from(one.what, sender):
                    heard.setdefault(one.what, []).append(one.at)
            for one in sender.sent():
                if one.what[1] in begun and one.other in (None, receiver.me):
                    arrivals = heard.get(one.what, [])
                    pairs.append(Pair(one.what, sender, one.at, receiver, arrivals.pop(0) if arrivals else None))
    return pairs


def _rooms_begun(side: Side) -> set[object]:
    """Return the rooms of which a recording has the beginning."""
    opening = (ev.SendOpened, ev.ReceiveOpened, ev.RoomDeclined)
    opened: set[object] = {moment.event.room for moment in side.moments if isinstance(moment.event, opening)}
    if side.header.first == 0:
        opened.add(None)
        for moment in side.moments:
            opened |= side.rooms_of(moment)
    return opened


def _comes_from(what: tuple[object, ...], sender: Side) -> bool:
    """Return whether a message that names the engine rank of its sender may come from a side."""
    return sender.header.role != "prefill" or what[3] in (None, sender.me.rank.engine_rank)


def _ident(message: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what identifies a message among those between two ranks."""
    return tuple(message.get(name) for name in ("type", "room", "generation", "engine_rank", "seq", "part", "attempt"))


def _peer(value: Sequence[Any]) -> PeerId:
    return msgspec.convert(value, PeerId)
