"""Packs several notices into the payload of one native write, each after its length (4 bytes, little-endian)."""

from collections.abc import Iterable

from kvflow.errors import RemoteProtocolError

__all__ = ["MAX_NOTICES", "pack_notices", "unpack_notices"]

LENGTH_BYTES = 4

MAX_NOTICES = 64
"""Maximum number of notices in a payload, more than are ever joined. Limits the memory a hostile payload can take."""


def pack_notices(notices: Iterable[bytes]) -> bytes:
    """Encode up to `MAX_NOTICES` notices in order. Empty ones stand for no notice and are skipped."""
    return b"".join(len(notice).to_bytes(LENGTH_BYTES, "little") + notice for notice in notices if notice)


def unpack_notices(payload: bytes) -> list[bytes]:
    """Decode the notices of a payload, in order.

    Raises:
        RemoteProtocolError: The payload is not from `pack_notices`: a notice is truncated or empty, or there are too
            many.
    """
    notices: list[bytes] = []
    start = 0
    while start < len(payload):
        body = start + LENGTH_BYTES
        end = body + int.from_bytes(payload[start:body], "little")
        if not body < end <= len(payload) or len(notices) == MAX_NOTICES:
            raise RemoteProtocolError("notices are malformed", num_bytes=len(payload), offset=start)
        notices.append(payload[body:end])
        start = end
    return notices
