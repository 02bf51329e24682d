"""Bytes <-> messages. Everything that can be wrong with bytes from outside is found here.

A message says first of which kind it is. So an end refuses what is not for it, or is too long for its kind, without
reading it, and can ask whether its sender may say so much before it does.
"""

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from kvflow.errors import KvflowError, RemoteProtocolError
from kvflow.wire.messages import AnyMessage, Message
from kvflow.wire.weight import is_light

__all__ = [
    "LONG_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_REQUEST_BYTES",
    "Reader",
    "Unread",
    "decode",
    "decode_frames",
    "encode",
]

MAGIC: Final = b"KVF"
FRAME_FORMAT: Final = 1
"""Version of "four bytes, then MessagePack"; what the messages mean is negotiated in the Hello."""
HEADER: Final = MAGIC + bytes([FRAME_FORMAT])
MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""What a rank that was asked may answer: the metadata of a transfer may be large, and costs nothing to read."""

MAX_REQUEST_BYTES: Final = 8 * 2**20
"""What anybody may send to a listener, and any other answer: a grant of one million pages is 4 MiB, the records of 512
ranks with 126 layers each are 7 MiB."""

MAX_RECORD_BYTES: Final = 2 * 2**20
"""What a Hello or Register may take. Its regions are checked one by one: 4,096 of them, which are 150 KB, take 25 ms.
Most of a large one is the transport's metadata, which costs nothing to read."""

LONG_BYTES: Final = 16 * 2**10
"""What any other message may take: all of ours have less than half of it. Longer ones are for few kinds."""

LIMITS: Final = {
    b"hello": MAX_RECORD_BYTES,
    b"register": MAX_RECORD_BYTES,
    b"records": MAX_REQUEST_BYTES,
    b"grant": MAX_REQUEST_BYTES,
    b"notice": MAX_MESSAGE_BYTES,
}
"""Of kinds that may be long, by tag."""

LIGHT: Final = (b"grant", b"notice")
"""Kinds that are only long for a few large values: page tables, metadata. Reading one takes as long as copying it."""

MAX_VALUES: Final = 512
"""Of a light message that is long. With pages of 16 components, with names of their own, a grant has some 130."""

MAX_TEXT_BYTES: Final = 2**16
"""Of one text in such a message. Bytes are not looked at; text is."""

TAG_FIELD: Final = b"\xa4type"
SHORT_MAP: Final = 0x80
LONG_MAP: Final = 0xDE
SHORT_TEXT: Final = 0xA0

Read = TypeVar("Read", bound=Message)


class Unread(msgspec.Struct, frozen=True, gc=False):
    """A message of which only the beginning was looked at.

    Attributes:
        kind: Its class.
        data: All of its bytes.
    """

    kind: type[Message]
    data: bytes

    @property
    def is_long(self) -> bool:
        """It may take a while to read."""
        return len(self.data) > LONG_BYTES


class Reader(Generic[Read]):
    """Reads the messages that are for one end; all others are refused unread.

    Args:
        kinds: Union of their classes.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Read] = msgspec.msgpack.Decoder(kinds)
        self._kinds: dict[bytes, type[Read]] = {_beginning_of(kind): kind for kind in get_args(kinds) or (kinds,)}

    def look(self, frames: Sequence[bytes]) -> Unread:
        """Look at the beginning of a ZMQ multipart message; ours have a single frame.

        Raises:
            RemoteProtocolError: It is no message, not for this end, or too long for its kind.
        """
        if len(frames) != 1:
            raise RemoteProtocolError("message must be one frame", frames=len(frames))
        return self.look_at(frames[0])

    def look_at(self, data: bytes) -> Unread:
        """Look at the beginning of a message.

        Raises:
            RemoteProtocolError: As in `look`.
        """
        if data[:4] != HEADER:
            raise _foreign(data)
        beginning = _beginning(data)
        kind = self._kinds.get(beginning)
        if kind is None:
            tag = _tag(beginning).decode("ascii", "replace")
            raise RemoteProtocolError("message of this kind is not accepted here", kind=tag)
        if len(data) > LONG_BYTES:
            _check_length(data, _tag(beginning))
        return Unread(kind, data)

    def read(self, unread: Unread) -> Read:
        """Read a message that was looked at.

        Raises:
            RemoteProtocolError: It is malformed.
        """
        try:
            return self._decoder.decode(memoryview(unread.data)[len(HEADER) :])
        except (msgspec.DecodeError, UnicodeDecodeError, KvflowError, RecursionError) as error:
            raise _malformed(str(error), unread.data) from error

    def take(self, frames: Sequence[bytes]) -> Read:
        """Look at a message, and read it.

        Raises:
            RemoteProtocolError: As in `look` and `read`.
        """
        return self.read(self.look(frames))


def encode(message: Message) -> bytes:
    """Return the bytes of a message: four bytes of header, then MessagePack."""
    return HEADER + _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Return the message of any kind that bytes from a peer stand for.

    Raises:
        RemoteProtocolError: As in `Reader`.
    """
    return _everything.read(_everything.look_at(data))


def decode_frames(frames: Sequence[bytes]) -> AnyMessage:
    """Return the message of any kind that came as one ZMQ multipart message.

    Raises:
        RemoteProtocolError: As in `Reader`.
    """
    return _everything.take(frames)


def _foreign(data: bytes) -> RemoteProtocolError:
    if data[:3] != MAGIC:
        return RemoteProtocolError("not a kvflow message", first_bytes=data[:8], num_bytes=len(data))
    return RemoteProtocolError("message has a different frame format", format=data[3:4], spoken=FRAME_FORMAT)


def _beginning_of(kind: type[Message]) -> bytes:
    """Return what stands in front of each message of a class, after the length of its map."""
    tag = str(kind.__struct_config__.tag).encode()
    return TAG_FIELD + bytes([SHORT_TEXT + len(tag)]) + tag


def _tag(beginning: bytes) -> bytes:
    return beginning[len(TAG_FIELD) + 1 :]


def _beginning(data: bytes) -> bytes:
    """Return what stands in front of a message: it is a map of less than 2**16 fields, of which the first is its tag.

    Raises:
        RemoteProtocolError: It is not.
    """
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


def _check_length(data: bytes, tag: bytes) -> None:
    """Refuse a long message that is too long for its kind, or would take too long to read for its length.

    Raises:
        RemoteProtocolError: It is one.
    """
    if len(data) > LIMITS.get(tag, LONG_BYTES):
        raise RemoteProtocolError("message is too long for its kind", kind=tag.decode(), num_bytes=len(data))
    if tag in LIGHT and not is_light(data, len(HEADER), max_values=MAX_VALUES, max_text_bytes=MAX_TEXT_BYTES):
        raise RemoteProtocolError("message has too many values for its kind", kind=tag.decode(), num_bytes=len(data))


def _malformed(detail: str, data: bytes) -> RemoteProtocolError:
    return RemoteProtocolError("message is malformed", detail=detail, num_bytes=len(data))


_encoder = msgspec.msgpack.Encoder()
_everything: Final[Reader[AnyMessage]] = Reader(AnyMessage)
