"""Layouts from flat pointer lists equal those of the tensors behind the pointers."""

import itertools

import numpy as np
import pytest
import torch

from kvflow.errors import LayoutError
from kvflow.geometry import (
    Axes,
    BufferLists,
    Component,
    PagePart,
    Region,
    RegionKey,
    buffers_of,
    compile_routes,
    layout_from_pointers,
    regions_from_pointers,
    stage_slices,
)
from kvflow.geometry.tensors import regions_from_tensors, split_tensors

HIGH = 0xFFFF81AB54E01000
K = PagePart("k", head_bytes=32, dtype="float32", heads=(2, 4))
V = PagePart("v", head_bytes=32, dtype="float32", heads=(2, 4))
NHD = Axes("page token head dim", (2, 4))


def lists_of(tensors: list[torch.Tensor]) -> BufferLists:
    """Return the lists that an engine would give its transport for pools whose first axis is the page."""
    return BufferLists(
        [tensor.data_ptr() for tensor in tensors],
        [tensor.nbytes for tensor in tensors],
        [tensor[0].nbytes for tensor in tensors],
    )


def test_groups_of_buffers_equal_their_tensors() -> None:
    ks, vs = ([torch.zeros(5, 4, 2, 8) for _ in range(3)] for _ in range(2))
    regions = regions_from_pointers(lists_of([*ks, *vs]), [[K], [V]], page_size=4, layers=range(7, 10))
    assert regions == (
        *regions_from_tensors("k", ks, NHD, layers=7),
        *regions_from_tensors("v", vs, NHD, layers=7),
    )


def test_head_major_pages_equal_their_tensors() -> None:
    pools = [torch.zeros(5, 2, 4, 8)]
    part = PagePart("k", head_bytes=32, dtype="float32", heads=(2, 4), order="HND")
    regions = regions_from_pointers(lists_of(pools), [[part]], page_size=4, layers=[0])
    assert regions == regions_from_tensors("k", pools, Axes("page head token dim", (2, 4)))


def test_interleaved_buffers_equal_their_tensors() -> None:
    pools = [torch.zeros(5, 2, 4, 2, 8) for _ in range(2)]
    regions = regions_from_pointers(lists_of(pools), [[K, V]], page_size=4, layers=[1, 3])
    assert regions == regions_from_tensors(("k", "v"), pools, Axes("page kv token head dim", (2, 4)), layers=[1, 3])


def test_latent_with_indexer_pages_equals_its_tensors() -> None:
    latents = [torch.zeros(5, 4, 1, 24, dtype=torch.bfloat16) for _ in range(2)]
    indexer = [torch.zeros(5, 4 * 12, dtype=torch.uint8) for _ in range(2)]
    groups = [
        [PagePart("latent", 48, "bfloat16")],
        [PagePart("index_k", 8, "uint8"), PagePart("index_scale", 4, "uint8")],
    ]
    regions = regions_from_pointers(lists_of(latents + indexer), groups, page_size=4, layers=[0, 1])
    keys, scales = split_tensors(indexer, (4 * 8, 4 * 4), dimension=1)
    rows = Axes("page token*dim", page_size=4)
    index_k, index_scale = (
        regions_from_tensors("index_k", keys, rows),
        regions_from_tensors("index_scale", scales, rows),
    )
    assert regions == (
        *regions_from_tensors("latent", latents, Axes("page token 1 dim")),
        index_k[0],
        index_scale[0],
        index_k[1],
        index_scale[1],
    )


def test_scales_equal_their_tensors() -> None:
    pools = [torch.zeros(5, 4, 2)]
    part = PagePart("k_scale", 4, "float32", heads=(2, 4), tokens_per_cell=4)
    regions = regions_from_pointers(lists_of(pools), [[part]], page_size=16, layers=[0])
    assert regions == regions_from_tensors("k_scale", pools, Axes("page block head", (2, 4), tokens_per_cell=4))


