"""Capabilities: signed permissions to receive a room, issued by the router. Pure; the time is passed in.

A capability is a string that names a room, the prefill instance that computes it, the decode instance that may receive
it and an expiry time, followed by an HMAC-SHA256 of these. Anyone with the key can create one: the router, and every
prefill rank, which has the pages anyway.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvflow.errors import ConfigError
from kvflow.room import RoomId, as_room
from kvflow.trust import SECRET_BYTES, matches_instance
from kvflow.wire.messages import MAX_CAPABILITY

__all__ = ["denial", "sign"]

FORMAT: Final = 1
MAC_BYTES: Final = 32
CLOCK_SKEW_S: Final = 5.0
"""How far the verifier's clock may be ahead of the signer's."""


class _CapabilityFields(NamedTuple):
    format: int
    room: int | str
    prefill: str
    decode: str
    expires_at: float


def sign(key: bytes, room: RoomId, *, prefill: str, decode: str, expires_at: float) -> str:
    """Create a capability; arguments as in `kvflow.make_capability`, with the signing key of 32 bytes.

    Raises:
        ConfigError: The key or the room is invalid, or the names are too long.
    """
    if len(key) != SECRET_BYTES:
        raise ConfigError("capability key must have 32 bytes", num_bytes=len(key))
    if as_room(room) is None:
        raise ConfigError("room must be an integer or a string", room=room)
    payload = msgspec.msgpack.encode(_CapabilityFields(FORMAT, room, prefill, decode, float(expires_at)))
    text = base64.urlsafe_b64encode(payload + _mac(key, payload)).decode()
    if len(text) > MAX_CAPABILITY:
        raise ConfigError("capability is too long", num_characters=len(text), maximum=MAX_CAPABILITY)
    return text


def denial(keys: Sequence[bytes], capability: str, room: RoomId, *, prefill: str, decode: str, now: float) -> str:
    """Return why a capability does not allow a decode instance to receive a room; empty if it does.

    `keys` are the accepted signing keys, `capability` is from a peer, `prefill` has received the request, `decode` has
    sent it, and `now` is Unix time in seconds.
    """
    if not capability:
        return "a capability is required"
    try:
        data = base64.urlsafe_b64decode(capability.encode("ascii"))
        payload, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
        if not any(hmac.compare_digest(_mac(key, payload), mac) for key in keys):
            return "capability has an invalid signature"
        fields = msgspec.msgpack.decode(payload, type=_CapabilityFields)
    except (binascii.Error, UnicodeEncodeError, msgspec.DecodeError):
        return "capability is malformed"
    if fields.format != FORMAT:
        return "capability has an unknown format"
    if now > fields.expires_at + CLOCK_SKEW_S:
        return f"capability has expired: {now - fields.expires_at:.1f} s ago by this clock"
    if type(fields.room) is not type(room) or fields.room != room:
        return "capability is for a different room"
    if fields.prefill != prefill or not matches_instance(fields.decode, decode):
        return "capability is for different instances"
    return ""


def _mac(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, payload, hashlib.sha256)
