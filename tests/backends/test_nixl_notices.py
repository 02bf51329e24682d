"""Several notices in one payload."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.backends.nixl.posts import MAX_JOINED, MAX_NOTICES, pack_notices, unpack_notices
from kvflow.errors import RemoteProtocolError

NOTICES = st.lists(st.binary(min_size=1, max_size=40) | st.just(bytes(70_000)), max_size=6)


@given(NOTICES)
def test_notices_come_out_as_they_went_in(notices: list[bytes]) -> None:
    assert unpack_notices(pack_notices(notices)) == notices


@given(NOTICES, st.integers(0, 6))
def test_an_empty_notice_is_none(notices: list[bytes], place: int) -> None:
    assert pack_notices([*notices[:place], b"", *notices[place:]]) == pack_notices(notices)
    assert pack_notices([b"", b""]) == b""


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=4), st.data())
def test_a_cut_payload_is_read_up_to_a_whole_notice_or_refused(notices: list[bytes], data: st.DataObject) -> None:
    payload = pack_notices(notices)
    cut = payload[: data.draw(st.integers(0, len(payload) - 1))]
    whole = [notices[:count] for count in range(len(notices)) if pack_notices(notices[:count]) == cut]
    if whole:
        assert unpack_notices(cut) == whole[0]
    else:
        with pytest.raises(RemoteProtocolError):
            unpack_notices(cut)


@given(st.binary(max_size=40))
def test_what_anybody_may_send_is_read_in_one_way_or_refused(payload: bytes) -> None:
    try:
        notices = unpack_notices(payload)
    except RemoteProtocolError:
        return
    assert pack_notices(notices) == payload


@pytest.mark.parametrize(
    "payload", [b"\1", b"\1\0\0\0", b"\2\0\0\0x", b"\0\0\0\0", b"\1\0\0\0x\0\0\0\0", b"\xff\xff\xff\xffxy", b"KVF\1..."]
)
def test_malformed_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_notices(payload)


def test_no_more_notices_are_read_than_are_ever_joined() -> None:
    """A payload of many short notices would take many times its size in memory."""
    notices = [b"n"] * MAX_NOTICES
    assert unpack_notices(pack_notices(notices)) == notices
    with pytest.raises(RemoteProtocolError):
        unpack_notices(pack_notices([*notices, b"n"]))
    assert MAX_JOINED <= MAX_NOTICES
