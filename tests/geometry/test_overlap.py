"""Regions that share memory: which are refused, and which are valid."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow import KVLayout, layout_from_tensors
from kvflow.errors import LayoutError
from kvflow.geometry import Component
from kvflow.geometry.layout import MAX_REGIONS
from kvflow.geometry.overlap import SpacedRuns, find_overlap
from tests.geometry.regions import region

NHD = "page token head dim"


def pools(count: int = 4) -> list[torch.Tensor]:
    return [torch.zeros(8, 4, 2, 16) for _ in range(count)]


def describe(tensors: dict[str, Sequence[torch.Tensor]], axes: str = NHD) -> KVLayout:
    return layout_from_tensors(tensors, axes=axes, heads=(0, 2), fingerprint="m")


def test_one_tensor_for_all_layers_is_refused() -> None:
    with pytest.raises(LayoutError, match="share memory") as error:
        describe({"k": pools(), "v": [torch.zeros(8, 4, 2, 16)] * 4})
    assert error.value.values == {"component": "kv", "tensors": ("v", "v"), "layers": (0, 1)}


def test_one_tensor_for_two_names_is_refused() -> None:
    shared = pools()
    with pytest.raises(LayoutError, match="share memory") as error:
        describe({"k": [*pools(3), shared[3]], "v": shared})
    assert error.value.values == {"component": "kv", "tensors": ("k", "v"), "layers": (3, 3)}


def test_keys_and_values_that_are_cut_wrongly_out_of_one_tensor_are_refused() -> None:
    packed = torch.zeros(8, 4, 2, 32)
    describe({"k": [packed[..., :16]], "v": [packed[..., 16:]]})
    with pytest.raises(LayoutError, match="share memory"):
        describe({"k": [packed[..., :16]], "v": [packed[..., 12:28]]})


def test_layers_that_are_cut_wrongly_out_of_one_tensor_are_refused() -> None:
    flat = torch.zeros(17, 4, 2, 16)
    describe({"k": [flat[:8], flat[9:]]})
    with pytest.raises(LayoutError, match="share memory") as error:
        describe({"k": [flat[:8], flat[7:15]]})
    assert error.value.values["layers"] == (0, 1)


@pytest.mark.parametrize(
    "order",
    [
        "layer kv page token head dim",
        "page layer kv token head dim",
        "page token layer kv head dim",
        "page kv layer head token dim",
        "page head token kv layer dim",
    ],
)
def test_layers_of_one_allocation_may_be_interleaved_in_any_way(order: str) -> None:
    names = order.split()
    sizes = {"layer": 5, "kv": 2, "page": 8, "token": 4, "head": 2, "dim": 16}
    whole = torch.zeros([sizes[name] for name in names]).permute(
        [names.index(name) for name in ("layer", "kv", "page", "token", "head", "dim")]
    )
    layout = describe({"k": list(whole[:, 0]), "v": list(whole[:, 1])})
    assert len(layout.components[0].regions) == 10
    with pytest.raises(LayoutError, match="share memory"):
        describe({"k": list(whole[:, 0]), "v": [*whole[:4, 1], whole[2, 0]]})


def test_regions_of_a_component_are_checked_in_each_page() -> None:
    Component("kv", (region("k", slot_stride=512), region("v", slot_stride=512, address=4096 + 256)))
    for apart in (0, 32, 224, -224):
        with pytest.raises(LayoutError, match="share memory"):
            Component("kv", (region("k", slot_stride=512), region("v", slot_stride=512, address=4096 + apart)))


def test_regions_whose_pages_meet_only_at_the_end_are_refused() -> None:
    Component("kv", (region(address=2**16 + 2**15), region("v", address=2**16 + 7 * 256 - 7 * 512, slot_stride=512)))
    with pytest.raises(LayoutError, match="share memory"):
        Component("kv", (region(address=2**16), region("v", address=2**16 + 7 * 256 - 7 * 512, slot_stride=512)))


def test_components_may_share_tensors_and_pages_of_a_ring_may_be_any_rows() -> None:
    shared = (region("k", slot_stride=512), region("v", slot_stride=512, address=4096 + 256))
    layout = KVLayout((Component("full", shared), Component("window", shared)), "m")
    assert len(layout.allocations) == 1
    row = region("k", slots=61, slot_stride=64, tokens_per_slot=1)
    Component("window", (row, replace(row, tensor="v", address=row.address + 256)))


def test_the_last_bytes_of_the_address_space_are_compared() -> None:
    last = 2**64 - region().span
    Component("kv", (region("k", address=last), region("v", address=0)))
    with pytest.raises(LayoutError, match="share memory"):
        Component("kv", (region("k", address=last), region("v", address=last)))


def test_what_cannot_be_compared_in_time_is_refused() -> None:
    wide = region("k", slots=1, slot_stride=0, tokens_per_slot=2**20, heads=(0, 1))
    regions = (wide, replace(wide, tensor="v", address=wide.address + 32, token_stride=128))
    with pytest.raises(LayoutError, match="too irregularly") as error:
        Component("kv", regions)
    assert error.value.values == {"cells": 2**21, "maximum": 2**18}


def test_regions_with_one_period_are_not_compared_cell_by_cell() -> None:
    stride, tokens = MAX_REGIONS * 32, 1024  # 8 million cells, more than are compared
    regions = tuple(
        region(
            layer=layer,
            address=4096 + 32 * layer,
            tokens_per_slot=tokens,
            token_stride=2 * stride,
            head_stride=stride,
            slot_stride=2 * stride * tokens,
        )
        for layer in range(MAX_REGIONS)
    )
    Component("kv", regions)
    with pytest.raises(LayoutError, match="share memory") as error:
        Component("kv", (*regions[:-1], replace(regions[40], tensor="v", layer=7)))
    assert (error.value.values["tensors"], error.value.values["layers"]) == (("k", "v"), (40, 7))


@st.composite
def cells(draw: st.DrawFn, owner: int) -> SpacedRuns:
    """Draw disjoint runs with gaps, in up to three axes."""
    length = reach = draw(st.integers(1, 3))
    axes = []
    for _ in range(draw(st.integers(0, 3))):
        stride, count = reach + draw(st.integers(0, 3)), draw(st.integers(1, 3))
        axes.append((stride, count))
        reach = stride * (count - 1) + reach
    return SpacedRuns.from_axes(draw(st.integers(0, 60)), axes, length, owner)


@st.composite
def groups(draw: st.DrawFn) -> list[SpacedRuns]:
    """Draw some cells that differ only in their address, as layers do, and some that differ in shape."""
    found = [draw(cells(number)) for number in range(draw(st.integers(1, 3)))]
    alike = draw(st.lists(st.integers(0, 30), max_size=4))
    first = found[0]
    return found + [
        SpacedRuns.from_axes(first.address + step, first.axes, first.length, len(found) + place)
        for place, step in enumerate(alike)
    ]


def bytes_of(one: SpacedRuns) -> set[int]:
    counts = [range(count) for _, count in one.axes]
    starts = (
        one.address + sum(index * stride for index, (stride, _) in zip(place, one.axes, strict=True))
        for place in itertools.product(*counts)
    )
    return {start + byte for start in starts for byte in range(one.length)}


@given(groups())
def test_what_is_found_is_what_comparing_bytes_finds(group: list[SpacedRuns]) -> None:
    held = {one.owner: bytes_of(one) for one in group}
    shared = {pair for pair in itertools.combinations(sorted(held), 2) if held[pair[0]] & held[pair[1]]}
    found = find_overlap(group)
    assert found in shared if shared else found is None


def test_runs_that_touch_are_joined() -> None:
    assert SpacedRuns.from_axes(0, ((8, 4), (4, 2), (99, 1)), 4, 7) == SpacedRuns(0, 32, (), 32, 7)
    assert SpacedRuns.from_axes(0, ((16, 4), (4, 2)), 4, 7) == SpacedRuns(0, 56, ((16, 4),), 8, 7)
    assert np.array_equal(SpacedRuns(5, 29, ((16, 2),), 8, 7).starts(5), [0, 16])
