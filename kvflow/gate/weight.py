"""Estimates how long MessagePack takes to decode, without decoding it. Pure.

A decoder visits each value, even of unknown fields, and each character of a text, but only copies bytes. So eight
megabytes of empty arrays take a hundred times as long as eight megabytes of bytes.
"""

from typing import Final

__all__ = ["is_light"]

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
    """Return whether a value contains few values and no long text. Does not detect truncated data; the decoder does.

    Args:
        data: Bytes that contain the value.
        start: Offset of the value.
        max_values: Maximum number of values, including keys and the value itself.
        max_text_bytes: Maximum size of a text, including its header.
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
