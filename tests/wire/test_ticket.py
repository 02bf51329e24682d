"""Tickets: encodings that survive a router, and rejection of damaged ones."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LocalProtocolError, TicketError
from kvflow.trust import Trust
from kvflow.wire.messages import PROTOCOL_VERSION, PeerId, RankId
from kvflow.wire.ticket import Ticket, ticket_for_room

ISSUER = PeerId(RankId("prefill-0", 3), 2**64 - 1)
TICKET = Ticket(2**63 - 1, "tcp://[::1]:7000", ISSUER, "model")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_ticket_survives_a_router_that_reads_every_number_as_a_float() -> None:
    text = json.dumps(TICKET.as_dict())
    assert len(text) < 300
    handed = json.loads(text, parse_int=lambda digits: int(float(digits)))
    assert Ticket.parse({**handed, "added_by_the_router": [1, None]}) == TICKET


@pytest.mark.parametrize("room", [0, "0", "cmpl-3f", "x" * 256])
def test_rooms_of_both_kinds_come_back(room: int | str) -> None:
    ticket = Ticket(room, "tcp://h:1", ISSUER, "model")
    assert Ticket.parse(json.loads(json.dumps(ticket.as_dict()))) == ticket


@given(st.dictionaries(st.sampled_from([*TICKET.as_dict()]), JSON, min_size=1))
def test_whatever_a_field_becomes_is_read_or_refused(changed: dict[str, Any]) -> None:
    try:
        ticket = Ticket.parse({**TICKET.as_dict(), **changed})
    except TicketError:
        return
    assert Ticket.parse(ticket.as_dict()) == ticket


@pytest.mark.parametrize("field", [*TICKET.as_dict()])
@pytest.mark.parametrize("value", [None, True, -1, 1.5, "", "x" * 5_000, b"7", [], {}, "\ud800"])
def test_fields_that_nobody_writes_are_refused(field: str, value: object) -> None:
    if (field, value) == ("fingerprint", ""):
        return
    with pytest.raises(TicketError, match="malformed"):
        Ticket.parse({**TICKET.as_dict(), field: value})


@pytest.mark.parametrize("value", ["0" * 15, "0" * 17, "0" * 16 + "\n", "A" * 16, "0x" + "0" * 14])
def test_an_incarnation_that_nobody_writes_is_refused(value: str) -> None:
    with pytest.raises(TicketError, match="malformed"):
        Ticket.parse({**TICKET.as_dict(), "incarnation": value})


@pytest.mark.parametrize("field", [*TICKET.as_dict()])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    fields = TICKET.as_dict()
    del fields[field]
    with pytest.raises(TicketError, match=field):
        Ticket.parse(fields)


@pytest.mark.parametrize("address", ["tcp://*:1", "tcp://10.0.0.1:0", "tcp://10.0.0.1:70000", "ipc://x", "10.0.0.1:1"])
def test_an_address_that_nobody_can_connect_to_is_refused(address: str) -> None:
    with pytest.raises(TicketError, match="address"):
        Ticket.parse({**TICKET.as_dict(), "address": address})


def test_numbers_as_keys_are_no_ticket() -> None:
    with pytest.raises(TicketError):
        Ticket.parse({1: 2})  # type: ignore[dict-item]


def test_long_fingerprints_are_compared_by_their_digest() -> None:
    ticket = Ticket.parse(Ticket(1, "tcp://h:1", ISSUER, "m" * 10_000).as_dict())
    ticket.check_compatible("m" * 10_000)
    with pytest.raises(TicketError, match="different model"):
        ticket.check_compatible("m" * 9_999)


@pytest.mark.parametrize("versions", [(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2), (1, 1), (9, 1)])
def test_versions_that_do_not_overlap_are_refused(versions: tuple[int, int]) -> None:
    ticket = Ticket(1, "tcp://h:1", ISSUER, "model", versions)
    with pytest.raises(TicketError, match="version"):
        ticket.check_compatible("model")


def test_what_is_meant_for_another_room_is_refused() -> None:
    TICKET.check_room(None)
    TICKET.check_room(TICKET.room)
    with pytest.raises(TicketError, match="different room"):
        TICKET.check_room(1)


def test_one_ticket_serves_for_every_room() -> None:
    fields = TICKET.as_dict()
    for room in (7, "request-7"):
        assert Ticket.parse(ticket_for_room(fields, room)) == replace(TICKET, room=room)


@pytest.mark.parametrize("room", [-1, "", True, None])
def test_a_ticket_for_no_room_is_refused(room: Any) -> None:
    with pytest.raises(LocalProtocolError, match="room must be"):
        ticket_for_room(TICKET.as_dict(), room)


def test_no_ticket_is_made_of_a_malformed_one() -> None:
    with pytest.raises(TicketError, match="malformed"):
        ticket_for_room({}, 7)


KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def test_a_signature_covers_every_field_but_the_capability() -> None:
    signed = TICKET.signed([KEY, OTHER_KEY]).as_dict()
    assert Ticket.parse({**signed, "capability": "added by the router"}).is_signed_by([OTHER_KEY, KEY])
    assert not Ticket.parse(signed).is_signed_by([OTHER_KEY])
    changes = {
        "versions": [1, 9],
        "address": "tcp://[::2]:7000",
        "instance": "prefill-1",
        "engine_rank": 4,
        "incarnation": "0" * 16,
        "room": "7",
        "room_type": "string",
        "fingerprint": "other",
        "signature": "0" * 64,
    }
    assert changes.keys() == signed.keys()
    for field, value in changes.items():
        assert not Ticket.parse({**signed, field: value}).is_signed_by([KEY]), field


def test_a_ticket_for_another_room_is_signed_again() -> None:
    signed, trust = TICKET.signed([KEY]).as_dict(), Trust(ticket_keys=(KEY,))
    assert Ticket.parse(ticket_for_room(signed, 7, trust)).is_signed_by([KEY])
    with pytest.raises(LocalProtocolError, match="pass `trust`"):
        ticket_for_room(signed, 7)


def test_who_listens_at_the_address_is_said_only_if_it_is_the_issuer() -> None:
    assert "own_address" not in TICKET.as_dict(), "as in tickets of versions that do not know it"
    own = replace(TICKET, own_address=True)
    assert Ticket.parse(json.loads(json.dumps(own.as_dict()))) == own
    assert Ticket.parse(ticket_for_room(own.as_dict(), 7)).own_address
    assert own.signed([KEY]).signature == TICKET.signed([KEY]).signature, "which older versions check, too"
    with pytest.raises(TicketError, match="own_address"):
        Ticket.parse({**own.as_dict(), "own_address": "yes"})
