"""What can be overdue on a prefill rank: the keys of its deadlines. Pure."""

from typing import NamedTuple

import msgspec

from kvflow.state.events import DeliveryId
from kvflow.wire.messages import PeerId

__all__ = ["Pending", "RoomPending", "Stalled", "Unanswered", "Undelivered", "Undrained", "Ungranted", "Unopened"]


class Unopened(msgspec.Struct, frozen=True):
    """Deadline: the engine must open this room before the grant runs out."""

    room: int
    peer: PeerId


class Ungranted(msgspec.Struct, frozen=True):
    """Deadline: every decode rank must have granted after the last chunk."""

    room: int


class Undelivered(msgspec.Struct, frozen=True):
    """Deadline: the decode rank gives up."""

    delivery: DeliveryId


class Stalled(msgspec.Struct, frozen=True):
    """Deadline: a post of this delivery must have ended."""

    delivery: DeliveryId


class Unanswered(msgspec.Struct, frozen=True):
    """Deadline: the decode rank should have said that it knows how the delivery ended."""

    delivery: DeliveryId


class Undrained(msgspec.Struct, frozen=True):
    """Deadline: posts must have ended after the room has."""

    room: int


class Pending(NamedTuple):
    """What a delivery waits for; each has a deadline.

    Attributes:
        outcome: To be decided.
        post: To end.
        answer: That the decode rank knows that everything is written.
    """

    outcome: bool = True
    post: bool = False
    answer: bool = False


class RoomPending(NamedTuple):
    """What a room waits for; each has a deadline.

    Attributes:
        grants: Of every decode rank, after the last chunk.
        drain: That posts end, after the room has.
    """

    grants: bool = False
    drain: bool = False
