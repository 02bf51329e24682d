"""What can be overdue on a prefill rank: the keys of its deadlines. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from kvflow.state.events import DeliveryId
from kvflow.wire.messages import PeerId

__all__ = ["Pending", "Stalled", "Unanswered", "Undelivered", "Undrained", "Ungranted", "Unopened"]


@dataclass(frozen=True, slots=True)
class Unopened:
    """Deadline: the engine must open this room before the grant runs out."""

    room: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Ungranted:
    """Deadline: every decode rank must have granted after the last chunk."""

    room: int


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Deadline: the decode rank gives up."""

    delivery: DeliveryId


@dataclass(frozen=True, slots=True)
class Stalled:
    """Deadline: a post of this delivery must have ended."""

    delivery: DeliveryId


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Deadline: the decode rank should have said that it knows how the delivery ended."""

    delivery: DeliveryId


@dataclass(frozen=True, slots=True)
class Undrained:
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
