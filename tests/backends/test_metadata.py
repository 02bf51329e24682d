"""The metadata that backends exchange, and the ranges that they accept."""

import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import BackendError
from kvflow.geometry.memory import ADDRESS_LIMIT, Location, MemoryRange

BASE = 0x7F00_0000_0000
MEMORY = RegisteredMemory((MemoryRange(BASE, 100), MemoryRange(BASE + 100, 50), MemoryRange(2**63, 10)), "DRAM", 3)
METADATA = PeerMetadata("memory", b"blob \0 of the library", MEMORY)

Row = tuple[int, int, int]


def words(*rows: Row) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(rows, np.uint64).reshape(-1, 3)


def sealed(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "little") + body


def fields(**memory: object) -> dict[str, object]:
    """Return metadata as a peer of another version, or a hostile one, might write it."""
    return {
        "backend": "memory",
        "agent": b"x",
        "memory": {"ranges": [[BASE, 100]], "memory_kind": "DRAM", "device_id": 0, **memory},
    }


@pytest.mark.parametrize(
    "memory",
    [
        MEMORY,
        RegisteredMemory((MemoryRange(0, 1),), "VRAM", 7),
        RegisteredMemory((MemoryRange(ADDRESS_LIMIT - 8, 8),), "DRAM", 0),
    ],
)
def test_metadata_survives_the_way(memory: RegisteredMemory) -> None:
    metadata = PeerMetadata("nixl", bytes(range(256)), memory)
    assert PeerMetadata.unpack(metadata.pack(), backend="nixl") == metadata


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    blob = METADATA.pack()
    cuts = [blob[:length] for length in range(len(blob))]
    flips = [
        blob[:index] + bytes([blob[index] ^ 1 << bit]) + blob[index + 1 :]
        for index in range(len(blob))
        for bit in range(8)
    ]
    for damaged in cuts + flips:
        with pytest.raises(BackendError):
            PeerMetadata.unpack(damaged, backend="memory")


@given(st.binary())
def test_bytes_that_are_no_metadata_raise_nothing_else(body: bytes) -> None:
    for data in (body, sealed(body)):
        with pytest.raises(BackendError):
            PeerMetadata.unpack(data, backend="memory")


def test_metadata_of_another_transport_names_both() -> None:
    with pytest.raises(BackendError) as caught:
        PeerMetadata.unpack(METADATA.pack(), backend="nixl")
    assert caught.value.values == {"mine": "nixl", "theirs": "memory"}


def test_fields_of_a_later_version_are_ignored() -> None:
    body = msgspec.msgpack.encode({**fields(), "colour": "blue"})
    assert PeerMetadata.unpack(sealed(body), backend="memory").agent == b"x"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(msgspec.msgpack.encode(fields(ranges=[])), id="no ranges"),
        pytest.param(msgspec.msgpack.encode(fields(ranges=[[1]])), id="half a range"),
        pytest.param(msgspec.msgpack.encode(fields(ranges=[[1.5, 2]])), id="fractional address"),
        pytest.param(msgspec.msgpack.encode(fields(device_id=None)), id="no device"),
        pytest.param(msgspec.msgpack.encode(fields(device_id=-1)), id="negative device"),
        pytest.param(msgspec.msgpack.encode(fields(ranges=[[BASE, 9, ["VRAM", -1]]])), id="negative device of a range"),
        pytest.param(msgspec.msgpack.encode(fields(ranges=[[BASE, 9, ["VRAM"]]])), id="half a location"),
        pytest.param(msgspec.msgpack.encode(fields()).replace(b"\xa6memory\xa5", b"\xa6mem\xffry\xa5"), id="no UTF-8"),
        pytest.param(b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0", id="too deep"),
    ],
)
def test_a_checksum_does_not_make_it_metadata(body: bytes) -> None:
    with pytest.raises(BackendError):
        PeerMetadata.unpack(sealed(body), backend="memory")


def oracle(memory: RegisteredMemory, row: Row) -> bool:
    """Return whether a row is valid, in unbounded integers."""
    address, length, device = row
    return length > 0 and any(
        owner.address <= address and address + length <= owner.end and device == memory.location_of(owner).device_id
        for owner in memory.ranges
    )


BASES = (0, 1000, 2**63 - 8, 2**63, ADDRESS_LIMIT - 64)


