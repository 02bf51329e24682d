"""Packing: what one side gathers, the other scatters to the right cells, for any two layouts."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.errors import PlanError
from kvflow.geometry import (
    BoundRoute,
    Component,
    KVLayout,
    Region,
    RegionSlice,
    Route,
    bind_route,
    build_page_table,
)
from kvflow.geometry.expected import ExpectedBytes, expected_bytes
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.pack import PackedSlices, Payload, find_runs, find_slices, is_head_major
from kvflow.geometry.pages import TokenPages
from kvflow.geometry.ranges import WHOLE
from kvflow.packing.copier import Copier, HostCopier, PackWork
from kvflow.packing.device import DeviceCopier
from tests.support.examples import examples
from tests.support.links import Link, links
from tests.support.worlds import Rank, World, worlds


class Order(NamedTuple):
    """How payloads are made: their order, and where the layers are cut."""

    head_major: bool
    stops: tuple[int, ...]


stops = st.sets(st.integers(1, 5), max_size=2).map(lambda found: tuple(sorted(found)))


COPIERS = [HostCopier(), DeviceCopier(torch.device("cpu"))]


def pieces_of(rank: Rank, slices: Sequence[RegionSlice], copier: Copier) -> dict[str, PackedSlices]:
    def view(memory: MemoryRange) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        start = memory.address - rank.base
        assert 0 <= start <= start + memory.length <= len(rank.memory)
        return rank.memory[start : start + memory.length]

    return find_slices(slices, rank.layout, copier.bases(rank.layout, view))


def payloads(world: World, bound: BoundRoute, order: Order) -> Iterator[Payload]:
    """Yield payloads of all components at once: the first chunk of each, then the second, some layers at a time."""
    chunks = {
        name: list(pairwise([world.wanted[name][0], *world.cuts[name], world.wanted[name][1]]))
        for name in bound.expected
    }
    for number in range(max(map(len, chunks.values()), default=0)):
        ranges = {name: parts[number] for name, parts in chunks.items() if number < len(parts)}
        for layers in pairwise([0, *order.stops, None]):
            yield Payload(bound.expected, ranges, world.wanted, order.head_major, (layers[0] or 0, layers[1]))


def move(world: World, link: Link, order: Order, copier: Copier) -> None:
    route, bound, source, target = link
    for payload in payloads(world, bound, order):
        src = {
            name: build_page_table(source.layout.component(name), TokenPages(tokens, source.pages(name, tokens)))
            for name, tokens in payload.ranges.items()
        }
        dst = {
            name: build_page_table(
                target.layout.component(name), TokenPages(world.wanted[name], target.pages(name, world.wanted[name]))
            )
            for name in payload.ranges
        }
        num_bytes = expected_bytes(bound.expected, payload.ranges, world.wanted, payload.layers)
        staging = np.full(num_bytes + 2, 0xAB, np.uint8)
        slot = MemoryRange(staging.ctypes.data + 1, num_bytes)
        PackWork(payload, pieces_of(source, route.slices, copier), src, slot, copier).gather(num_bytes)
        runs, total = find_runs(payload, find_slices(route.slices, source.layout), src)
        assert total == num_bytes
        covered = sorted(
            at for group in runs for place in group.payload.tolist() for at in range(place, place + group.length)
        )
        assert covered == list(range(num_bytes))
        PackWork(payload, pieces_of(target, route.slices, copier), dst, slot, copier).scatter(num_bytes)
        assert staging[0] == staging[-1] == 0xAB


@pytest.mark.timeout(0)
@pytest.mark.parametrize("copier", COPIERS, ids=lambda copier: type(copier).__name__)
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), st.builds(Order, st.booleans(), stops))
def test_every_wanted_cell_arrives_and_nothing_else_changes(copier: Copier, world: World, order: Order) -> None:
    world.compute()
    if isinstance(copier, DeviceCopier):
        for rank in (*world.prefill.values(), *world.decode.values()):
            rank.move(rank.memory.ctypes.data)
    for link in links(world):
        before = link.source.memory.copy()
        move(world, link, order, copier)
        np.testing.assert_array_equal(link.source.memory, before)
    world.assert_arrived()


def small_layout(order: str, heads: tuple[int, int]) -> KVLayout:
    count, page_size = heads[1] - heads[0], 4
    steps = (8 * count, 8) if order == "NHD" else (8, 8 * page_size)
    region = Region("k", 0, 4096, 4, 8 * count * page_size, page_size, steps[0], heads, steps[1], 8, "uint8")
    return KVLayout((Component("kv", (region,)),), "model")


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [("NHD", "NHD", False), ("NHD", "HND", False), ("HND", "NHD", False), ("HND", "HND", True)],
)
def test_heads_come_first_if_both_sides_keep_the_tokens_of_a_head_together(src: str, dst: str, expected: bool) -> None:
    pair = small_layout(src, (0, 2)), small_layout(dst, (0, 4))
    route = Route(0, (RegionSlice("kv", "k", 0, (0, 2)),))
    assert is_head_major(bind_route(route, *pair)) is expected


@pytest.mark.parametrize(("order", "head_major", "length"), [("NHD", False, 64), ("HND", True, 32), ("HND", False, 8)])
def test_a_whole_page_is_one_run_if_its_order_is_that_of_the_payload(order: str, head_major: bool, length: int) -> None:
    layout = small_layout(order, (0, 2))
    table = build_page_table(layout.component("kv"), TokenPages((0, 8), [3, 1]))
    payload = Payload({"kv": ExpectedBytes(WHOLE, WHOLE, {})}, {"kv": (0, 8)}, {"kv": (0, 8)}, head_major)
    runs, total = find_runs(payload, find_slices((RegionSlice("kv", "k", 0, (0, 2)),), layout), {"kv": table})
    assert total == 128
    assert {group.length for group in runs} == {length}


def test_a_payload_of_another_size_or_of_other_pages_is_refused() -> None:
    layout = small_layout("NHD", (0, 2))
    memory = np.zeros(layout.component("kv").page_bytes * 4, np.uint8)
    bases = HostCopier().bases(layout, lambda _: memory)
    pieces = find_slices((RegionSlice("kv", "k", 0, (0, 2)),), layout, bases)
    table = build_page_table(layout.component("kv"), TokenPages((0, 4), [3]))
    slot = np.ones(256, np.uint8)

    def work(tokens: tuple[int, int], slot_bytes: int = 256) -> PackWork:
        payload = Payload({"kv": ExpectedBytes(WHOLE, WHOLE, {})}, {"kv": tokens}, {"kv": (0, 8)})
        return PackWork(payload, pieces, {"kv": table}, MemoryRange(slot.ctypes.data, slot_bytes), HostCopier())

    for wrong, num_bytes in [(work((0, 4)), 65), (work((0, 4), 63), 64), (work((0, 8)), 128)]:
        with pytest.raises(PlanError):
            wrong.scatter(num_bytes)
    assert not memory.any()
    work((0, 4)).scatter(64)
    assert memory.sum() == 64
    with pytest.raises(PlanError, match="does not have"):
        find_slices((RegionSlice("kv", "v", 0, (0, 2)),), layout)