def test_one_item_for_each_request_equals_its_tensors() -> None:
    conv = [torch.zeros(5, 8, 4)]
    parts = [PagePart(name, 16, "float32", heads) for name, heads in (("q", (2, 4)), ("k", (2, 4)), ("v", (4, 8)))]
    regions = regions_from_pointers(lists_of(conv), [parts], page_size=1, layers=[3])
    views = split_tensors(conv, (2, 2, 4), dimension=1)
    assert regions == tuple(
        regions_from_tensors(part.tensor, view, Axes("slot head dim", part.heads), layers=3)[0]
        for part, view in zip(parts, views, strict=True)
    )


def test_declared_token_items_equal_page_items() -> None:
    pages = [torch.zeros(5, 16, 2, 8)]
    tokens = [pages[0].view(80, 1, 2, 8)]
    fia = regions_from_pointers(lists_of(tokens), [[K]], page_size=16, layers=[0], item_tokens=1)
    assert fia == regions_from_pointers(lists_of(pages), [[K]], page_size=16, layers=[0])


def test_undeclared_token_items_are_refused_with_what_to_do() -> None:
    tokens = lists_of([torch.zeros(80, 1, 2, 8)])
    with pytest.raises(LayoutError, match="item has the size of a token, not of a page") as error:
        regions_from_pointers(tokens, [[K]], page_size=16, layers=[5])
    assert error.value.values == {"tensor": "k", "layer": 5, "field": "item_lens", "expected": 1024, "found": 64}


@pytest.mark.parametrize("dtype", [None, np.uint64])
def test_pointers_with_bit_63_stay_whole(dtype: type[np.uint64] | None) -> None:
    pointers = [HIGH, HIGH + 0x10000]
    given = pointers if dtype is None else np.array(pointers, dtype)
    buffers = BufferLists(given, [5 * 256] * 2, [256] * 2)  # type: ignore[arg-type]
    regions = regions_from_pointers(buffers, [[K]], page_size=4, layers=[0, 1])
    layout = layout_from_pointers([Component("kv", regions)], "m", buffers=[buffers], memory_kind="VRAM", device_id=3)
    assert [(item.address, item.length) for item in layout.allocations] == [(pointer, 1280) for pointer in pointers]
    assert [region.end for region in regions] == [pointer + 1280 for pointer in pointers]
    assert (layout.memory_kind, layout.device_id) == ("VRAM", 3)
    assert all(type(value) is int for value in buffers.data_ptrs)


def test_regions_outside_the_buffers_are_refused() -> None:
    buffers = BufferLists([HIGH], [1280], [256])
    regions = regions_from_pointers(buffers, [[K]], page_size=4, layers=[0])
    with pytest.raises(LayoutError, match="outside every allocation"):
        layout_from_pointers([Component("kv", regions)], "m", buffers=[BufferLists([HIGH], [1024], [256])])


def test_overlapping_buffers_are_registered_once() -> None:
    buffers = [BufferLists([4096, 8192], [8192, 4096], [256, 256]), BufferLists([4096], [8192], [256])]
    regions = regions_from_pointers(buffers[1], [[K]], page_size=4, layers=[0])
    layout = layout_from_pointers([Component("kv", regions)], "m", buffers=buffers)
    assert [(item.address, item.length) for item in layout.allocations] == [(4096, 8192)]


@pytest.mark.parametrize(
    ("lists", "field", "index", "found"),
    [
        (([-1], [8], [8]), "data_ptrs", 0, -1),
        (([8, 0], [8, 8], [8, 8]), "data_ptrs", 1, 0),
        (([2**64], [8], [8]), "data_ptrs", 0, 2**64),
        (([float(2**63)], [8], [8]), "data_ptrs", 0, float(2**63)),
        ((["8"], [8], [8]), "data_ptrs", 0, "8"),
        (([8], [-1], [8]), "data_lens", 0, -1),
        (([8], [8], [-8]), "item_lens", 0, -8),
    ],
)
def test_numbers_that_are_no_addresses_or_lengths_are_refused(
    lists: tuple[list[int], list[int], list[int]], field: str, index: int, found: object
) -> None:
    with pytest.raises(LayoutError) as error:
        BufferLists(*lists)
    named = {name: error.value.values[name] for name in ("field", "index", "found")}
    assert named == {"field": field, "index": index, "found": found}


