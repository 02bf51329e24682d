"""The count of values in a MessagePack message, compared to a decoder that creates all of them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.gate.sizes import is_light

TEXT = 40

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=60)
    | st.binary(max_size=300)
    | st.binary(max_size=20).map(lambda data: msgspec.msgpack.Ext(5, data)),
    lambda inside: st.lists(inside, max_size=20) | st.dictionaries(st.text(max_size=3), inside, max_size=20),
    max_leaves=60,
)


def count(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count(one) for one in value.values())
    return 1


def longest_text(value: Any) -> int:
    if isinstance(value, list):
        return max(map(longest_text, value), default=0)
    if isinstance(value, dict):
        return max((max(longest_text(key), longest_text(one)) for key, one in value.items()), default=0)
    return len(msgspec.msgpack.encode(value)) if isinstance(value, str) else 0


@given(VALUES, st.integers(-1, 1))
def test_it_counts_what_a_decoder_makes(value: Any, spare: int) -> None:
    data = b"KVF\x01" + msgspec.msgpack.encode(value)
    fits = is_light(data, 4, max_values=count(value) + spare, max_text_bytes=2**20)
    assert fits == (spare >= 0)


@given(VALUES)
def test_it_finds_long_texts(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert is_light(data, 0, max_values=2**20, max_text_bytes=TEXT) == (longest_text(value) <= TEXT)


@pytest.mark.parametrize("size", [0, 200, 70_000])
def test_it_knows_each_length(size: int) -> None:
    for value in ([0] * size, dict.fromkeys(range(size), 0), bytes(size), msgspec.msgpack.Ext(1, bytes(size))):
        data = msgspec.msgpack.encode([value, [[]]])
        values = 4 + (size if isinstance(value, list) else 2 * size if isinstance(value, dict) else 0)
        assert is_light(data, 0, max_values=values, max_text_bytes=0)
        assert not is_light(data, 0, max_values=values - 1, max_text_bytes=0)


@given(st.binary(max_size=100))
def test_it_ends_with_any_bytes(data: bytes) -> None:
    is_light(data, 0, max_values=10, max_text_bytes=10)


def test_a_claim_of_many_values_costs_nothing() -> None:
    assert not is_light(b"\xdd\xff\xff\xff\xff", 0, max_values=100, max_text_bytes=0)
    assert is_light(b"\xc6\xff\xff\xff\xff", 0, max_values=100, max_text_bytes=0)
