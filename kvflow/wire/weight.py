"""How much work MessagePack is, found out without reading it. Pure.

A decoder looks at each value, also of fields that it does not know, and at each character of a text; bytes it copies.
So eight megabytes of empty arrays take a hundred times as long as eight megabytes of bytes.
"""

from typing import Final

__all__ = ["is_light"]

LENGTH_BYTES: Final = {
    **dict.fromkeys((0xC4, 0xC7, 0xD9), 1),
    **dict.fromkeys((0xC5, 0xC8, 0xDA, 0xDC, 0xDE), 2),
    **dict.fromkeys((0xC6, 0xC9, 0xDB, 0xDD, 0xDF), 4),
}
"""Bytes of the length that follows the first byte of a value, by that byte."""

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
"""Bytes after the first byte of a value without a length, by that byte; those that are not here have none."""

ARRAYS: Final = (0xDC, 0xDD)
MAPS: Final = (0xDE, 0xDF)
TEXTS: Final = (0xD9, 0xDA, 0xDB)
EXTENSIONS: Final = (0xC7, 0xC8, 0xC9)


def is_light(data: bytes, start: int, *, max_values: int, max_text_bytes: int) -> bool:
    """Return whether a value has few values inside of it, and no long text. What is cut off is left to the decoder.

    Args:
        data: Has the value in it.
        start: Where it begins.
        max_values: How many values there may be, keys and the value itself included.
        max_text_bytes: How long a text may be, with its length in front.
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
    """Return how many values are directly inside of one, and how many bytes it has without them."""
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
    return 0, 1 + length_bytes + length + (first in EXTENSIONS)  # whose kind is a byte more