def test_lists_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(LayoutError, match="differ in length"):
        BufferLists([8, 16], [8], [8, 8])
    with pytest.raises(LayoutError, match="exceeds the 64-bit address space"):
        BufferLists([2**64 - 8], [9], [9])
    with pytest.raises(LayoutError, match="too short"):
        BufferLists([8], [8], [8]).split(2)


@pytest.mark.parametrize(
    ("groups", "layers"), [([[K]], [0, 1]), ([[K], [V]], [0, 1]), ([], [0]), ([[K]], []), ([[], [], []], [0])]
)
def test_lists_that_fit_no_arrangement_are_refused(groups: list[list[PagePart]], layers: list[int]) -> None:
    buffers = BufferLists([4096, 8192, 12288], [1280] * 3, [256] * 3)
    with pytest.raises(LayoutError, match="one entry for each group and layer") as error:
        regions_from_pointers(buffers, groups, page_size=4, layers=layers)
    assert error.value.values == {"field": "data_ptrs", "expected": (len(groups), len(layers)), "found": 3}


@pytest.mark.parametrize(
    ("length", "item", "item_tokens", "field", "expected", "found"),
    [
        (1279, 256, None, "data_lens", 256, 1279),
        (128, 256, None, "data_lens", 256, 128),
        (1280, 255, None, "item_lens", 256, 255),
        (1280, 256, 1, "item_lens", 64, 256),
        (1280, 256, 3, "item_tokens", 4, 3),
        (1280, 256, -1, "item_tokens", 4, -1),
        (1280, 384, 6, "item_tokens", 4, 6),
        (1280, 256, 8, "item_lens", 512, 256),
        (1280, 512, 8, "data_lens", 512, 1280),
    ],
)
def test_buffers_that_do_not_fit_are_refused(
    length: int, item: int, item_tokens: int | None, field: str, expected: int, found: int
) -> None:
    buffers = BufferLists([HIGH], [length], [item])
    with pytest.raises(LayoutError) as error:
        regions_from_pointers(buffers, [[K]], page_size=4, layers=[6], item_tokens=item_tokens)
    assert error.value.values == {"tensor": "k", "layer": 6, "field": field, "expected": expected, "found": found}


@pytest.mark.parametrize(
    ("field", "value"), [("head_bytes", 0), ("tokens_per_cell", -1), ("heads", (3, 3)), ("order", "HDN")]
)
def test_impossible_parts_are_refused(field: str, value: object) -> None:
    values = {"tensor": "k", "head_bytes": 8, "dtype": "uint8", field: value}
    with pytest.raises(LayoutError) as error:
        PagePart(**values)  # type: ignore[arg-type]
    assert (error.value.values["field"], error.value.values["found"]) == (field, value)


@pytest.mark.parametrize("page_size", [0, 6])
def test_pages_without_whole_cells_are_refused(page_size: int) -> None:
    with pytest.raises(LayoutError, match="multiple of `tokens_per_cell`"):
        PagePart("k_scale", 8, "uint8", tokens_per_cell=4).num_bytes(page_size)


GROUPS = [[PagePart(name, 8, "uint8")] for name in ("k", "v", "index_k")]
LAYERS = 4


