"""Tickets: what a decode rank needs to receive a room, in a form that any router can pass on. Pure.

Routers parse JSON and serialize it again, and some parse numbers as floats. So numbers that may exceed 2**53 are sent
as text.

With a ticket key, which prefill and decode ranks share, a ticket ends in an HMAC-SHA256 over all fields but the
capability, which the router adds, the trace context, which it may replace, and `own_address`, which only decides how
soon a room fails, and which older versions leave out.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

import msgspec

from kvflow.addresses import check_endpoint
from kvflow.checks import check_traceparent
from kvflow.config import is_instance_name
from kvflow.errors import ConfigError, LocalProtocolError, TicketError
from kvflow.room import RoomId, as_room
from kvflow.trust import Trust
from kvflow.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION, Capability, PeerId, RankId

__all__ = ["Ticket", "ticket_for_room"]

MAX_TEXT: Final = 1_024
MAX_DIGITS: Final = 19
FORMAT: Final = "kvflow ticket 1"

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Version = Annotated[int, msgspec.Meta(ge=1, lt=2**32)]


class _TicketFields(msgspec.Struct, frozen=True, kw_only=True):
    """The serialized fields of a ticket. Unknown fields are ignored."""

    versions: tuple[Version, Version]
    address: Text
    instance: Text
    engine_rank: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    incarnation: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    room: Text
    room_type: Literal["integer", "string"]
    fingerprint: Text
    capability: Capability = ""
    traceparent: Text = ""
    own_address: bool = False
    signature: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""


@dataclass(frozen=True)
class Ticket:
    """Where and how to receive a room, issued by the prefill rank that computes it.

    Attributes:
        room: The router's id of the request.
        address: Address of the directory of the instance: its registry, or the issuer itself.
        issuer: The incarnation that issued the ticket.
        fingerprint: Fingerprint of the issuer's layout.
        versions: Lowest and highest protocol version that the issuer supports.
        capability: Added by the router, see `kvflow.make_capability`; empty if there is none.
        traceparent: W3C trace context of the request, as received; empty if there is none. Not signed, because routers
            may replace it.
        own_address: Whether the address is that of the issuer itself, and not of a registry. False if it is not known.
        signature: HMAC-SHA256 of the other fields, see above, in hexadecimal; empty if it is not signed.
    """

    room: RoomId
    address: str
    issuer: PeerId
    fingerprint: str
    versions: tuple[int, int] = (OLDEST_VERSION, PROTOCOL_VERSION)
    capability: str = ""
    signature: str = ""
    traceparent: str = ""
    own_address: bool = False

    def signed(self, keys: Sequence[bytes]) -> "Ticket":
        """Return the ticket, signed with the first key; unsigned if there is none."""
        return replace(self, signature=self._mac(keys[0]) if keys else "")

    def is_signed_by(self, keys: Sequence[bytes]) -> bool:
        """Return whether one of the keys has signed the ticket."""
        return any(hmac.compare_digest(self._mac(key), self.signature) for key in keys)

    def _mac(self, key: bytes) -> str:
        fields = (FORMAT, self.versions, self.address, self.issuer, self.room, _brief(self.fingerprint))
        return hmac.digest(key, msgspec.msgpack.encode(fields), hashlib.sha256).hex()

    def as_dict(self) -> dict[str, object]:
        """Return the ticket as a dict that survives a round trip through JSON."""
        added: dict[str, object] = {"capability": self.capability, "signature": self.signature}
        added |= {"traceparent": self.traceparent, "own_address": self.own_address}
        return {name: value for name, value in added.items() if value} | {
            "versions": list(self.versions),
            "address": self.address,
            "instance": self.issuer.rank.instance,
            "engine_rank": self.issuer.rank.engine_rank,
            "incarnation": f"{self.issuer.incarnation:016x}",
            "room": str(self.room),
            "room_type": "string" if isinstance(self.room, str) else "integer",
            "fingerprint": _brief(self.fingerprint),
        }

    @classmethod
    def parse(cls, fields: Mapping[str, object]) -> "Ticket":
        """Parse a ticket that a router has passed on.

        Raises:
            TicketError: A field is missing, or has a wrong type or value.
        """
        try:
            read = msgspec.convert(dict(fields), _TicketFields)
            check_endpoint("address", read.address)
            for text in (read.fingerprint, read.instance, read.capability, read.traceparent):
                text.encode()
        except (msgspec.ValidationError, ConfigError, UnicodeEncodeError, TypeError) as error:
            raise TicketError("ticket is malformed", detail=str(error)) from error
        room = _parse_room(read.room) if read.room_type == "integer" else as_room(read.room)
        if room is None:
            raise TicketError("ticket is malformed", detail="room is not a valid room")
        if not is_instance_name(read.instance):
            raise TicketError("ticket is malformed", detail="instance is not a valid name")
        issuer = PeerId(RankId(read.instance, read.engine_rank), int(read.incarnation, 16))
        added = (read.capability, read.signature, read.traceparent, read.own_address)
        return cls(room, read.address, issuer, read.fingerprint, read.versions, *added)

    def to_json(self) -> bytes:
        """Return the ticket as the text that `from_json` parses."""
        return msgspec.json.encode(self.as_dict())

    @classmethod
    def from_json(cls, text: bytes) -> "Ticket":
        """Parse a ticket; raises as `parse`."""
        try:
            return cls.parse(msgspec.json.decode(text, type=dict[str, object]))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TicketError("ticket is malformed", detail=str(error)) from error

    def check_room(self, room: RoomId | None) -> None:
        """Raise TicketError if this ticket is not for a room; None stands for the room of the ticket."""
        if room is not None and room != self.room:
            raise TicketError("ticket is for a different room", room=room, ticket=self.room)

    def check_compatible(self, fingerprint: str) -> None:
        """Check that a handshake of its issuer with a decode rank, whose layout has this fingerprint, can succeed.

        Raises:
            TicketError: It is for a different model, or the two ranks support no common protocol version.
        """
        lowest, highest = self.versions
        if lowest > PROTOCOL_VERSION or highest < OLDEST_VERSION or lowest > highest:
            here = (OLDEST_VERSION, PROTOCOL_VERSION)
            raise TicketError("no common protocol version", ticket=self.versions, here=here)
        if self.fingerprint != _brief(fingerprint):
            raise TicketError("ticket is for a different model", ticket=self.fingerprint, here=fingerprint)


def ticket_for_room(
    ticket: Mapping[str, object], room: RoomId, trust: Trust | None = None, *, traceparent: str | None = None
) -> dict[str, object]:
    """Return a copy of a ticket, by the same issuer, for another room. Works in any process.

    If an engine's scheduler answers the router, but its rank runs in a worker process, the worker sends the scheduler
    one ticket, for any room, once.

    Args:
        ticket: From `PrefillRank.ticket`.
        room: The room of the new ticket.
        trust: The issuer's keys, to sign the new ticket with; not needed if the ticket is not signed.
        traceparent: As in `PrefillRank.ticket`; that of the other room is dropped.

    Raises:
        TicketError: The ticket is malformed.
        ConfigError: `traceparent` is malformed.
        LocalProtocolError: The room is invalid, or the ticket is signed and `trust` has no ticket key.
    """
    number_or_name = as_room(room)
    if number_or_name is None:
        raise LocalProtocolError("room must be an integer or a string within the maximum length", room=room)
    keys = () if trust is None else trust.ticket_keys
    before = Ticket.parse(ticket)
    if before.signature and not keys:
        raise LocalProtocolError("ticket is signed; pass `trust` to sign the new one", room=room)
    return replace(before, room=number_or_name, traceparent=check_traceparent(traceparent)).signed(keys).as_dict()


def _parse_room(digits: str) -> RoomId | None:
    """Parse an integer room; None if it is invalid."""
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
    return as_room(int(digits)) if is_number else None


def _brief(fingerprint: str) -> str:
    """Return a fingerprint, or its digest if it is long, to keep tickets small."""
    if len(fingerprint) <= MAX_TEXT:
        return fingerprint
    return hashlib.blake2b(fingerprint.encode(), digest_size=32).hexdigest()
