"""The formulas for engine authors in `kvflow.geometry.engines` give what the planner does."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.geometry import (
    BufferLists,
    Component,
    ComponentSlice,
    KVLayout,
    PagePart,
    PageTable,
    TokenPages,
    bind_route,
    build_page_table,
    compile_routes,
    group_concurrent_contiguous,
    layout_from_pointers,
    plan,
    prompt_tokens,
    regions_from_pointers,
    stage_slices,
    window_tokens,
)
from tests.support.examples import examples

PAGE, ITEM, PAGES = 2, 16, 24


def layout_of(pointers: list[int], groups: int, layers: range, draft: int = 0) -> KVLayout:
    """Describe a flat list: groups of layers, then draft pointers, which are the first tensor of further layers."""
    parts = [[PagePart(name, ITEM // PAGE, "uint8")] for name in ("k", "v", "index_k")[:groups]]
    lists = BufferLists(pointers, [ITEM * PAGES] * len(pointers), [ITEM] * len(pointers))
    model, rest = lists.split(groups * len(layers)) if draft else (lists, None)
    regions = regions_from_pointers(model, parts, page_size=PAGE, layers=layers)
    if rest is not None:
        numbers = range(100, 100 + draft)
        regions += regions_from_pointers(rest, parts[:1], page_size=PAGE, layers=numbers, optional=True)
    return layout_from_pointers([Component("kv", regions)], "model", buffers=[lists])


def table(pages: list[int]) -> PageTable:
    return PageTable(np.array(pages, np.uint32), 0, PAGE)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("draft", [0, 1, 2])
def test_stage_slices_are_the_buffers_that_the_planner_pairs(groups: int, num_stages: int, draft: int) -> None:
    """Each buffer of a stage is copied to the buffer of the decode rank at its place in the concatenated slices."""
    layers, size = 4, 4 // num_stages
    dst = [2**20 * (index + 1) for index in range(groups * layers + draft)]
    decode = layout_of(dst, groups, range(layers), draft)
    stages = [range(start, start + size) for start in range(0, layers, size)]
    sources = [[2**32 * (stage + 1) + 2**20 * index for index in range(groups * size)] for stage in range(num_stages)]
    prefill = {stage: layout_of(src, groups, stages[stage]) for stage, src in enumerate(sources)}
    for route in compile_routes(prefill, decode, decode_rank=0):
        src, own = sources[route.engine_rank], stages[route.engine_rank]
        bound = bind_route(route, prefill[route.engine_rank], decode)
        found = plan(bound, {"kv": ComponentSlice((0, PAGE), table([0]), table([0]))})
        slices = stage_slices(len(src), len(dst), groups=groups, start_layer=own.start, total_kv_layers=layers)
        expected = dict(zip(src, [pointer for part in slices for pointer in dst[part]], strict=True))
        assert dict(zip(found.src[:, 0].tolist(), found.dst[:, 0].tolist(), strict=True)) == expected


@settings(max_examples=examples(200))
@given(st.integers(0, PAGES), st.data())
def test_groups_are_the_descriptors_of_the_planner(count: int, data: st.DataObject) -> None:
    """Pages are drawn in runs, which often continue on both sides."""

    def draw() -> list[int]:
        edges = sorted({0, PAGES, *data.draw(st.sets(st.integers(0, PAGES), max_size=4))})
        runs = [list(range(*pair)) for pair in itertools.pairwise(edges)]
        return [page for run in data.draw(st.permutations(runs)) for page in run][:count]

    src, dst = draw(), draw()
    layout = layout_of([4096], 1, range(1))
    (route,) = compile_routes({0: layout}, layout, decode_rank=0)
    component = ComponentSlice((0, count * PAGE), table(src), table(dst))
    found = plan(bind_route(route, layout, layout), {"kv": component})
    groups = group_concurrent_contiguous(src, dst)
    for side, given_groups in zip((found.src, found.dst), groups, strict=True):
        expected = [(4096 + group[0] * ITEM, len(group) * ITEM) for group in given_groups]
        assert [(address, length) for address, length, _ in side.tolist()] == expected


@settings(max_examples=examples(200))
@given(st.integers(0, 60), st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_window_is_the_fewest_whole_pages_that_the_next_token_sees(
    num_prompt: int, window: int, page_size: int, sampled: int
) -> None:
    """The table of a window begins with a page that holds a token in the window, and a sampled token adds none."""
    tokens = window_tokens(prompt_tokens(num_prompt + sampled, num_prompt)[1], window, page_size)
    seen = range(max(0, num_prompt - window), num_prompt)
    pages = list(dict.fromkeys(token // page_size for token in seen))
    parts = [PagePart("k", 4, "uint8")]
    lists = BufferLists([4096], [4 * page_size * 80], [4 * page_size])
    component = Component("swa", regions_from_pointers(lists, [parts], page_size=page_size, layers=[0]))
    built = build_page_table(component, TokenPages(tokens, pages))
    assert tokens == (pages[0] * page_size if pages else num_prompt - num_prompt % page_size, num_prompt)
    assert built.first_token == tokens[0]
