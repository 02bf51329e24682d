"""A compact encoding of page tables for the wire. Pure.

An encoded table is empty (no pages), or a kind and one or two columns of integers:

- `PLAIN`: the pages;
- `RUNS`: the first page of each run of consecutive pages; the number of pages that follow it in the run.

A column has a form and its values. The low four bits of the form are the width of a value in bytes, 1 to 4; the values
are little-endian. With `DELTAS` set, the first value takes four bytes, and the others are signed differences from the
value before.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import PlanError

__all__ = ["pack_pages", "unpack_pages"]

PLAIN: Final = 0
RUNS: Final = 1

DELTAS: Final = 0x10
WIDEST: Final = 4
WIDE: Final = bytes((PLAIN, WIDEST))
"""What a table begins with whose pages follow as they are."""

PAGE: Final = np.dtype("<u4")

SHORT: Final = 2_048
"""Tables of at most this many pages are not analysed, because that takes longer than to send 8 KiB."""

Integers = NDArray[np.int64]


def pack_pages(pages: bytes) -> bytes:
    """Encode a page table, given as little-endian uint32."""
    num_pages = len(pages) // WIDEST
    if not num_pages:
        return b""
    if num_pages <= SHORT:
        return WIDE + pages
    values = np.frombuffer(pages, PAGE).astype(np.int64)
    plain = bytes((PLAIN,)) + _pack_column(values)
    firsts = np.flatnonzero(np.diff(values, prepend=-2) != 1)
    if 2 * len(firsts) > num_pages:
        return plain
    lengths = np.diff(firsts, append=num_pages)
    widths = _pack_column(lengths - 1)
    runs = bytes((RUNS,)) + len(firsts).to_bytes(WIDEST, "little") + _pack_column(values[firsts]) + widths
    return min(plain, runs, key=len)


def unpack_pages(data: bytes, max_pages: int) -> bytes:
    """Decode a page table that is not trusted to little-endian uint32; PlanError if it is malformed or longer."""
    if not data:
        return b""
    if data[:2] == WIDE and len(data) % WIDEST == 2 and 2 < len(data) <= 2 + WIDEST * max_pages:
        return data[2:]
    if data[0] == PLAIN:
        values, end = _unpack_column(data, 1, None, max_pages)
    else:
        _check(data[0] == RUNS and len(data) > 1 + WIDEST, data)
        num_runs = int.from_bytes(data[1 : 1 + WIDEST], "little")
        _check(num_runs > 0, data)
        firsts, end = _unpack_column(data, 1 + WIDEST, num_runs, max_pages)
        follows, end = _unpack_column(data, end, num_runs, max_pages)
        values = _expand(firsts, follows + 1, max_pages)
    _check(end == len(data), data)
    return values.astype(PAGE).tobytes()


def _expand(firsts: Integers, lengths: Integers, max_pages: int) -> Integers:
    ends = lengths.cumsum()
    _check_number(int(ends[-1]), max_pages)
    values: Integers = np.repeat(firsts - (ends - lengths), lengths)
    values += np.arange(len(values))
    if int(values.max()) >= 2**32:
        raise PlanError("run of pages exceeds the largest page number")
    return values


def _pack_column(values: Integers) -> bytes:
    width = _width(int(values.max()).bit_length())
    if len(values) > 1:
        deltas = np.diff(values)
        bits = max(int(deltas.max()).bit_length(), (-int(deltas.min()) - 1).bit_length()) + 1
        if _width(bits) < width:
            first = int(values[0]).to_bytes(WIDEST, "little")
            return bytes((DELTAS | _width(bits),)) + first + _narrow(deltas, _width(bits))
    return bytes((width,)) + _narrow(values, width)


def _unpack_column(data: bytes, start: int, num_values: int | None, max_values: int) -> tuple[Integers, int]:
    """Decode `num_values` values, or all that follow; return them and the offset after them."""
    form, begin = data[start : start + 1], start + 1
    _check(form != b"" and form[0] & ~DELTAS in (1, 2, 3, 4), data)
    width, is_delta = form[0] & 0xF, bool(form[0] & DELTAS)
    head = WIDEST * is_delta
    if num_values is None:
        whole, rest = divmod(len(data) - begin - head, width)
        _check(rest == 0 and whole >= 1 - is_delta, data)
        num_values = whole + is_delta
    _check_number(num_values, max_values)
    num_stored = num_values - is_delta
    end = begin + head + num_stored * width
    _check(end <= len(data), data)
    stored = _widen(data[begin + head : end], width, is_signed=is_delta)
    if is_delta:
        first = int.from_bytes(data[begin : begin + head], "little")
        stored = np.concatenate((np.array([first], np.int64), stored)).cumsum()
        _check(int(stored.min()) >= 0 and int(stored.max()) < 2**32, data)
    return stored, end


def _width(bits: int) -> int:
    return max(1, -(-bits // 8))


def _narrow(values: Integers, width: int) -> bytes:
    """Return the low bytes of each value; two's complement if negative."""
    if width == 3:
        return values.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return values.astype(f"<i{width}").tobytes()  # wraps like an unsigned integer of the same width


def _widen(data: bytes, width: int, *, is_signed: bool) -> Integers:
    if width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)  # in the high bytes, so that the sign is kept
        return wide.view("<i4" if is_signed else "<u4").ravel().astype(np.int64) >> 8
    return np.frombuffer(data, f"<{'i' if is_signed else 'u'}{width}").astype(np.int64)


def _check(is_valid: bool, data: bytes) -> None:
    if not is_valid:
        raise PlanError("packed page table is malformed", num_bytes=len(data))


def _check_number(num_pages: int, max_pages: int) -> None:
    if num_pages > max_pages:
        raise PlanError("page table is longer than allowed", num_pages=num_pages, max_pages=max_pages)
