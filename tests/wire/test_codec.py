"""Decoding of untrusted bytes: the result is one well-formed message or a RemoteProtocolError, nothing else."""

import struct
import typing
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow.errors import FailureReason, LayoutError, RemoteProtocolError, Stage
from kvflow.gate.sizes import LONG_BYTES, MAX_REQUEST_BYTES, Unread
from kvflow.geometry.layout import KVLayout
from kvflow.wire.codec import HEADER, Reader, decode, encode
from kvflow.wire.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Failure,
    Grant,
    GrantedPages,
    Hello,
    Lookup,
    Message,
    Notice,
    PeerId,
    Ping,
    RankId,
    RankRecord,
    Records,
    Refuse,
    Register,
    Welcome,
)
from tests.support.pools import PagedShape, Pool
from tests.wire.strategies import MESSAGES, any_message

PEER: Final = PeerId(RankId("prefill", 0), 2**64 - 1)
PING: Final = encode(Ping(peer=PEER))
GRANT: Final = Grant(
    room=2**63 - 1,
    generation=2**64 - 1,
    token=2**63,
    ranges={"kv": (0, 8)},
    pages={"kv": bytes(8)},
    num_decode_ranks=1,
    timeout_s=1.0,
    progress_s=30.0,
    priority=0,
    digest=False,
)
LAYOUT: Final = Pool(PagedShape(4, 2, (0, 2), 8, 2), 0, base=2**63).layout
RECORD: Final = RankRecord(peer=PEER, num_ranks=1, endpoint="tcp://127.0.0.1:1", backend="memory", layout=LAYOUT)
REGISTER: Final = Register(record=RECORD, lease_s=9.0)


def refused(data: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data)
    return caught.value


def accepted(data: bytes) -> Message | None:
    """Return the decoded message, or None if the bytes are refused; any other error fails the test."""
    try:
        return decode(data)
    except RemoteProtocolError:
        return None


def raw(value: object) -> bytes:
    """Encode a message without type checks."""
    return HEADER + msgspec.msgpack.encode(value)


def fields(message: Message) -> dict[str, Any]:
    unchecked: dict[str, Any] = msgspec.msgpack.decode(encode(message)[len(HEADER) :])
    return unchecked


def test_there_is_a_strategy_for_every_message() -> None:
    assert set(MESSAGES) == set(typing.get_args(AnyMessage))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_is_encoded_comes_back(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    decoded = decode(encode(message))
    assert (type(decoded), decoded) == (kind, message)
    assert decode(*[encode(message)]) == message


@pytest.mark.parametrize("room", [-1, 2**63, "", "x" * 257, True, 1.5, None, b"req", [1]])
def test_what_is_no_room_is_refused(room: object) -> None:
    assert "room" in str(refused(raw({**fields(GRANT), "room": room})))


@settings(max_examples=60, deadline=None)
@given(any_message)
def test_truncated_at_every_byte(message: Message) -> None:
    data = encode(message)
    for length in range(len(data)):
        refused(data[:length])


@settings(max_examples=60, deadline=None)
@given(any_message, st.binary(min_size=1, max_size=20))
def test_trailing_bytes(message: Message, trailing: bytes) -> None:
    refused(encode(message) + trailing)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a kvflow message"),
        (b"K", "not a kvflow message"),
        (b"GET / HTTP/1.1", "not a kvflow message"),
        (b"kvf" + PING[3:], "not a kvflow message"),
        (bytes(4) + PING[4:], "not a kvflow message"),
        (b"KVF", "different frame format"),
        (b"KVF\0" + PING[4:], "different frame format"),
        (b"KVF\x02" + PING[4:], "different frame format"),
        (HEADER, "malformed"),
        (PING + PING, "malformed"),
        (PING + b"\0", "malformed"),
    ],
)
def test_wrong_envelope(data: bytes, said: str) -> None:
    assert said in str(refused(data))


@pytest.mark.parametrize("frames", [[], [PING, PING], [PING, b""], [b"", PING], [b""] * 9])
def test_not_exactly_one_frame(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError, match="one frame") as caught:
        decode(*frames)
    assert caught.value.values == {"frames": len(frames)}


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1x", b"\x81\x91", b"\xdc\0\x01", b"\xdf\0\0\0\x01\xa1x"])
@pytest.mark.parametrize("prefix", [b"", b"\x82\xa4type\xa4ping\xa1x", b"\x82\xa4type\xa4ping\xa4peer"])
def test_deep_nesting(prefix: bytes, opener: bytes) -> None:
    refused(HEADER + prefix + opener * 200_000)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x83\xa4type\xa7records\xa8instance\xa1a\xa7records\xdd\xff\xff\xff\xff",
        b"\x83\xa4type\xa6lookup\xa9timeout_s\x01\xa8instance\xdb\xff\xff\xff\xff",
        b"\x82\xa4type\xa5grant\xa5pages\xdf\xff\xff\xff\xff",
        b"\x82\xa4type\xa5grant\xa5pages\x81\xa2kv\xc6\xff\xff\xff\xff",
    ],
)
def test_lengths_that_promise_more_than_there_is(body: bytes) -> None:
    refused(HEADER + body)


