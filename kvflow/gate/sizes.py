"""How long a message may be, by its kind, and what counts as long. Pure."""

from typing import Final

import msgspec

from kvflow.errors import RemoteProtocolError
from kvflow.gate.weight import is_light
from kvflow.wire.messages import PAGES_INLINE, PAGES_PER_PART, Grant, GrantedPages, Message

__all__ = [
    "LONG_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_RECORDS_BYTES",
    "MAX_REQUEST_BYTES",
    "WITH_PAGES",
    "Unread",
    "check_length",
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
    """A message that has not been parsed, except for its kind.

    Attributes:
        kind: Class of the message.
        data: All bytes of the message.
    """

    kind: type[Message]
    data: bytes

    @property
    def is_long(self) -> bool:
        """Whether parsing may block the event loop noticeably."""
        return len(self.data) > LONG_BYTES and self.kind not in WITH_PAGES


def check_length(data: bytes, start: int, tag: bytes) -> None:
    """Check that a long message is within the limit of its kind, and does not take disproportionately long to parse.

    Args:
        data: All bytes of the message, more than `LONG_BYTES`.
        start: Where its MessagePack begins.
        tag: Its kind.

    Raises:
        RemoteProtocolError: The message is too long, or has too many values.
    """
    if len(data) > LIMITS.get(tag, LONG_BYTES):
        raise RemoteProtocolError("message is too long for its kind", kind=tag.decode(), num_bytes=len(data))
    if tag in LIGHT and not is_light(data, start, max_values=MAX_VALUES, max_text_bytes=MAX_TEXT_BYTES):
        raise RemoteProtocolError("message has too many values for its kind", kind=tag.decode(), num_bytes=len(data))
