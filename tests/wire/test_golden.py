"""Stability of the encoding of protocol version 3."""

import typing

import msgspec
import pytest

from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import PROTOCOL_VERSION, AnyMessage
from tests.wire import golden


def test_there_are_bytes_of_every_message() -> None:
    assert golden.FILE.name == f"golden_v{PROTOCOL_VERSION}.txt"
    assert {type(message) for message in golden.MESSAGES.values()} == set(typing.get_args(AnyMessage))
    assert golden.read().keys() == golden.MESSAGES.keys()


@pytest.mark.parametrize("tag", golden.MESSAGES)
def test_message_is_written_as_ever(tag: str) -> None:
    assert encode(golden.MESSAGES[tag]).hex() == golden.read()[tag].hex()


@pytest.mark.parametrize("tag", golden.MESSAGES)
def test_message_is_read_as_ever(tag: str) -> None:
    assert decode(golden.read()[tag]) == golden.MESSAGES[tag]


@pytest.mark.parametrize("tag", golden.MESSAGES)
def test_no_field_is_left_at_its_default(tag: str) -> None:
    """At its default, a change of the field's encoding would go unnoticed."""
    message = golden.MESSAGES[tag]
    for field in msgspec.structs.fields(message):
        assert getattr(message, field.name) != field.default
