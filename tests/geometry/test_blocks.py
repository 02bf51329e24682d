"""Block lists against the oracle, and when a plan can use them."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvflow.errors import PlanError
from kvflow.geometry import (
    Component,
    ComponentSlice,
    KVLayout,
    MemoryRange,
    PageTable,
    Region,
    RouteBlocks,
    bind_route,
    compile_routes,
    plan,
)
from kvflow.geometry.ranges import LayerRange
from tests.support import pools, worlds
from tests.support.links import bytes_of, chunk_slices, links
from tests.support.pools import PagedShape, Pool

SHAPE = PagedShape(num_pages=8, page_size=4, heads=(0, 2), head_bytes=8, num_layers=3)


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds.worlds())
def test_every_wanted_cell_arrives_and_nothing_else_changes(world: worlds.World) -> None:
    """What blocks can express is sent as blocks, the rest as descriptors."""
    world.compute()
    for _, bound, source, target in links(world):
        blocks = RouteBlocks.from_route(bound)
        for name, component in chunk_slices(world, bound, source, target):
            planned = None if blocks is None else blocks.plan({name: component})
            if planned is not None:
                assert planned.num_bytes == bytes_of(bound, name, component.tokens, final=component.final)
            worlds.execute(plan(bound, {name: component}) if planned is None else planned.descriptors(), source, target)
    world.assert_arrived()


def pair(src: PagedShape, dst: PagedShape) -> tuple[Pool, Pool, RouteBlocks | None]:
    source, target = Pool(src, 0), Pool(dst, 0)
    (route,) = compile_routes({0: source.layout}, target.layout, decode_rank=0)
    return source, target, RouteBlocks.from_route(bind_route(route, source.layout, target.layout))


def table(*pages: int, first_token: int = 0, page_size: int = 4) -> PageTable:
    return PageTable(np.array(pages, np.uint32), first_token, page_size)


def test_whole_pages_are_a_block_for_each_region() -> None:
    _, _, blocks = pair(SHAPE, SHAPE)
    assert blocks is not None
    planned = blocks.plan({"kv": ComponentSlice((0, 8), table(1, 5), table(7, 0))})
    assert planned is not None
    assert [planned.lists] == list(blocks.lists.values())
    regions = np.arange(6) * SHAPE.num_pages
    np.testing.assert_array_equal(planned.src, np.add.outer(regions, [1, 5]).ravel())
    np.testing.assert_array_equal(planned.dst, np.add.outer(regions, [7, 0]).ravel())
    assert planned.src.dtype == planned.dst.dtype == np.int32


@pytest.mark.parametrize("tokens", [(0, 3), (1, 3), (1, 4), (1, 6), (0, 9), (3, 9), (5, 7), (4, 12)])
@pytest.mark.parametrize("layers", [(0, None), (1, 2), (0, 2)])
def test_pages_that_are_not_moved_whole_go_cell_by_cell(tokens: tuple[int, int], layers: LayerRange) -> None:
    source, target, blocks = pair(SHAPE, SHAPE)
    expected = Pool(SHAPE, 0)
    source.randomize(np.random.default_rng(1))
    (route,) = compile_routes({0: source.layout}, target.layout, decode_rank=0)
    component = {"kv": ComponentSlice(tokens, table(6, 2, 1), table(3, 4, 0))}
    assert blocks is not None
    planned = blocks.plan(component, layers)
    assert planned is not None
    pools.execute(planned.descriptors(), source, target)
    pools.execute(plan(bind_route(route, source.layout, expected.layout), component, layers=layers), source, expected)
    for got, want in zip(target.buffers, expected.buffers, strict=True):
        np.testing.assert_array_equal(got, want)


def test_both_sides_may_have_pools_of_different_size_and_tables_that_begin_elsewhere() -> None:
    larger = PagedShape(num_pages=11, page_size=4, heads=(0, 2), head_bytes=8, num_layers=3)
    source, target, blocks = pair(SHAPE, larger)
    source.randomize(np.random.default_rng(1))
    assert blocks is not None
    planned = blocks.plan({"kv": ComponentSlice((8, 13), table(1, 5, first_token=8), table(9, 10, 2, 7))})
    assert planned is not None
    pools.execute(planned.descriptors(), source, target)
    for layer, tensor in ((0, "k"), (2, "v")):
        for token, (page, there) in {8: (1, 2), 11: (1, 2), 12: (5, 7)}.items():
            expected = source.cell(tensor, layer, page, token % 4, 1)
            np.testing.assert_array_equal(target.cell(tensor, layer, there, token % 4, 1), expected)


@pytest.mark.parametrize(("order", "interleaved"), [("HND", False), ("NHD", True), ("HND", True)])
def test_pages_whose_cells_are_not_in_a_row_move_whole_only(order: str, interleaved: bool) -> None:
    shape = PagedShape(8, 4, (0, 2), 8, 1, order=order, interleaved=interleaved)
    _, _, blocks = pair(shape, shape)
    assert blocks is not None
    assert blocks.plan({"kv": ComponentSlice((0, 8), table(1, 5), table(7, 0))}) is not None
    assert blocks.plan({"kv": ComponentSlice((0, 7), table(1, 5), table(7, 0))}) is None


@pytest.mark.parametrize(
    "other",
    [
        PagedShape(8, 4, (0, 1), 8, 3),
        PagedShape(8, 8, (0, 2), 8, 3),
        PagedShape(8, 4, (0, 2), 8, 3, order="HND"),
    ],
    ids=["fewer heads", "larger pages", "other order"],
)
def test_pages_that_look_different_are_no_blocks(other: PagedShape) -> None:
    assert pair(SHAPE, other)[2] is None


@pytest.mark.parametrize("of", [(table(1), table(7, 0)), (table(1, 5), table(7, 0, first_token=4))], ids=["src", "dst"])
def test_what_is_not_covered_is_refused_as_by_the_planner(of: tuple[PageTable, PageTable]) -> None:
    side = Pool(SHAPE, 0).layout
    (route,) = compile_routes({0: side}, side, decode_rank=0)
    bound = bind_route(route, side, side)
    blocks = RouteBlocks.from_route(bound)
    assert blocks is not None
    component = {"kv": ComponentSlice((0, 8), *of)}
    with pytest.raises(PlanError, match="outside the page table") as planned:
        plan(bound, component)
    with pytest.raises(PlanError, match="outside the page table") as error:
        blocks.plan(component)
    assert error.value.values == planned.value.values


def test_what_is_nothing_or_too_much_is_left_to_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, blocks = pair(SHAPE, SHAPE)
    assert blocks is not None
    assert blocks.plan({}) is None
    assert blocks.plan({"kv": ComponentSlice((4, 4), table(first_token=4), table(first_token=4))}) is None
    component = {"kv": ComponentSlice((0, 8), table(1, 5), table(7, 0))}
    monkeypatch.setattr("kvflow.geometry.blocks.MAX_BLOCKS", 12)
    assert blocks.plan(component) is not None
    monkeypatch.setattr("kvflow.geometry.blocks.MAX_BLOCKS", 11)
    assert blocks.plan(component) is None


def test_pools_too_large_to_count_with_32_bits_have_no_blocks() -> None:
    def layout(slots: int) -> KVLayout:
        region = Region("k", 0, 4096, slots, 16, 2, 8, (0, 1), 8, 8, "uint8")
        return KVLayout((Component("kv", (region,)),), "model", (MemoryRange(4096, slots * 16),))

    found = []
    for slots in (2**29, 2**30):
        (route,) = compile_routes({0: layout(slots)}, layout(16), decode_rank=0)
        found.append(RouteBlocks.from_route(bind_route(route, layout(slots), layout(16))) is not None)
    assert found == [True, False]
