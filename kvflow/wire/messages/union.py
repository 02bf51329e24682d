"""The tagged union of all messages."""

from kvflow.wire.messages.handshake import Goodbye, Hello, Ping, Pong, Refuse, Welcome
from kvflow.wire.messages.notices import Ack, Cancel, Drained, Failed, Notice, SlotQuery, SlotReleased
from kvflow.wire.messages.records import Lookup, Records, Register, Registered, RegistrationConflict, Unregister
from kvflow.wire.messages.rooms import Announce, Decline, Grant, GrantedPages, PagesQuery

__all__ = ["AnyMessage"]

AnyMessage = (
    Register
    | Registered
    | RegistrationConflict
    | Unregister
    | Lookup
    | Records
    | Hello
    | Welcome
    | Refuse
    | Announce
    | Grant
    | GrantedPages
    | PagesQuery
    | Decline
    | Notice
    | SlotReleased
    | SlotQuery
    | Ack
    | Cancel
    | Drained
    | Failed
    | Ping
    | Pong
    | Goodbye
)
