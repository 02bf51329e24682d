"""How long a message may be, by its kind, and how much it may take to parse. Pure."""

from typing import Final

import msgspec

from kvflow.errors import RemoteProtocolError
from kvflow.wire.messages import PAGES_INLINE, PAGES_PER_PART, Grant, GrantedPages, Message

__all__ = [
    "LONG_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_RECORDS_BYTES",
    "MAX_REQUEST_BYTES",
    "WITH_PAGES",
    "Unread",
    "check_length",
    "is_light",
]

MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""Limit for messages on connections that this process has opened: a transfer's metadata may be large, and takes no time
to parse."""

MAX_REQUEST_BYTES: Final = 2 * 2**20
"""Limit for messages to a listener: a Hello or Register. Its regions are checked one by one: 4,096 regions, which are
150 KB, take 25 ms. Most of a large message is the transport's metadata, which takes no time to parse."""

MAX_RECORDS_BYTES: Final = 8 * 2**20
"""Limit for Records: those of 512 ranks with 126 layers each have 7 MiB."""

LONG_BYTES: Final = 16 * 2**10
"""Limit for all kinds without a limit of their own, whose messages have less than half of it."""

LIMITS: Final = {
    b"hello": MAX_REQUEST_BYTES,
    b"register": MAX_REQUEST_BYTES,
    b"records": MAX_RECORDS_BYTES,
    b"grant": LONG_BYTES + 4 * PAGES_INLINE,
    b"granted_pages": LONG_BYTES + 4 * PAGES_PER_PART,
    b"notice": MAX_MESSAGE_BYTES,
}
"""Limits of the kinds that may have more than `LONG_BYTES`, by tag."""

LIGHT: Final = (b"grant", b"granted_pages", b"notice")
"""Kinds that are long only because of a few large values: page tables, metadata. Parsing one takes as long as copying
it."""

MAX_VALUES: Final = 512
"""Maximum number of values in a long message of a light kind. A Grant with page tables for 16 components has about
130."""

MAX_TEXT_BYTES: Final = 2**16
"""Maximum length of a text in such a message. Texts are validated as they are decoded; bytes are not."""

WITH_PAGES: Final = (Grant, GrantedPages)
"""Kinds that may be long and are parsed on the event loop all the same."""


class Unread(msgspec.Struct, frozen=True, gc=False):
    """A message that has not been parsed, except for its kind."""

    kind: type[Message]
    data: bytes

    @property
    def is_long(self) -> bool:
        """Whether parsing may block the event loop noticeably."""
        return len(self.data) > LONG_BYTES and self.kind not in WITH_PAGES


def check_length(data: bytes, start: int, tag: bytes) -> None:
    """Check that a message is within the limit of its kind, and does not take disproportionately long to parse.

    `data` are all of its bytes, more than `LONG_BYTES`; its MessagePack begins at `start`.

    Raises:
        RemoteProtocolError: The message is too long, or has too many values.
    """
    if len(data) > LIMITS.get(tag, LONG_BYTES):
        raise RemoteProtocolError("message is too long for its kind", kind=tag.decode(), num_bytes=len(data))
    if tag in LIGHT and not is_light(data, start, max_values=MAX_VALUES, max_text_bytes=MAX_TEXT_BYTES):
        raise RemoteProtocolError("message has too many values for its kind", kind=tag.decode(), num_bytes=len(data))


LENGTH_BYTES: Final = {
    **dict.fromkeys((0xC4, 0xC7, 0xD9), 1),
    **dict.fromkeys((0xC5, 0xC8, 0xDA, 0xDC, 0xDE), 2),
    **dict.fromkeys((0xC6, 0xC9, 0xDB, 0xDD, 0xDF), 4),
}
"""By first byte of a value: the number of bytes of the length field that follows it."""

SIZES: Final = {
    **dict.fromkeys((0xCC, 0xD0), 1),
    **dict.fromkeys((0xCD, 0xD1, 0xD4), 2),
    0xD5: 3,
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 4),
    0xD6: 5,
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 8),
    0xD7: 9,
    0xD8: 17,
}
"""By first byte of a value without a length field: the number of bytes that follow it; 0 if not listed."""

ARRAYS: Final = (0xDC, 0xDD)
MAPS: Final = (0xDE, 0xDF)
TEXTS: Final = (0xD9, 0xDA, 0xDB)
EXTENSIONS: Final = (0xC7, 0xC8, 0xC9)


def is_light(data: bytes, start: int, *, max_values: int, max_text_bytes: int) -> bool:
    """Return whether the value at `start` contains few values and no long text, and so takes little time to decode.

    A decoder visits each value, even of unknown fields, and each character of a text, but only copies bytes: eight
    megabytes of empty arrays take a hundred times as long as eight megabytes of bytes. Keys and the value itself count,
    and so does the header of a text. Truncated data is not detected; the decoder does.
    """
    position, left, num_values = start, 1, 0
    while left and position < len(data):
        first = data[position]
        inside, length = _extent(data, position)
        num_values += 1
        if num_values + inside > max_values or (first in TEXTS and length > max_text_bytes):
            return False
        position, left = position + length, left - 1 + inside
    return True


def _extent(data: bytes, position: int) -> tuple[int, int]:
    """Return how many values a value directly contains, and its size in bytes without them."""
    first = data[position]
    if first < 0x80 or first >= 0xE0:  # a small number
        return 0, 1
    if first < 0x90:
        return 2 * (first & 0x0F), 1
    if first < 0xA0:
        return first & 0x0F, 1
    if first < 0xC0:
        return 0, 1 + (first & 0x1F)
    if first not in LENGTH_BYTES:
        return 0, 1 + SIZES.get(first, 0)
    length_bytes = LENGTH_BYTES[first]
    length = int.from_bytes(data[position + 1 : position + 1 + length_bytes], "big")
    if first in ARRAYS:
        return length, 1 + length_bytes
    if first in MAPS:
        return 2 * length, 1 + length_bytes
    return 0, 1 + length_bytes + length + (first in EXTENSIONS)  # extensions have a type byte
