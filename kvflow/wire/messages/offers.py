"""Messages with which an instance offers the pages of a room to another one, which has not asked for them."""

from typing import Annotated, Final

import msgspec

from kvflow.wire.messages.values import Failure, Message, Number, Position, Seconds

__all__ = ["MAX_OFFER_METADATA_BYTES", "MAX_TICKET_BYTES", "Offer", "OfferAnswered"]

MAX_TICKET_BYTES: Final = 6_144
"""Maximum length of the ticket in an offer. A capability takes most of it."""

MAX_OFFER_METADATA_BYTES: Final = 1_024
"""Maximum length of what an engine says about an offer. What it needs to go on travels with the pages."""


class Offer(Message, frozen=True, tag="offer"):
    """Decode -> prefill: the sender's instance has pages of a room, and offers them to the receiver's instance.

    Its engine may receive the room with the ticket, as from any prefill rank. Answered by OfferAnswered, repeated until
    then.

    Attributes:
        number: Identifies the offer. A sender never reuses one.
        ticket: The ticket of the room, issued by a rank of the sender's instance, as JSON.
        tokens: Positions `[start, stop)` of which the sender's instance has pages.
        timeout_s: Time left until the sender gives up.
        metadata: What the sender's engine says about it.
    """

    number: Number
    ticket: Annotated[bytes, msgspec.Meta(max_length=MAX_TICKET_BYTES)]
    tokens: tuple[Position, Position]
    timeout_s: Seconds
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_OFFER_METADATA_BYTES)] = b""


class OfferAnswered(Message, frozen=True, tag="offer_answered"):
    """Prefill -> decode: the engine has accepted an offer, and will receive its room, or not.

    Attributes:
        number: As in the Offer.
        failure: Why it is declined; None if it is accepted.
    """

    number: Number
    failure: Failure | None = None
