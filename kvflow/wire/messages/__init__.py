"""The messages between ranks, as one tagged union. Pure: sockets are in `channel`, bytes in `codec`.

Version history:
    1: first version.
    2: a Notice may cover a range of layers (`layers`).
    3: standard names for messages and fields; Welcome and Refuse repeat the attempt that they answer; Decline and
       RegistrationConflict are new; Goodbye has `fenced`; Welcome has `domain` and `endpoint`; Hello names a shared
       transport agent. Versions 1 and 2 were never deployed and are no longer supported. Lookup and Records have
       numbers, and a Lookup may omit the instance name; a rank that serves as its instance's directory sends Refuse to
       ranks of other instances. Rooms may be strings. Announce is new. Announce, Grant and Decline may have a
       capability. Every text, number and collection has a bound; a lease is at most ten minutes. Page tables are
       packed (`kvflow.geometry.packed_pages`); long ones are asked for with PagesQuery and come as GrantedPages.
       Welcome tells the limits of prefill. A Ping may ask for the ends of data connections. Notice has `stamps`, Ping
       and Pong have readings of clocks. Offer and OfferAnswered are new.

Rules for changes: the tag is the first field; a new field has a default; a field never changes its meaning; a message
that an old peer cannot ignore needs a new version.
"""

from kvflow.wire.messages import handshake, notices, offers, records, rooms, values
from kvflow.wire.messages.handshake import *  # noqa: F403 - what each lists
from kvflow.wire.messages.notices import *  # noqa: F403 - what each lists
from kvflow.wire.messages.offers import *  # noqa: F403 - what each lists
from kvflow.wire.messages.records import *  # noqa: F403 - what each lists
from kvflow.wire.messages.rooms import *  # noqa: F403 - what each lists
from kvflow.wire.messages.values import *  # noqa: F403 - what each lists

__all__: list[str] = ["AnyMessage"]
__all__ += handshake.__all__
__all__ += notices.__all__
__all__ += offers.__all__
__all__ += records.__all__
__all__ += rooms.__all__
__all__ += values.__all__

AnyMessage = (
    records.Register
    | records.Registered
    | records.RegistrationConflict
    | records.Unregister
    | records.Lookup
    | records.Records
    | handshake.Hello
    | handshake.Welcome
    | handshake.Refuse
    | rooms.Announce
    | rooms.Grant
    | rooms.GrantedPages
    | rooms.PagesQuery
    | rooms.Decline
    | offers.Offer
    | offers.OfferAnswered
    | notices.Notice
    | notices.SlotReleased
    | notices.SlotQuery
    | notices.Ack
    | notices.Cancel
    | notices.Drained
    | notices.Failed
    | handshake.Ping
    | handshake.Pong
    | handshake.Goodbye
)
"""The tagged union of all messages."""
