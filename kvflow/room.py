"""Room IDs, the router's names for requests. Pure."""

import operator
from typing import Final, SupportsIndex, TypeAlias, cast

__all__ = ["MAX_ROOM", "MAX_ROOM_BYTES", "RoomId", "as_room"]

RoomId: TypeAlias = int | str
"""The router's ID for a request, the same on both sides: an integer in 0 ... 2**63 - 1, or a string."""

MAX_ROOM: Final = 2**63 - 1

MAX_ROOM_BYTES: Final = 256
"""Maximum length of a string room, in bytes of UTF-8."""


def as_room(value: object) -> RoomId | None:
    """Convert an integer of any type, or a string of 1 to 256 bytes, to a room; None if it is not a valid one.

    5 and "5" are different rooms.
    """
    if type(value) is int:  # the usual case
        return value if 0 <= value <= MAX_ROOM else None
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return _as_name(value)
    try:  # checking for `__index__` first takes ten times as long
        number = operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None
    return number if 0 <= number <= MAX_ROOM else None


def _as_name(value: str) -> str | None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:  # lone surrogates
        return None
    return str(value) if 1 <= size <= MAX_ROOM_BYTES else None
