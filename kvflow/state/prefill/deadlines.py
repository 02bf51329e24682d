"""What a prefill rank waits for: the keys of its timers. Pure."""

import msgspec

from kvflow.room import RoomId
from kvflow.state.events import DeliveryId
from kvflow.state.peers import LeaseCheck
from kvflow.wire.messages import PeerId

__all__ = [
    "DeclineForgotten",
    "DeliveryDeadline",
    "DeliveryUnanswered",
    "GrantOverdue",
    "OfferExpired",
    "PostStalled",
    "PrefillTimer",
    "RoomDeadline",
    "RoomUndrained",
    "RoomUngranted",
    "RoomUnopened",
    "RoomUnquiesced",
    "SlotUnreturned",
]


class RoomUnopened(msgspec.Struct, frozen=True):
    """Timer: the engine has not opened this room before the request for it expired."""

    room: RoomId
    peer: PeerId


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
    generation: int


class DeliveryDeadline(msgspec.Struct, frozen=True):
    """Timer: the decode rank has given up."""

    delivery: DeliveryId


class PostStalled(msgspec.Struct, frozen=True):
    """Timer: after some posts of this delivery, the next one has not ended in time."""

    delivery: DeliveryId
    num_ended: int


class DeliveryUnanswered(msgspec.Struct, frozen=True):
    """Timer: after some retransmissions, the decode rank has not acknowledged a delivery that is fully written."""

    delivery: DeliveryId
    num_retransmits: int


class RoomUnquiesced(msgspec.Struct, frozen=True):
    """Timer: posts have not ended in time after the engine asked for its pages."""

    room: RoomId


class RoomUndrained(msgspec.Struct, frozen=True):
    """Timer: posts have not ended in time after the room ended."""

    room: RoomId


class OfferExpired(msgspec.Struct, frozen=True):
    """Timer: the sender of an offer has given up."""

    peer: PeerId
    number: int


class SlotUnreturned(msgspec.Struct, frozen=True):
    """Timer: the decode rank has not returned a slot in time."""

    delivery: DeliveryId
    seq: int


RoomDeadline = (
    RoomUngranted | GrantOverdue | DeliveryDeadline | PostStalled | DeliveryUnanswered | RoomUnquiesced | RoomUndrained
)
"""What an open room or one of its deliveries waits for."""


PrefillTimer = RoomDeadline | RoomUnopened | DeclineForgotten | SlotUnreturned | OfferExpired | LeaseCheck
"""Whatever a prefill rank waits for."""
