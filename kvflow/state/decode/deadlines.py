"""What a decode rank waits for: the keys of its timers. Pure."""

import msgspec

from kvflow.state.peers import LeaseCheck
from kvflow.wire.messages import PeerId

__all__ = [
    "DeclineUnanswered",
    "DecodeTimer",
    "HandshakeDeadline",
    "HelloUnanswered",
    "InstanceTimer",
    "OfferOverdue",
    "OfferTimer",
    "OfferUnanswered",
    "PeerForgotten",
    "PingDue",
    "ProbeDue",
    "QueuePairsGone",
    "ReceiveDeadline",
    "ReceiveStalled",
    "ReceiveTimer",
    "ReceiveUnanswered",
    "ReceiveUndrained",
    "RetryLookup",
]


class HelloUnanswered(msgspec.Struct, frozen=True):
    """Timer: a rank has not answered its Hello, which must be retransmitted."""

    peer: PeerId


class RetryLookup(msgspec.Struct, frozen=True):
    """Timer: ask the directory again."""

    instance: int


class HandshakeDeadline(msgspec.Struct, frozen=True):
    """Timer: the first waiting room has reached its handshake deadline."""

    instance: int


class DeclineUnanswered(msgspec.Struct, frozen=True):
    """Timer: a rank of an instance has not answered a decline, which must be retransmitted."""

    instance: int


class OfferUnanswered(msgspec.Struct, frozen=True):
    """Timer: an offer is not answered, and must be sent again."""

    number: int


class OfferOverdue(msgspec.Struct, frozen=True):
    """Timer: an offer was not answered in time."""

    number: int


class PingDue(msgspec.Struct, frozen=True):
    """Timer: a Ping to a peer is due."""

    peer: PeerId


class PeerForgotten(msgspec.Struct, frozen=True):
    """Timer: a lost peer has been silent long enough to forget it, or to close its connection."""

    peer: PeerId


class ProbeDue(msgspec.Struct, frozen=True):
    """Timer: the next probe of a suspect peer's process is due."""

    peer: PeerId


class QueuePairsGone(msgspec.Struct, frozen=True):
    """Timer: by the deployment's setting, no write of a terminated process can land any more."""

    peer: PeerId


class ReceiveDeadline(msgspec.Struct, frozen=True):
    """Timer: the time limit of the transfer, or of an announced room's wait for pages, is over."""

    generation: int


class ReceiveStalled(msgspec.Struct, frozen=True):
    """Timer: nothing more has arrived for too long."""

    generation: int


class ReceiveUnanswered(msgspec.Struct, frozen=True):
    """Timer: a rank has not sent everything, or not given its proof, and may have missed a message."""

    generation: int


class ReceiveUndrained(msgspec.Struct, frozen=True):
    """Timer: granted ranks have not sent Drained in time after the transfer failed."""

    generation: int


ReceiveTimer = ReceiveDeadline | ReceiveStalled | ReceiveUnanswered | ReceiveUndrained
"""What a room waits for."""

InstanceTimer = HelloUnanswered | RetryLookup | HandshakeDeadline | DeclineUnanswered
"""What the handshake with a prefill instance waits for."""

OfferTimer = OfferUnanswered | OfferOverdue
"""What an offer waits for."""

DecodeTimer = (
    ReceiveTimer | InstanceTimer | OfferTimer | PingDue | PeerForgotten | ProbeDue | QueuePairsGone | LeaseCheck
)
"""Whatever a decode rank waits for."""