def stage(base: int, num_buffers: int) -> BufferLists:
    return BufferLists([base + 4096 * index for index in range(num_buffers)], [64] * num_buffers, [16] * num_buffers)


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("draft_layers", [0, 1, 2])
def test_planner_pairs_stages_as_the_formula_of_flat_lists_does(
    num_groups: int, pp_size: int, draft_layers: int
) -> None:
    groups = GROUPS[:num_groups]
    whole = stage(HIGH, num_groups * LAYERS + draft_layers)
    model, draft = whole.split(num_groups * LAYERS)
    regions = regions_from_pointers(model, groups, page_size=2, layers=range(LAYERS))
    if draft_layers:
        numbers = range(LAYERS, LAYERS + draft_layers)
        regions += regions_from_pointers(draft, GROUPS[:1], page_size=2, layers=numbers, optional=True)
    decode = layout_from_pointers([Component("kv", regions)], "m", buffers=[whole])

    num_layers = LAYERS // pp_size
    stages = {rank: stage(HIGH + (rank + 1) * 2**24, num_groups * num_layers) for rank in range(pp_size)}
    prefill = {
        rank: layout_from_pointers(
            [
                Component(
                    "kv",
                    regions_from_pointers(
                        buffers, groups, page_size=2, layers=range(rank * num_layers, (rank + 1) * num_layers)
                    ),
                )
            ],
            "m",
            buffers=[buffers],
        )
        for rank, buffers in stages.items()
    }
    for route in compile_routes(prefill, decode, decode_rank=0):
        rank, own = route.engine_rank, prefill[route.engine_rank].regions()
        slices = stage_slices(
            len(stages[rank]),
            len(whole),
            groups=num_groups,
            start_layer=rank * num_layers,
            total_kv_layers=LAYERS,
        )
        targets = itertools.chain.from_iterable(whole.data_ptrs[part] for part in slices)
        by_formula = dict(zip(stages[rank].data_ptrs, targets, strict=True))
        by_planner = {
            own[region_slice.key].address: decode.regions()[region_slice.key].address for region_slice in route.slices
        }
        assert by_planner == by_formula
        assert all(region_slice.layer < LAYERS for region_slice in route.slices)


def test_draft_layers_are_optional_regions_after_the_model() -> None:
    whole = stage(HIGH, 2 * LAYERS + 1)
    model, draft = whole.split(2 * LAYERS)
    assert (len(model), len(draft)) == (8, 1)
    regions = regions_from_pointers(draft, GROUPS[:1], page_size=2, layers=[LAYERS], optional=True)
    assert [(region.tensor, region.layer, region.optional) for region in regions] == [("k", LAYERS, True)]
    layout = layout_from_pointers([Component("kv", regions)], "m", buffers=[draft])
    assert list(layout.regions()) == [RegionKey("kv", "k", LAYERS)]


def test_buffers_come_back_as_lists() -> None:
    """A pool's index keys are exposed as the same lists (requirements S5)."""
    regions = [
        Region(name, layer, 2**63 + 10_000 * layer + offset, 5, 4 * size, 4, size, (0, 1), size, size, "uint8")
        for layer in range(2)
        for name, offset, size in (("k", 0, 64), ("index_k", 5_000, 16))
    ]
    component = Component("kv", tuple(regions))
    lists = buffers_of(component, ["index_k"])
    assert lists.data_ptrs == (2**63 + 5_000, 2**63 + 15_000)
    assert (lists.data_lens, lists.item_lens) == ((5 * 64, 5 * 64), (64, 64))
    assert buffers_of(component, ["index_k", "k"]).item_lens == (64, 64, 256, 256)
    with pytest.raises(LayoutError, match="no such tensor") as caught:
        buffers_of(component, ["k", "v"])
    assert caught.value.values["tensors"] == ["v"]


def test_buffers_with_something_between_their_pages_are_refused() -> None:
    region = Region("k", 3, 0, 5, 100, 4, 16, (0, 1), 16, 16, "uint8")
    with pytest.raises(LayoutError, match="not packed") as caught:
        buffers_of(Component("kv", (region,)), ["k"])
    assert caught.value.values == {"tensor": "k", "layer": 3, "field": "slot_stride", "expected": 64, "found": 100}
