"""Replays the rooms of a recording that does not begin with its rank. Pure.

A fresh core gets the events that made the connections, one after another, and then those of the recording but for rooms
that were open before. What the core decides about the others follows from these, except where rooms compete for turns,
credit, staging slots and pages. So only what it reports and sends for a room is compared, not when it posts, and a
difference may still have its reason in a room that was left out.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from kvflow.errors import ConfigError
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.quarantine import NO_MEMORY
from kvflow.state.replay import FreshCore, Recording, ReplayDifference, as_plain
from kvflow.wire.messages import Ping, Pong

__all__ = ["PartReplay", "replay_part", "room_of", "rooms_in"]

COMPARED: Final = frozenset(
    {"Reply", "ReportGranted", "ReportQuiesced", "ReportReceiver", "ReportSender", "SendMessage"}
)

LONG_S: Final = 86_400.0


class PartReplay(NamedTuple):
    """The result: how many rooms were compared, and how many were left out, and the first difference, if any.

    Attributes:
        stopped_at: Number of the event that the fresh core could not take, because a room that was left out matters;
            None if there is none.
    """

    num_rooms: int
    num_left_out: int
    difference: ReplayDifference | None
    stopped_at: int | None = None


def replay_part(recording: Recording) -> PartReplay:
    """Replay the rooms that were opened within a recording.

    Raises:
        ConfigError: The events that made the connections are missing, or the settings are damaged.
    """
    if recording.header.lasting is None:
        raise ConfigError("the events that made the connections were too many to be kept")
    fresh = FreshCore(recording.header)
    for moment in recording.lasting:
        if isinstance(moment.event, ev.TimePassed):
            _hear_all(fresh, moment.now)
        fresh.handle(_without_pages(moment.event), moment.now)
    _hear_all(fresh, recording.moments[0].now if recording.moments else 0.0)
    rooms: set[RoomId] = set()
    generations: set[int] = set()
    left_out: set[RoomId | None] = set()
    for moment in recording.moments:
        event: Any = moment.event
        if isinstance(event, ev.SendOpened | ev.ReceiveOpened) and not moment.error:
            rooms.add(event.room)
            generations.add(getattr(event, "generation", 0))
        room, generation = room_of(event), getattr(event, "generation", None)
        if room not in {None, *rooms} or generation not in {None, *generations}:
            left_out.add(room)
            continue
        effects, error = fresh.handle(event, moment.now)
        if error and not moment.error:
            return PartReplay(len(rooms), len(left_out - {None}), None, moment.number)
        recorded, replayed = _about(moment.effects, rooms), _about(as_plain(effects), rooms)
        if recorded != replayed or error != moment.error:
            difference = ReplayDifference(moment.number, moment.now, event, recorded, replayed)
            return PartReplay(len(rooms), len(left_out - {None}), difference)
    return PartReplay(len(rooms), len(left_out - {None}), None)


def _without_pages(event: Any) -> Any:
    """Return an event without pages that others could not have: its room is only there to make a connection."""
    if not isinstance(event, ev.ReceiveOpened):
        return event
    return msgspec.structs.replace(event, ranges={}, pages={}, footprint=NO_MEMORY, is_announced=True, timeout_s=LONG_S)


def _hear_all(fresh: FreshCore, now: float) -> None:
    """Let the core hear from every peer, as it has in the time that is not recorded."""
    core = fresh.core
    if isinstance(core, PrefillCore):
        for connection, peer in core.peers.connections().items():
            core.handle(ev.MessageArrived(connection, Ping(peer=peer)), now)
    else:
        for peer in core.peers_reachable():
            core.handle(ev.MessageReceived(peer, Pong(peer=peer)), now)


def room_of(event: Any) -> RoomId | None:
    """Return the room that an event is about; None if it is about none, or says only a generation."""
    carriers = (event, *(getattr(event, name, None) for name in ("message", "notice", "delivery")))
    return next((room for one in carriers if (room := getattr(one, "room", None)) is not None), None)


def rooms_in(fields: Any) -> set[RoomId]:
    """Return the rooms in the fields of a recorded effect."""
    if not isinstance(fields, dict):
        return set()
    found = {fields.get("room"), *(fields[name].get("room") for name in ("message", "notice") if name in fields)}
    if "delivery" in fields:
        found.add(fields["delivery"][0])
    return found - {None}


def _about(effects: Iterable[tuple[str, Any]], rooms: set[RoomId]) -> list[str]:
    """Return what effects report and send about some rooms, in any order."""
    return sorted(_told(name, fields) for name, fields in effects if name in COMPARED and rooms_in(fields) & rooms)


def _told(name: str, fields: Any) -> str:
    match fields:
        case {"outcome": outcome, "memory": memory, "room": room, "failure": failure}:
            return f"{name} {room}: {outcome}, {memory}, {failure and failure['reason']}"
        case {"message": message}:
            return f"{name} {message['room']}: {message['type']}"
    return f"{name} {fields['room']}"
