"""Bytes <-> messages. Everything that can be wrong with bytes from outside is found here."""

from collections.abc import Sequence
from typing import Final

import msgspec

from kvflow.errors import KvflowError, RemoteProtocolError
from kvflow.wire.messages import AnyMessage, Message

__all__ = ["MAX_MESSAGE_BYTES", "MAX_REQUEST_BYTES", "decode", "decode_frames", "encode"]

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
"""What a Hello or Register may take. Its regions are checked one by one, so that these bytes can stop the event loop
for 0.1 s; those of a model of 126 layers take 1 ms. Most of a large one is the transport's metadata, which costs
nothing to read."""


class _Tagged(msgspec.Struct):
    type: str


_tags: msgspec.msgpack.Decoder[_Tagged] = msgspec.msgpack.Decoder(_Tagged)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Give the bytes of a message: four bytes of header, then MessagePack."""
    return HEADER + _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Give the message that bytes from a peer stand for.

    Raises:
        RemoteProtocolError: Not kvflow, another frame format, too long, or not a well-formed message.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError("message is too long", num_bytes=len(data), limit=MAX_MESSAGE_BYTES)
    if data[:3] != MAGIC:
        raise RemoteProtocolError("not a kvflow message", first_bytes=data[:8], num_bytes=len(data))
    if data[:4] != HEADER:
        raise RemoteProtocolError("message has a different frame format", format=data[3:4], spoken=FRAME_FORMAT)
    try:
        body = memoryview(data)[4:]
        if len(data) > MAX_RECORD_BYTES:
            _check_length(len(data), _tags.decode(body).type)
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, KvflowError, RecursionError) as error:
        raise RemoteProtocolError("message is malformed", detail=str(error), num_bytes=len(data)) from error


def _check_length(num_bytes: int, kind: str) -> None:
    """Refuse a message that is too long for its kind, without reading it.

    Raises:
        RemoteProtocolError: It is.
    """
    limit = {"hello": MAX_RECORD_BYTES, "register": MAX_RECORD_BYTES, "notice": MAX_MESSAGE_BYTES}
    if num_bytes > limit.get(kind, MAX_REQUEST_BYTES):
        raise RemoteProtocolError("message is too long for its kind", kind=kind, num_bytes=num_bytes)


def decode_frames(frames: Sequence[bytes]) -> AnyMessage:
    """Give the message that came as one ZMQ multipart message; ours have a single frame.

    Raises:
        RemoteProtocolError: As `decode`, or there is not exactly one frame.
    """
    if len(frames) != 1:
        raise RemoteProtocolError("message must be one frame", frames=len(frames))
    return decode(frames[0])
