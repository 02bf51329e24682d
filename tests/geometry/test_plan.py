"""Plans against the oracle: every wanted cell arrives, and no other byte changes."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry import BoundRoute, ComponentSlice, PageTable, bind_route, compile_routes, head_range, plan
from tests.support.examples import examples
from tests.support.links import bytes_of, max_descriptors
from tests.support.pools import PagedShape, Pool, copy_by_cells, execute

HIGH = 0xFFFF81AB54E01000
TPS = [1, 2, 3, 4, 6, 8]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[PagedShape], list[PagedShape], tuple[int, int], int]:
    """Draw shapes of the prefill and decode ranks, a token range and a seed."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    fitting = [tp for tp in TPS if not (heads % tp and tp % heads)]
    layers = draw(st.integers(1, 3))
    head_bytes = draw(st.sampled_from([1, 4, 6]))
    stop = draw(st.integers(0, 40))
    start = draw(st.integers(0, stop))
    sides = []
    for _ in range(2):
        tp = draw(st.sampled_from(fitting))
        page_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
        spare = draw(st.integers(0, 4))
        order, interleaved = draw(st.sampled_from(["NHD", "HND"])), draw(st.booleans())
        sides.append(
            [
                PagedShape(
                    num_pages=-(-stop // page_size) + spare + 1,
                    page_size=page_size,
                    heads=head_range(heads, tp, rank),
                    head_bytes=head_bytes,
                    num_layers=layers,
                    order=order,
                    interleaved=interleaved,
                )
                for rank in range(tp)
            ]
        )
    return sides[0], sides[1], (start, stop), draw(st.integers(0, 2**32 - 1))


def page_table(rng: np.random.Generator, shape: PagedShape, stop: int, *, shuffled: bool) -> NDArray[np.uint32]:
    pages = rng.permutation(shape.num_pages) if shuffled else np.arange(shape.num_pages)
    return pages[: -(-stop // shape.page_size)].astype(np.uint32)


@pytest.mark.parametrize("base", [None, HIGH], ids=["real addresses", "bit 63 set"])
@settings(max_examples=examples(150), deadline=None)
@given(case=cases(), shuffled=st.booleans())
def test_executed_plan_equals_the_oracle(
    base: int | None, case: tuple[list[PagedShape], list[PagedShape], tuple[int, int], int], shuffled: bool
) -> None:
    prefill_shapes, decode_shapes, tokens, seed = case
    rng = np.random.default_rng(seed)
    prefill = {rank: Pool(shape, 0, base=base) for rank, shape in enumerate(prefill_shapes)}
    for pool in prefill.values():
        pool.randomize(rng)
    tables = {rank: page_table(rng, pool.shape, tokens[1], shuffled=shuffled) for rank, pool in prefill.items()}
    layouts = {rank: pool.layout for rank, pool in prefill.items()}
    for decode_rank, shape in enumerate(decode_shapes):
        received, expected = Pool(shape, 255, base=base), Pool(shape, 255, base=base)
        dst_pages = page_table(rng, shape, tokens[1], shuffled=shuffled)
        dst_table = PageTable(dst_pages, 0, shape.page_size)
        for route in compile_routes(layouts, received.layout, decode_rank=decode_rank):
            src = prefill[route.engine_rank]
            src_table = PageTable(tables[route.engine_rank], 0, src.shape.page_size)
            bound = bind_route(route, src.layout, received.layout)
            descriptors = plan(bound, {"kv": ComponentSlice(tokens, src_table, dst_table)})
            assert descriptors.src.dtype == descriptors.dst.dtype == np.uint64
            assert descriptors.num_bytes == bytes_of(bound, "kv", tokens, final=True)
            assert len(descriptors.src) <= max_descriptors(bound, {"kv": tokens})
            execute(descriptors, src, received)
            copy_by_cells(route, src, expected, (src_table.pages, dst_pages), tokens)
        for got, want in zip(received.buffers, expected.buffers, strict=True):
            np.testing.assert_array_equal(got, want)


def bound_pair(src: PagedShape, dst: PagedShape) -> tuple[Pool, Pool, BoundRoute]:
    source, target = Pool(src, 0), Pool(dst, 0)
    (route,) = compile_routes({0: source.layout}, target.layout, decode_rank=0)
    return source, target, bind_route(route, source.layout, target.layout)


def test_contiguous_pages_of_equal_layouts_become_one_descriptor_for_each_region() -> None:
    shape = PagedShape(num_pages=64, page_size=16, heads=(0, 4), head_bytes=32, num_layers=3)
    _, _, bound = bound_pair(shape, shape)
    table = PageTable(np.arange(64, dtype=np.uint32), 0, 16)
    descriptors = plan(bound, {"kv": ComponentSlice((0, 1024), table, table)})
    assert descriptors.src.shape == (2 * 3, 3)
    assert set(descriptors.src[:, 1].tolist()) == {64 * shape.page_bytes}


def test_runs_break_where_either_side_does() -> None:
    shape = PagedShape(num_pages=8, page_size=16, heads=(0, 4), head_bytes=32, num_layers=1)
    _, _, bound = bound_pair(shape, shape)
    src = PageTable(np.array([0, 1, 2, 5], np.uint32), 0, 16)
    dst = PageTable(np.array([4, 5, 7, 0], np.uint32), 0, 16)
    descriptors = plan(bound, {"kv": ComponentSlice((0, 64), src, dst)})
    assert descriptors.src[:3, 1].tolist() == [2 * shape.page_bytes, shape.page_bytes, shape.page_bytes]


def test_head_major_pages_move_whole_where_both_sides_hold_the_same_heads() -> None:
    shape = PagedShape(num_pages=8, page_size=16, heads=(0, 4), head_bytes=32, num_layers=1, order="HND")
    _, _, bound = bound_pair(shape, shape)
    table = PageTable(np.array([1, 6], np.uint32), 0, 16)
    assert plan(bound, {"kv": ComponentSlice((0, 32), table, table)}).src[:, 1].tolist() == [shape.page_bytes] * 4


def test_nothing_to_move_is_an_empty_array_of_the_right_kind() -> None:
    shape = PagedShape(num_pages=8, page_size=16, heads=(0, 4), head_bytes=32, num_layers=1)
    _, _, bound = bound_pair(shape, shape)
    table = PageTable(np.empty(0, np.uint32), 16, 16)
    descriptors = plan(bound, {"kv": ComponentSlice((16, 16), table, table)})
    assert descriptors.src.shape == descriptors.dst.shape == (0, 3)
    assert descriptors.src.dtype == np.uint64
    assert descriptors.num_bytes == 0


def test_only_shares_that_are_given_move() -> None:
    shape = PagedShape(num_pages=8, page_size=16, heads=(0, 4), head_bytes=32, num_layers=1)
    _, _, bound = bound_pair(shape, shape)
    table = PageTable(np.zeros(1, np.uint32), 0, 16)
    assert plan(bound, {}).src.shape == (0, 3)
    assert plan(bound, {"unknown": ComponentSlice((0, 16), table, table)}).src.shape == (0, 3)


@pytest.mark.parametrize("layers", [(0, 2), (1, 2), (2, 3), (3, 3), (0, 3)])
def test_layers_can_be_planned_apart(layers: tuple[int, int]) -> None:
    """The parts add up to the whole, wherever the layers are cut."""
    shape = PagedShape(num_pages=8, page_size=4, heads=(0, 2), head_bytes=8, num_layers=3)
    _, _, bound = bound_pair(shape, shape)
    src, dst = PageTable(np.array([1, 2, 5], np.uint32), 0, 4), PageTable(np.array([0, 1, 2], np.uint32), 0, 4)
    component = {"kv": ComponentSlice((0, 12), src, dst)}
    whole = {tuple(row) for row in plan(bound, component).src.tolist()}
    cuts = [(0, layers[0]), layers, (layers[1], 3)]
    parts = [{tuple(row) for row in plan(bound, component, layers=cut).src.tolist()} for cut in cuts]
    assert set().union(*parts) == whole
    assert [len(part) for part in parts] == [len(whole) // 3 * (stop - start) for start, stop in cuts]


def test_plans_that_nobody_could_post_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[plan.__module__], "MAX_DESCRIPTORS", 5)
    shape = PagedShape(num_pages=8, page_size=4, heads=(0, 2), head_bytes=8, num_layers=3)
    _, _, bound = bound_pair(shape, shape)
    table = PageTable(np.array([1], np.uint32), 0, 4)
    with pytest.raises(PlanError, match="too many descriptors") as caught:
        plan(bound, {"kv": ComponentSlice((0, 4), table, table)})
    assert caught.value.values == {"descriptors": 6, "limit": 5}
