"""Regions and layouts reject inconsistent values."""

import msgspec
import pytest

from kvflow.errors import LayoutError
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import MemoryRange, merge_ranges
from tests.geometry.regions import region

HIGH = 0xFFFF81AB54E01000  # an address as Intel XPU returns it


def layout(*regions: Region, **changes: object) -> KVLayout:
    return KVLayout(components=(Component("kv", regions),), fingerprint="m", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slots": 0}, "slots"),
        ({"tokens_per_slot": 0}, "tokens_per_slot"),
        ({"head_bytes": 0}, "head_bytes"),
        ({"token_stride": -64}, "token_stride"),
        ({"slot_stride": 255}, "slot_stride"),
        ({"token_stride": 63}, "token_stride"),
        ({"head_stride": 31}, "head_stride"),
        ({"slots": 2**31}, "slots"),
        ({"heads": (2, 2)}, "heads"),
        ({"heads": (-1, 1)}, "heads"),
        ({"layer": -1}, "layer"),
        ({"address": -1}, "address"),
        ({"address": 2**64 - 100}, "end"),
    ],
)
def test_region_names_what_is_wrong_with_it(changes: dict[str, object], named: str) -> None:
    with pytest.raises(LayoutError) as error:
        region(**changes)  # type: ignore[arg-type]
    assert named in str(error.value)
    assert error.value.values["tensor"] == "k"


def test_region_may_end_exactly_at_the_last_address() -> None:
    span = region().span
    assert region(address=2**64 - span).end == 2**64
    with pytest.raises(LayoutError):
        region(address=2**64 - span + 1)


def test_axis_of_length_one_may_have_any_stride() -> None:
    assert region(slots=1, slot_stride=0).span == 256
    assert region(tokens_per_slot=1, token_stride=7).span == 7 * 256 + 64


def test_head_major_pages_are_as_good_as_token_major_ones() -> None:
    assert region(token_stride=32, head_stride=128).span == region().span


def test_component_refuses_regions_with_other_pages() -> None:
    with pytest.raises(LayoutError, match="same number of pages"):
        Component("kv", (region(), region(tensor="v", slots=9)))
    with pytest.raises(LayoutError, match="same tensor name"):
        Component("kv", (region(), region()))
    with pytest.raises(LayoutError, match="no region"):
        Component("kv", ())


def test_layout_registers_what_its_regions_touch() -> None:
    far = region(tensor="v", address=1 << 20)
    assert layout(region(), far).allocations == (MemoryRange(4096, region().span), MemoryRange(1 << 20, far.span))


def test_layout_refuses_a_region_outside_its_allocations() -> None:
    with pytest.raises(LayoutError, match="outside every allocation") as error:
        layout(region(), allocations=(MemoryRange(4096, 100),))
    assert error.value.values == {"component": "kv", "tensor": "k", "layer": 0}


@pytest.mark.parametrize(
    "allocations",
    [
        (MemoryRange(0, 8192), MemoryRange(4096, 8192)),
        (MemoryRange(8192, 10), MemoryRange(0, 8192)),
        (MemoryRange(0, 2**64 + 1),),
        (MemoryRange(0, 8192), MemoryRange(9000, 0)),
    ],
)
def test_layout_refuses_allocations_that_overlap_or_are_too_large(allocations: tuple[MemoryRange, ...]) -> None:
    with pytest.raises(LayoutError):
        layout(region(), allocations=allocations)


@pytest.mark.parametrize("changes", [{"memory_kind": "SRAM"}, {"device_id": -1}, {"components": ()}])
def test_layout_refuses_unknown_kinds(changes: dict[str, object]) -> None:
    fields = {"components": (Component("kv", (region(),)),), "fingerprint": "m"}
    with pytest.raises(LayoutError):
        KVLayout(**(fields | changes))  # type: ignore[arg-type]


def test_layout_survives_the_wire_with_addresses_that_have_bit_63_set() -> None:
    original = layout(region(address=HIGH), region(tensor="v", address=HIGH + (1 << 30)))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(original), type=KVLayout)
    assert decoded == original
    assert decoded.components[0].regions[0].address == HIGH


def test_layout_from_the_wire_is_checked_like_any_other() -> None:
    encoded = msgspec.msgpack.encode(
        {
            "components": [{"name": "kv", "regions": [["k", 0, 0, 8, 1, 4, 64, [0, 2], 32, 32, "u8"]]}],
            "fingerprint": "m",
        }
    )
    with pytest.raises(LayoutError, match="overlap"):
        msgspec.msgpack.decode(encoded, type=KVLayout)


def test_unknown_component_is_named() -> None:
    assert layout(region()).component("kv").slots == 8
    with pytest.raises(LayoutError) as error:
        layout(region()).component("swa")
    assert error.value.values == {"component": "swa", "known": ["kv"]}


def test_touching_ranges_stay_apart_and_overlapping_ones_join() -> None:
    merged = merge_ranges([MemoryRange(10, 10), MemoryRange(0, 10), MemoryRange(15, 10), MemoryRange(16, 2)])
    assert merged == (MemoryRange(0, 10), MemoryRange(10, 15))