@pytest.mark.parametrize(
    "body",
    [
        b"\x83\xa4type\xa6lookup\xa8instance\xa2\xff\xfe\xa9timeout_s\x01",
        b"\x83\xa4type\xa6lookup\xa8instance\xa3\xed\xa0\x80\xa9timeout_s\x01",
        b"\x81\xa4type\xa2\xff\xfe",
        b"\x82\xa2\xff\xfe\x01\xa4type\xa6lookup",
    ],
    ids=["in a field", "a surrogate", "in the type", "in a name"],
)
def test_text_that_is_not_utf8(body: bytes) -> None:
    refused(HEADER + body)


@pytest.mark.parametrize(
    "value",
    [None, 1, "ping", [], {}, ["ping"], {"type": None}, {"type": 1}, {"type": "no such"}, {"type": b"ping"}, {1: 2}],
    ids=repr,
)
def test_not_a_tagged_message(value: object) -> None:
    assert ("not accepted here" if value == {"type": "no such"} else "malformed") in str(refused(raw(value)))


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80", b"\xde", b"\xde\0\x01", b"\x81\xa4typ", b"\x81\xa4type", b"\x81\xa4type\xd9\x04ping", b"\xdf"],
)
def test_what_does_not_begin_with_its_type(body: bytes) -> None:
    assert "malformed" in str(refused(HEADER + body))


def test_the_type_stands_in_front() -> None:
    unchecked = fields(GRANT)
    kind = unchecked.pop("type")
    assert "does not begin with its type" in str(refused(raw({**unchecked, "type": kind})))


def test_many_fields_of_a_later_version_are_ignored() -> None:
    assert decode(raw(fields(GRANT) | {f"colour {number}": number for number in range(20)})) == GRANT


@pytest.mark.parametrize("kind", [Ping, Ping | Grant], ids=["one kind", "two kinds"])
def test_what_is_not_for_an_end_is_refused_unread(kind: Any) -> None:
    reader: Reader[Ping | Grant] = Reader(kind)
    assert reader.read_frames([PING]) == Ping(peer=PEER)
    with pytest.raises(RemoteProtocolError, match="not accepted here") as caught:
        reader.identify_message([HEADER + b"\x82\xa4type\xa7records\xc1"])
    assert caught.value.values == {"kind": "records"}


def test_looking_at_a_message_does_not_read_it() -> None:
    unread = Reader[Ping](Ping).identify_message([PING[:-1]])
    assert unread == Unread(Ping, PING[:-1])
    assert not unread.is_long


@pytest.mark.parametrize("name", sorted(fields(GRANT).keys() - {"type"}))
@pytest.mark.parametrize("value", [None, [[]], "text", {"a": 1}, 1.5, True], ids=repr)
def test_wrong_field_type_is_named(name: str, value: object) -> None:
    if name.endswith("_s") and value == 1.5:
        value = "1.5"
    if name == "digest" and value is True:
        value = 1
    if name == "num_pages" and isinstance(value, dict):
        value = 1
    if name in ("room", "capability") and value == "text":
        value = b"text"
    assert f"$.{name}" in str(refused(raw(fields(GRANT) | {name: value})))


@pytest.mark.parametrize("name", sorted(fields(GRANT).keys() - {"type", "capability", "num_pages"}))
def test_missing_field_is_named(name: str) -> None:
    unchecked = fields(GRANT)
    del unchecked[name]
    assert name in str(refused(raw(unchecked)))


def test_unknown_field_of_a_later_version_is_ignored() -> None:
    assert decode(raw(fields(GRANT) | {"colour": 7})) == GRANT


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1.0, 86_401.0, float("inf"), float("-inf"), float("nan"), 2**64 - 1])
def test_duration_out_of_bounds(timeout_s: float) -> None:
    assert "$.timeout_s" in str(refused(raw(fields(GRANT) | {"timeout_s": timeout_s})))


@pytest.mark.parametrize("num_decode_ranks", [0, -1, 2**32, 2**64 - 1])
def test_count_out_of_bounds(num_decode_ranks: int) -> None:
    assert "$.num_decode_ranks" in str(refused(raw(fields(GRANT) | {"num_decode_ranks": num_decode_ranks})))