@st.composite
def memories(draw: st.DrawFn) -> RegisteredMemory:
    """Draw sorted, disjoint ranges in the middle and at both ends of the address space; some are adjacent."""
    address = draw(st.sampled_from(BASES))
    ranges = []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=4)):
        location = draw(st.none() | st.builds(Location, st.sampled_from(["DRAM", "VRAM"]), st.integers(0, 2)))
        ranges.append(MemoryRange(address + gap, length, location))
        address += gap + length
    return RegisteredMemory(tuple(ranges), "DRAM", draw(st.integers(0, 2)))


near = st.builds(lambda base, offset: (base + offset) % ADDRESS_LIMIT, st.sampled_from(BASES), st.integers(-9, 70))
huge = st.integers(0, 70).map(lambda offset: (ADDRESS_LIMIT - offset) % ADDRESS_LIMIT)
any_row = st.tuples(near, st.integers(0, 30) | huge, st.integers(0, 2))


MIXED = RegisteredMemory((MemoryRange(0, 10), MemoryRange(10, 10, Location("DRAM", 0)), MemoryRange(20, 5)), "VRAM", 3)


def test_one_write_has_one_kind_at_an_end() -> None:
    assert MIXED.kind_of(words((0, 5, 3), (21, 4, 3))) == "VRAM"
    assert MIXED.kind_of(words((10, 10, 0))) == "DRAM"
    assert MEMORY.kind_of(words((BASE, 1, 3))) == "DRAM"
    with pytest.raises(BackendError, match="must be of the same kind"):
        MIXED.kind_of(words((0, 5, 3), (10, 1, 0)))
    with pytest.raises(BackendError, match="not registered"):
        MIXED.check(words((10, 1, 3)), side="source")


def test_ranges_are_found_and_ordered_by_kind() -> None:
    assert MIXED.find(MemoryRange(12, 8)) == Location("DRAM", 0)
    assert MIXED.find(MemoryRange(2, 8)) == Location("VRAM", 3)
    assert [MIXED.find(MemoryRange(*outside)) for outside in [(8, 4), (8, 0), (-1, 2), (24, 2**64 - 8)]] == [None] * 4
    assert {kind: [(one.address, device) for one, device in items] for kind, items in MIXED.by_kind.items()} == {
        "VRAM": [(0, 3), (20, 3)],
        "DRAM": [(10, 0)],
    }


@given(memories(), any_row)
def test_one_row_against_the_rule(memory: RegisteredMemory, row: Row) -> None:
    try:
        memory.check(words(row), side="source")
    except BackendError:
        assert not oracle(memory, row)
    else:
        assert oracle(memory, row)


@given(memories(), st.lists(any_row, min_size=1, max_size=8))
def test_the_first_bad_row_is_named(memory: RegisteredMemory, rows: list[Row]) -> None:
    bad = [row for row in rows if not oracle(memory, row)]
    if not bad:
        memory.check(words(*rows), side="source")
        return
    with pytest.raises(BackendError) as caught:
        memory.check(words(*rows), side="destination")
    address, length, device = bad[0]
    expected = {"side": "destination", "address": hex(address), "length": length, "device": device}
    assert caught.value.values == expected


@pytest.mark.parametrize(
    ("row", "is_good"),
    [
        ((BASE, 100, 3), True),
        ((BASE + 99, 1, 3), True),
        ((BASE + 100, 50, 3), True),
        ((2**63 + 9, 1, 3), True),
        ((BASE + 99, 2, 3), False),  # spans two adjacent registrations
        ((BASE, 150, 3), False),
        ((BASE + 150, 1, 3), False),
        ((BASE, 100, 0), False),
        ((BASE, 2**64 - 1, 3), False),
        ((BASE, 0, 3), False),
    ],
)
def test_borders(row: Row, is_good: bool) -> None:
    assert oracle(MEMORY, row) == is_good
    if is_good:
        MEMORY.check(words(row), side="source")
    else:
        with pytest.raises(BackendError):
            MEMORY.check(words(row), side="source")


def test_many_rows_are_checked_at_once() -> None:
    rows = words(*[(BASE + index % 100, 1, 3) for index in range(5000)])
    MEMORY.check(rows, side="source")
    rows[4999, 0] = BASE - 1
    with pytest.raises(BackendError) as caught:
        MEMORY.check(rows, side="source")
    assert caught.value.values["address"] == hex(BASE - 1)
