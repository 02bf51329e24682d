"""Messages with which decode ranks ask for rooms, or decline them."""

from typing import Annotated

import msgspec

from kvflow.geometry.layout import MAX_COMPONENTS, Name
from kvflow.wire.messages.values import (
    PAGES_PER_PART,
    Capability,
    Count,
    Failure,
    Message,
    Number,
    PeerId,
    Position,
    Priority,
    Seconds,
    WireRoom,
)

__all__ = ["Announce", "Decline", "Grant", "GrantedPages", "PagesQuery"]


class Announce(Message, frozen=True, tag="announce"):
    """Decode -> prefill: asks the receiver to keep a room's pages until the sender has pages to grant.

    A Grant or Decline of the same generation follows. Answered only if the room fails, by Failed.

    Attributes:
        num_decode_ranks: Number of decode ranks that request this room.
        timeout_s: Time left until the decode rank gives up.
        capability: Permits the sender to receive the room, see `kvflow.gate.capability`; empty if it has none.
    """

    room: WireRoom
    generation: Number
    num_decode_ranks: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    timeout_s: Seconds
    capability: Capability = ""


class Grant(Message, frozen=True, tag="grant"):
    """Decode -> prefill: permits writes to these pages.

    Attributes:
        generation: Identifies this attempt to receive the room; the decode rank never reuses one.
        token: Random. Every Notice must repeat it, because in-band notices carry no other proof of their origin.
        ranges: Requested token positions `[start, stop)`, by component.
        pages: Pages that receive them, by component, as little-endian uint32. On the wire they are packed.
        num_pages: Number of pages by component, instead of `pages`, if they are more than `PAGES_INLINE`. The receiver
            asks for them with PagesQuery.
        num_decode_ranks: Number of decode ranks that request this room.
        timeout_s: Time left until the decode rank gives up.
        progress_s: After the first bytes have arrived, how long the decode rank waits for more before it gives up.
        priority: Priority class of the transfer; 0 is sent first.
        digest: True if notices must carry digests of the written bytes.
        capability: As in Announce.
    """

    room: WireRoom
    generation: Number
    token: Number
    ranges: Annotated[dict[Name, tuple[Position, Position]], msgspec.Meta(max_length=MAX_COMPONENTS)]
    pages: Annotated[dict[Name, bytes], msgspec.Meta(max_length=MAX_COMPONENTS)]
    num_decode_ranks: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    timeout_s: Seconds
    progress_s: Seconds
    priority: Priority
    digest: bool
    capability: Capability = ""
    num_pages: Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_COMPONENTS)] = msgspec.field(
        default_factory=dict
    )

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """The parts in which the pages of `num_pages` are sent: component, first page and the page after the last."""
        return [
            (name, first, min(first + PAGES_PER_PART, count))
            for name, count in self.num_pages.items()
            for first in range(0, count, PAGES_PER_PART)
        ]


class PagesQuery(Message, frozen=True, tag="pages_query"):
    """Prefill -> decode: asks for parts `[start, stop)` of the pages of a Grant (`Grant.parts`).

    A receiver of Grants asks when it has memory and time for them, so decode ranks cannot send more than it can take.
    """

    room: WireRoom
    generation: Number
    start: Count
    stop: Count


class GrantedPages(Message, frozen=True, tag="granted_pages"):
    """Decode -> prefill: one part of the pages of a Grant, see `Grant.parts`; answers a PagesQuery.

    Attributes:
        pages: The pages as little-endian uint32. On the wire they are packed.
    """

    room: WireRoom
    generation: Number
    part: Count
    pages: bytes


class Decline(Message, frozen=True, tag="decline"):
    """Decode -> prefill: the sender will not receive this room and has granted no pages for it.

    The receiver need not keep its pages. Answered by Drained.

    Attributes:
        failure: Why the room is declined.
        capability: As in Announce.
        peer: The sender, if there was no handshake, for example because it is refused; else None.
        to: The incarnation that is meant to receive this, together with `peer`.
    """

    room: WireRoom
    generation: Number
    failure: Failure
    capability: Capability = ""
    peer: PeerId | None = None
    to: PeerId | None = None