def test_the_bound_is_on_the_whole_message() -> None:
    assert "too long" in str(refused(encode(Lookup(instance="x" * LONG_BYTES, timeout_s=1.0))))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        *[
            ("hello", 2**21),
            ("register", 2**21),
            ("grant", 48 * 2**10),
            ("granted_pages", 272 * 2**10),
            ("records", 2**23),
            ("notice", 2**26),
        ],
        *[("ping", 2**14), ("goodbye", 2**14), ("welcome", 2**14)],
    ],
)
def test_each_kind_has_a_length(kind: str, limit: int) -> None:
    longest = raw({"type": kind, "padding": bytes(limit - 100)})
    assert "too long" not in str(refused(longest))
    too_long = raw({"type": kind, "padding": bytes(limit)})
    assert "too long" in str(refused(too_long))


@settings(max_examples=60, deadline=None)
@given(any_message)
def test_none_of_ours_is_too_long_for_its_kind(message: Message) -> None:
    may_be_long = isinstance(message, Hello | Register | Records | Grant | GrantedPages | Notice)
    assert may_be_long or len(encode(message)) < LONG_BYTES // 2


def test_a_long_grant_is_one_of_few_large_values() -> None:
    pages = {f"{number} {'x' * 200}": bytes(2_000) for number in range(16)}
    long = replace(GRANT, pages=pages, ranges=dict.fromkeys(pages, (0, 2**40)))
    assert decode(encode(long)) == long
    paddings: tuple[object, ...] = ([[]] * 20_000, ["x"] * 9_000, dict.fromkeys(map(str, range(4_000))))
    for padding in paddings:
        assert "too many values" in str(refused(raw(fields(GRANT) | {"colour": padding})))


Edit = Callable[[dict[str, Any]], object]
"""A change that makes a layout contradict itself; regions are lists: tensor, layer, address, slots, ..., head_bytes."""

CONTRADICTIONS: Final[dict[str, Edit]] = {
    "no component": lambda layout: layout.update(components=[]),
    "component twice": lambda layout: layout.update(components=layout["components"] * 2),
    "no region": lambda layout: layout["components"][0].update(regions=[]),
    "region twice": lambda layout: layout["components"][0]["regions"].append(layout["components"][0]["regions"][0]),
    "other page count": lambda layout: set_region(layout, 3, 3),
    "no pages": lambda layout: set_region(layout, 3, 0),
    "too many pages": lambda layout: set_region(layout, 3, 2**31),
    "pages overlap": lambda layout: set_region(layout, 4, 1),
    "regions overlap": lambda layout: set_region(layout, 2, layout["components"][0]["regions"][1][2]),
    "negative stride": lambda layout: set_region(layout, 4, -16),
    "no tokens": lambda layout: set_region(layout, 5, 0),
    "no heads": lambda layout: set_region(layout, 7, [1, 1]),
    "reversed heads": lambda layout: set_region(layout, 7, [2, 0]),
    "empty cells": lambda layout: set_region(layout, 9, 0),
    "past the address space": lambda layout: set_region(layout, 2, 2**64 - 1),
    "negative address": lambda layout: set_region(layout, 2, -1),
    "negative layer": lambda layout: set_region(layout, 1, -1),
    "outside its allocation": lambda layout: set_region(layout, 2, 0),
    "allocations reversed": lambda layout: layout["allocations"].reverse(),
    "allocation past the address space": lambda layout: layout["allocations"].append([2**64 - 1, 2]),
    "empty allocation": lambda layout: layout["allocations"].insert(0, [0, 0]),
    "unknown memory": lambda layout: layout.update(memory_kind="TAPE"),
    "negative device": lambda layout: layout.update(device_id=-1),
}


def set_region(layout: dict[str, Any], index: int, value: object) -> None:
    layout["components"][0]["regions"][0][index] = value


