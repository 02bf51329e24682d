"""Encodes and decodes messages, and validates untrusted bytes.

A message begins with its kind. So a receiver can reject a message of an unexpected kind, or one that is too long for
its kind, without parsing it, and can check the sender's budget first.
"""

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from kvflow.errors import KvflowError, RemoteProtocolError
from kvflow.gate.sizes import LONG_BYTES, WITH_PAGES, Unread, check_length
from kvflow.geometry.packed_pages import pack_pages, unpack_pages
from kvflow.wire.messages import PAGES_INLINE, PAGES_PER_PART, AnyMessage, Grant, Message

__all__ = ["Reader", "decode", "encode"]

MAGIC: Final = b"KVF"
FRAME_FORMAT: Final = 1
"""Version of the framing, a four-byte header and MessagePack. The protocol version is negotiated in the Hello."""
HEADER: Final = MAGIC + bytes([FRAME_FORMAT])
TAG_FIELD: Final = b"\xa4type"
SHORT_MAP: Final = 0x80
LONG_MAP: Final = 0xDE
SHORT_TEXT: Final = 0xA0

Read = TypeVar("Read", bound=Message)


class Reader(Generic[Read]):
    """Parses the kinds of messages that one receiver accepts, a union, and rejects all others unparsed."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Read] = msgspec.msgpack.Decoder(kinds)
        self._kinds: dict[bytes, type[Read]] = {_beginning_of(kind): kind for kind in get_args(kinds) or (kinds,)}

    def identify_message(self, frames: Sequence[bytes]) -> Unread:
        """Determine the kind of a ZMQ message, which must have one frame, without parsing it.

        Raises:
            RemoteProtocolError: It is not a kvflow message, its kind is not accepted, or it is too long for its kind.
        """
        if len(frames) != 1:
            raise RemoteProtocolError("message must be one frame", frames=len(frames))
        data = frames[0]
        if data[:4] != HEADER:
            if data[:3] != MAGIC:
                raise RemoteProtocolError("not a kvflow message", first_bytes=data[:8], num_bytes=len(data))
            raise RemoteProtocolError("message has a different frame format", format=data[3:4], spoken=FRAME_FORMAT)
        beginning = _beginning(data)
        kind = self._kinds.get(beginning)
        if kind is None:
            tag = _tag(beginning).decode("ascii", "replace")
            raise RemoteProtocolError("message of this kind is not accepted here", kind=tag)
        if len(data) > LONG_BYTES:
            check_length(data, len(HEADER), _tag(beginning))
        return Unread(kind, data)

    def read(self, unread: Unread) -> Read:
        """Parse a message returned by `identify_message`.

        Raises:
            RemoteProtocolError: The message is malformed.
        """
        try:
            message = self._decoder.decode(memoryview(unread.data)[len(HEADER) :])
            return _unpack(message) if type(message) in WITH_PAGES else message
        except (msgspec.DecodeError, UnicodeDecodeError, KvflowError, RecursionError) as error:
            raise _malformed(str(error), unread.data) from error

    def read_frames(self, frames: Sequence[bytes]) -> Read:
        """Check and parse a ZMQ message. Errors are as in `identify_message` and `read`."""
        return self.read(self.identify_message(frames))


def encode(message: Message) -> bytes:
    """Return the bytes of a message: a four-byte header and MessagePack."""
    if type(message) in WITH_PAGES:
        message = _pack(message)
    return HEADER + _encoder.encode(message)


def decode(*frames: bytes) -> AnyMessage:
    """Parse a message of any kind, given the frames of a ZMQ message. Errors are as in `Reader`."""
    return _everything.read_frames(frames)


def _pack(message: Any) -> Any:
    """Pack the page tables of a message."""
    if isinstance(message, Grant):
        return replace(message, pages={name: pack_pages(pages) for name, pages in message.pages.items()})
    return replace(message, pages=pack_pages(message.pages))


def _unpack(message: Any) -> Any:
    """Unpack the page tables of a message; raise PlanError if one is malformed or too long."""
    if isinstance(message, Grant):
        return replace(message, pages={name: unpack_pages(data, PAGES_INLINE) for name, data in message.pages.items()})
    return replace(message, pages=unpack_pages(message.pages, PAGES_PER_PART))


def _beginning_of(kind: type[Message]) -> bytes:
    """Return the bytes that every message of a class begins with, after the header and the length of its map."""
    tag = str(kind.__struct_config__.tag).encode()
    return TAG_FIELD + bytes([SHORT_TEXT + len(tag)]) + tag


def _tag(beginning: bytes) -> bytes:
    return beginning[len(TAG_FIELD) + 1 :]


def _beginning(data: bytes) -> bytes:
    """Return the tag field that a message begins with, which must be a map of fewer than 2**16 fields."""
    if len(data) > 10 and data[4] & 0xF0 == SHORT_MAP:
        start = 5
    elif len(data) > 12 and data[4] == LONG_MAP:
        start = 7
    else:
        raise _malformed("it is no map with a type", data)
    tag_length = data[start + 5] - SHORT_TEXT
    if not 0 <= tag_length < 32 or data[start : start + 5] != TAG_FIELD:
        raise _malformed("it does not begin with its type", data)
    return data[start : start + 6 + tag_length]


def _malformed(detail: str, data: bytes) -> RemoteProtocolError:
    return RemoteProtocolError("message is malformed", detail=detail, num_bytes=len(data))


_encoder = msgspec.msgpack.Encoder()
_everything: Final[Reader[AnyMessage]] = Reader(AnyMessage)
