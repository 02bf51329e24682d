"""What a prefill rank waits for in its rooms: the keys of its timers. Pure."""

import msgspec

from kvflow.room import RoomId
from kvflow.state.events import DeliveryId
from kvflow.wire.messages import PeerId

__all__ = [
    "DeclineForgotten",
    "DeliveryDeadline",
    "DeliveryUnanswered",
    "GrantOverdue",
    "PostStalled",
    "RoomUndrained",
    "RoomUngranted",
    "RoomUnquiesced",
]


class DeclineForgotten(msgspec.Struct, frozen=True):
    """Timer: the engine has not opened a declined room in time; its id may belong to another request by now."""

    room: RoomId


class RoomUngranted(msgspec.Struct, frozen=True):
    """Timer: after the last chunk, a decode rank has neither granted nor announced in time."""

    room: RoomId


class GrantOverdue(msgspec.Struct, frozen=True):
    """Timer: a decode rank has not sent an announced grant in time."""

    room: RoomId
    peer: PeerId


class DeliveryDeadline(msgspec.Struct, frozen=True):
    """Timer: the decode rank has given up."""

    delivery: DeliveryId


class PostStalled(msgspec.Struct, frozen=True):
    """Timer: a post of this delivery has not ended in time."""

    delivery: DeliveryId


class DeliveryUnanswered(msgspec.Struct, frozen=True):
    """Timer: the decode rank has not acknowledged a delivery that is fully written."""

    delivery: DeliveryId


class RoomUnquiesced(msgspec.Struct, frozen=True):
    """Timer: posts have not ended in time after the engine asked for its pages."""

    room: RoomId


class RoomUndrained(msgspec.Struct, frozen=True):
    """Timer: posts have not ended in time after the room ended."""

    room: RoomId