@pytest.mark.parametrize("edit", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_layout_that_contradicts_itself(edit: Edit) -> None:
    unchecked = fields(REGISTER)
    edit(unchecked["record"]["layout"])
    error = refused(raw(unchecked))
    assert error.message == "message is malformed"
    assert error.values["detail"]


BAD_ENDPOINTS: Final = ["", "ipc:///x", "tcp://", "tcp://host", "tcp://host:x", "tcp://host:65536", "tcp://a b:1"]
NOT_DIALLED: Final = ["tcp://host:0", "tcp://*:1"]


@pytest.mark.parametrize("endpoint", [*BAD_ENDPOINTS, *NOT_DIALLED])
def test_record_without_a_usable_endpoint(endpoint: str) -> None:
    """A rank that receives such a record could neither connect to its rank nor probe it."""
    unchecked = fields(REGISTER)
    unchecked["record"]["endpoint"] = endpoint
    assert "record has no usable endpoint" in str(refused(raw(unchecked)))


@pytest.mark.parametrize("endpoint", [*filter(None, BAD_ENDPOINTS), *NOT_DIALLED, f"tcp://{'h' * 512}:1"])
def test_welcome_without_a_usable_endpoint(endpoint: str) -> None:
    unchecked = fields(Welcome(peer=RECORD.peer, attempt=0, version=PROTOCOL_VERSION))
    assert refused(raw(unchecked | {"endpoint": endpoint})).message == "message is malformed"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: HEADER + tail))
def test_random_bytes(data: bytes) -> None:
    accepted(data)


@settings(max_examples=400, deadline=None)
@given(any_message, st.data())
def test_damaged_messages(message: Message, data: st.DataObject) -> None:
    """A few bytes are overwritten, deleted or inserted; a result that still decodes must encode again."""
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(damaged)))
        length = data.draw(st.integers(0, 4))
        damaged[start : start + length] = data.draw(st.binary(max_size=4))
    survivor = accepted(bytes(damaged))
    if survivor is not None:
        assert decode(encode(survivor)) == survivor


@settings(max_examples=200, deadline=None)
@given(any_message, st.integers(0), st.sampled_from([b"\xff\xfe", b"\xc1", struct.pack(">d", float("nan"))]))
def test_one_hostile_value_anywhere(message: Message, position: int, value: bytes) -> None:
    data = encode(message)
    start = position % len(data)
    accepted(data[:start] + value + data[start + len(value) :])


def put(inside: Any, path: tuple[str | int, ...], value: object) -> Any:
    """Return a copy with one nested value replaced."""
    if not path:
        return value
    if isinstance(inside, list):
        return [put(one, path[1:], value) if number == path[0] else one for number, one in enumerate(inside)]
    return inside | {path[0]: put(inside.get(path[0]), path[1:], value)}


LONG: Final = "x" * 2_000
LAYOUT_PATH: Final = ("record", "layout")
COMPONENT_PATH: Final = (*LAYOUT_PATH, "components", 0)


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (GRANT, ("pages",), {str(number): b"" for number in range(17)}),
        (GRANT, ("ranges",), {"kv": (0, 2**40 + 1)}),
        (GRANT, ("ranges",), {"kv": (-1, 4)}),
        (GRANT, ("generation",), -1),
        (REGISTER, ("lease_s",), 601.0),
        (REGISTER, ("record", "backend"), LONG),
        (REGISTER, ("record", "endpoint"), LONG),
        (REGISTER, ("record", "peer", 0, 0), LONG),
        (REGISTER, (*LAYOUT_PATH, "fingerprint"), LONG),
        (REGISTER, (*LAYOUT_PATH, "components"), [{}] * 17),
        (REGISTER, (*COMPONENT_PATH, "regions"), [[]] * 4_097),
        (REGISTER, (*COMPONENT_PATH, "regions", 0, 0), LONG),
    ],
)
def test_texts_numbers_and_collections_have_bounds(
    message: Message, path: tuple[str | int, ...], value: object
) -> None:
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    detail = str(refused(raw(put(fields(message), path, value))))
    assert "Expected" in detail
    assert f"${where}".replace("[0]", "[...]") in detail.replace("[0]", "[...]")


def test_a_hello_or_record_of_many_bytes_is_refused_before_it_is_read() -> None:
    assert "too long" in str(refused(raw(fields(REGISTER) | {"colour": bytes(MAX_REQUEST_BYTES)})))


def test_long_reasons_are_cut() -> None:
    failure = Failure(FailureReason.ABORTED, Stage.ENQUEUE, "decode/0", LONG)
    assert failure.detail == LONG[:1_024]
    refuse = decode(raw(fields(Refuse(peer=PEER, to=None, detail="")) | {"detail": LONG}))
    assert isinstance(refuse, Refuse)
    assert refuse.detail == LONG[:1_024]


def test_a_layout_that_no_peer_would_take_is_refused_at_home() -> None:
    (component,) = LAYOUT.components
    first = component.regions[0]
    regions = tuple(replace(first, layer=layer, address=layer * first.span) for layer in range(4_097))
    with pytest.raises(LayoutError, match="layout exceeds the limits of the protocol"):
        KVLayout((replace(component, regions=regions),), "model")
    with pytest.raises(LayoutError, match="name is too long"):
        KVLayout((replace(component, name=LONG),), "model")
