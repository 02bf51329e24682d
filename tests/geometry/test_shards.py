"""Head ranges from the total head count, and formulas for pairs of ranks, compared with the planner."""

import pytest

from kvflow.errors import LayoutError
from kvflow.geometry import (
    BufferLists,
    Component,
    HeadSlice,
    KVLayout,
    PagePart,
    RegionSlice,
    compile_routes,
    head_range,
    head_slice,
    layout_from_pointers,
    regions_from_pointers,
    stage_slices,
    total_heads,
)


@pytest.mark.parametrize(
    ("total", "tp_size", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (8, 8, [(head, head + 1) for head in range(8)]),
        (3, 6, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]),
        (1, 4, [(0, 1)] * 4),
        (2, 8, [(0, 1)] * 4 + [(1, 2)] * 4),
    ],
)
def test_heads_are_split_or_replicated(total: int, tp_size: int, expected: list[tuple[int, int]]) -> None:
    assert [head_range(total, tp_size, rank) for rank in range(tp_size)] == expected


@pytest.mark.parametrize("total", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6, 8])
def test_every_head_is_held_equally_often(total: int, tp_size: int) -> None:
    if total % tp_size and tp_size % total:
        with pytest.raises(LayoutError, match="split evenly"):
            head_range(total, tp_size, 0)
        return
    held = [head for rank in range(tp_size) for head in range(*head_range(total, tp_size, rank))]
    assert {head: held.count(head) for head in held} == dict.fromkeys(range(total), max(1, tp_size // total))


@pytest.mark.parametrize(("total", "tp_size", "tp_rank"), [(0, 1, 0), (-1, 1, 0), (8, 0, 0), (8, 2, 2), (8, 2, -1)])
def test_impossible_counts_are_refused(total: int, tp_size: int, tp_rank: int) -> None:
    with pytest.raises(LayoutError):
        head_range(total, tp_size, tp_rank)


@pytest.mark.parametrize(
    ("total", "heads_per_rank", "tp_size", "expected"), [(8, 1, 16, 8), (None, 2, 4, 8), (None, 1, 1, 1)]
)
def test_total_is_what_the_model_says_or_what_the_ranks_hold(
    total: int | None, heads_per_rank: int, tp_size: int, expected: int
) -> None:
    assert total_heads(total, heads_per_rank=heads_per_rank, tp_size=tp_size) == expected


@pytest.mark.parametrize(
    ("total", "heads_per_rank", "tp_size"), [(0, 1, 1), (-8, 1, 1), (None, 0, 4), (None, 1, 0), (8, -1, 4)]
)
def test_impossible_totals_are_refused(total: int | None, heads_per_rank: int, tp_size: int) -> None:
    with pytest.raises(LayoutError, match="must be positive"):
        total_heads(total, heads_per_rank=heads_per_rank, tp_size=tp_size)


HEADS = [1, 2, 3, 4, 8]
SIZES = [1, 2, 3, 4, 6, 8]
PAIRS = [
    (total, src_tp, dst_tp)
    for total in HEADS
    for src_tp in SIZES
    for dst_tp in SIZES
    if not (total % src_tp and src_tp % total) and not (total % dst_tp and dst_tp % total)
]


def rank_layout(total: int, tp_size: int, tp_rank: int) -> KVLayout:
    """Return an NHD layout of one layer, with 4 bytes for each head of a token."""
    heads = head_range(total, tp_size, tp_rank)
    part = PagePart("k", head_bytes=4, dtype="uint8", heads=heads)
    item = part.num_bytes(2)
    buffers = BufferLists([4096], [4 * item], [item])
    regions = regions_from_pointers(buffers, [[part]], page_size=2, layers=[0])
    return layout_from_pointers([Component("kv", regions)], "m", buffers=[buffers])


@pytest.mark.parametrize(("total", "src_tp", "dst_tp"), PAIRS)
def test_planner_sends_the_head_slices(total: int, src_tp: int, dst_tp: int) -> None:
    prefill = {rank: rank_layout(total, src_tp, rank) for rank in range(src_tp)}
    for dst_rank in range(dst_tp):
        decode = rank_layout(total, dst_tp, dst_rank)
        received: list[int] = []
        for route in compile_routes(prefill, decode, decode_rank=dst_rank):
            found = head_slice(total, src=(src_tp, route.engine_rank), dst=(dst_tp, dst_rank))
            for region_slice in route.slices:
                assert found is not None
                assert region_slice.heads == found.heads
                assert piece_bytes(region_slice, prefill[route.engine_rank], decode) == found.token_bytes(4)
                received += range(*region_slice.heads)
        assert received == list(range(*head_range(total, dst_tp, dst_rank)))


def piece_bytes(region_slice: RegionSlice, src: KVLayout, dst: KVLayout) -> tuple[int, int, int]:
    src_region, dst_region = src.regions()[region_slice.key], dst.regions()[region_slice.key]
    return (
        (region_slice.heads[0] - src_region.heads[0]) * src_region.head_stride,
        (region_slice.heads[0] - dst_region.heads[0]) * dst_region.head_stride,
        (region_slice.heads[1] - region_slice.heads[0]) * src_region.head_bytes,
    )


@pytest.mark.parametrize(("total", "src_tp", "dst_tp"), PAIRS)
def test_head_slices_are_remainders_where_one_size_divides_the_other(total: int, src_tp: int, dst_tp: int) -> None:
    """The formula of the requirement, with first heads taken modulo the other side's heads."""
    src_heads, dst_heads = max(1, total // src_tp), max(1, total // dst_tp)
    if src_heads % dst_heads and dst_heads % src_heads:
        return
    for src_rank in range(src_tp):
        src_first = src_rank // max(1, src_tp // total) * src_heads
        for dst_rank in range(dst_tp):
            dst_first = dst_rank // max(1, dst_tp // total) * dst_heads
            found = head_slice(total, src=(src_tp, src_rank), dst=(dst_tp, dst_rank))
            if found is None:
                assert src_first + src_heads <= dst_first or dst_first + dst_heads <= src_first
            elif src_heads >= dst_heads:
                assert found == ((dst_first, dst_first + dst_heads), dst_first % src_heads, 0)
            else:
                assert found == ((src_first, src_first + src_heads), 0, src_first % dst_heads)


def test_head_slices_of_sizes_that_do_not_divide_each_other() -> None:
    assert head_slice(6, src=(2, 0), dst=(3, 1)) == HeadSlice((2, 3), 2, 0)
    assert head_slice(6, src=(2, 1), dst=(3, 1)) == HeadSlice((3, 4), 0, 1)
    assert head_slice(6, src=(2, 1), dst=(3, 0)) is None


def pointers_of(groups: int, layers: range, draft: int = 0) -> list[str]:
    """Return a flat list in which each pointer is its own name."""
    names = [f"{'kvi'[group]}{layer}" for group in range(groups) for layer in layers]
    return names + [f"draft{index}" for index in range(draft)]


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("draft", [0, 1, 2])
@pytest.mark.parametrize("draft_in_groups", [False, True])
def test_stages_find_their_layers(groups: int, pp_size: int, draft: int, draft_in_groups: bool) -> None:
    layers, per_stage = 4, 4 // pp_size
    dst = pointers_of(groups, range(layers), draft * groups if draft_in_groups else draft)
    for start in range(0, layers, per_stage):
        src = pointers_of(groups, range(start, start + per_stage))
        slices = stage_slices(len(src), len(dst), groups=groups, start_layer=start, total_kv_layers=layers)
        assert [name for part in slices for name in dst[part]] == src
        if not draft:
            assert slices == stage_slices(len(src), len(dst), groups=groups, start_layer=start)


def test_equally_long_lists_are_not_cut() -> None:
    """Both sides are stage 1 of 2, draft layers included: the start is the same, and is ignored."""
    assert stage_slices(5, 5, groups=2, start_layer=2, total_kv_layers=4) == (slice(0, 5),)


@pytest.mark.parametrize(
    ("num_src", "num_dst", "groups", "start_layer", "total", "message"),
    [
        (3, 8, 2, 0, 4, "number of prefill pointers must be a multiple of the number of groups"),
        (4, 7, 2, 0, 4, "all layers"),
        (4, 9, 2, 0, 0, "number of decode pointers must be a multiple of the number of groups"),
        (4, 8, 2, 3, 4, "prefill stage extends beyond the layers of decode"),
        (10, 8, 2, 0, 4, "prefill stage extends beyond the layers of decode"),
        (4, 10, 2, 3, 4, "prefill stage extends beyond the layers of decode"),
        (0, 8, 2, 0, 4, "must be positive"),
        (4, 0, 2, 0, 4, "must be positive"),
        (4, 8, 0, 0, 4, "must be positive"),
        (4, 8, 2, -1, 4, "must be positive"),
        (4, 8, 2, 0, -4, "must be positive"),
    ],
)
def test_lists_that_fit_no_arrangement_are_refused(
    num_src: int, num_dst: int, groups: int, start_layer: int, total: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message) as error:
        stage_slices(num_src, num_dst, groups=groups, start_layer=start_layer, total_kv_layers=total)
    assert (error.value.values["num_src"], error.value.values["num_dst"]) == (num_src, num_dst)
