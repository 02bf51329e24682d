"""Layouts from torch tensors: strides are read, never guessed.

Each kind of pool is filled with random bytes and read twice: by torch indexing, which does not use regions, and from
raw memory at the address that the region gives.
"""

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow import layout_from_tensors
from kvflow.errors import LayoutError
from kvflow.geometry import Axes, Component, Region
from kvflow.geometry.tensors import layout_from_components, regions_from_tensors, split_tensors

HIGH = 0xFFFF81AB54E01000


def address_of(region: Region, page: int, cell: int, head: int) -> int:
    return (
        region.address
        + page * region.slot_stride
        + cell * region.token_stride
        + (head - region.heads[0]) * region.head_stride
    )


def random_pool(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


@dataclass(frozen=True)
class Kind:
    """A kind of pool: its declaration, and where torch finds a cell in it.

    Attributes:
        cell: Takes (pools, tensor name, layer, page, cell of the page, head of this rank) and returns that cell.
        sizes: Layers, pages, cells of a page, heads.
    """

    names: tuple[str, ...]
    pools: tuple[torch.Tensor, ...]
    axes: Axes
    cell: Callable[[Sequence[torch.Tensor], int, int, int, int, int], torch.Tensor]
    sizes: tuple[int, int, int, int]


KINDS = {
    "one pool for each layer, NHD": Kind(
        ("k",),
        (random_pool(5, 4, 3, 8), random_pool(5, 4, 3, 8)),
        Axes("page token head dim", (6, 9)),
        lambda pools, _, layer, page, token, head: pools[layer][page, token, head],
        (2, 5, 4, 3),
    ),
    "one pool for each layer, HND": Kind(
        ("k",),
        (random_pool(5, 3, 4, 8), random_pool(5, 3, 4, 8)),
        Axes("page head token dim", (6, 9), page_size=4),
        lambda pools, _, layer, page, token, head: pools[layer][page, head, token],
        (2, 5, 4, 3),
    ),
    "one allocation for all layers": Kind(
        ("k",),
        (random_pool(3, 5, 4, 2, 8),),
        Axes("layer page token head dim", (0, 2)),
        lambda pools, _, layer, page, token, head: pools[0][layer, page, token, head],
        (3, 5, 4, 2),
    ),
    "layers side by side within a page": Kind(
        ("k",),
        (random_pool(5, 3, 4, 2, 8),),
        Axes("page layer token head dim", (0, 2)),
        lambda pools, _, layer, page, token, head: pools[0][page, layer, token, head],
        (3, 5, 4, 2),
    ),
    "K and V one after another": Kind(
        ("k", "v"),
        (random_pool(2, 3, 5, 4, 2, 8),),
        Axes("kv layer page token head dim", (0, 2)),
        lambda pools, kv, layer, page, token, head: pools[0][kv, layer, page, token, head],
        (3, 5, 4, 2),
    ),
    "K and V interleaved page by page": Kind(
        ("k", "v"),
        (random_pool(5, 2, 4, 2, 8), random_pool(5, 2, 4, 2, 8)),
        Axes("page kv token head dim", (0, 2)),
        lambda pools, kv, layer, page, token, head: pools[layer][page, kv, token, head],
        (2, 5, 4, 2),
    ),
    "K and V interleaved token by token, HND": Kind(
        ("k", "v"),
        (random_pool(5, 2, 4, 2, 8),),
        Axes("page head token kv dim", (0, 2)),
        lambda pools, kv, _, page, token, head: pools[0][page, head, token, kv],
        (1, 5, 4, 2),
    ),
    "heads fused with dim": Kind(
        ("k",),
        (random_pool(5, 4, 24),),
        Axes("page token head*dim", (3, 6)),
        lambda pools, _, layer, page, token, head: pools[layer][page, token, 8 * head : 8 * head + 8],
        (1, 5, 4, 3),
    ),
    "Ascend, not FIA": Kind(
        ("k",),
        (random_pool(2, 5, 4, 2, 8),),
        Axes("layer page token head dim", (0, 2), page_size=4),
        lambda pools, _, layer, page, token, head: pools[0][layer, page, token, head],
        (2, 5, 4, 2),
    ),
    "Ascend FIA": Kind(
        ("k",),
        (random_pool(2, 20, 1, 2, 8),),
        Axes("layer page*token 1 head dim", (0, 2), page_size=4),
        lambda pools, _, layer, page, token, head: pools[0][layer, page * 4 + token, 0, head],
        (2, 5, 4, 2),
    ),
    "MLA latent and rope in one row, with an axis of one": Kind(
        ("latent",),
        (random_pool(5, 4, 1, 12),),
        Axes("page token 1 dim"),
        lambda pools, _, layer, page, token, __: pools[layer][page, token, 0],
        (1, 5, 4, 1),
    ),
    "MLA latent without": Kind(
        ("latent",),
        (random_pool(5, 4, 12),),
        Axes("page token dim"),
        lambda pools, _, layer, page, token, __: pools[layer][page, token],
        (1, 5, 4, 1),
    ),
    "FP8 cells": Kind(
        ("k",),
        (random_pool(5, 4, 2, 8, dtype=torch.float8_e4m3fn),),
        Axes("page token head dim", (0, 2)),
        lambda pools, _, layer, page, token, head: pools[layer][page, token, head],
        (1, 5, 4, 2),
    ),
    "one scale for each page and head": Kind(
        ("k_scale",),
        (random_pool(5, 2, dtype=torch.float32),),
        Axes("page head", (0, 2), page_size=16, tokens_per_cell=16),
        lambda pools, _, layer, page, __, head: pools[layer][page, head],
        (1, 5, 1, 2),
    ),
    "one scale for each block and head": Kind(
        ("k_scale",),
        (random_pool(5, 4, 2, dtype=torch.float32),),
        Axes("page block head", (0, 2), tokens_per_cell=4),
        lambda pools, _, layer, page, block, head: pools[layer][page, block, head],
        (1, 5, 4, 2),
    ),
    "pages of which only the heads are known": Kind(
        ("kv",),
        (random_pool(5, 3, 4, 16), random_pool(5, 3, 4, 16)),
        Axes("page head dim dim", (3, 6), page_size=4, tokens_per_cell=4),
        lambda pools, _, layer, page, __, head: pools[layer][page, head],
        (2, 5, 1, 3),
    ),
    "pages of one token, said so": Kind(
        ("k",),
        (random_pool(5, 3, 8),),
        Axes("page head dim", (3, 6), page_size=1),
        lambda pools, _, layer, page, __, head: pools[layer][page, head],
        (1, 5, 1, 3),
    ),
    "indexer pages: keys of a page, then their scales": Kind(
        ("index_k",),
        (split_tensors([random_pool(5, 4 * 12, dtype=torch.uint8)], (4 * 8, 4 * 4), dimension=1)[0][0],),
        Axes("page token*dim", page_size=4),
        lambda pools, _, layer, page, token, __: pools[layer][page, 8 * token : 8 * token + 8],
        (1, 5, 4, 1),
    ),
    "Mamba convolution, channel by channel": Kind(
        ("conv.k",),
        (split_tensors([random_pool(5, 8, 3)], (2, 2, 4), dimension=1)[1][0],),
        Axes("slot head dim", (4, 6)),
        lambda pools, _, layer, slot, __, channel: pools[layer][slot, channel],
        (1, 5, 1, 2),
    ),
    "Mamba convolution, row by row": Kind(
        ("conv.k",),
        (split_tensors([random_pool(5, 3, 8)], (2, 2, 4), dimension=2)[1][0],),
        Axes("slot row head", (4, 6)),
        lambda pools, _, layer, slot, row, channel: pools[layer][slot, row, channel],
        (1, 5, 3, 2),
    ),
    "Mamba state": Kind(
        ("ssm",),
        (random_pool(2, 5, 3, 4, 8, dtype=torch.float32),),
        Axes("layer slot head dim dim", (3, 6)),
        lambda pools, _, layer, slot, __, head: pools[0][layer, slot, head],
        (2, 5, 1, 3),
    ),
    "auxiliary rows": Kind(
        ("aux",),
        (random_pool(5, 12, dtype=torch.int32),),
        Axes("slot dim"),
        lambda pools, _, layer, slot, __, ___: pools[layer][slot],
        (1, 5, 1, 1),
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_cells_lie_where_torch_finds_them(kind: Kind) -> None:
    regions = regions_from_tensors(kind.names, kind.pools, kind.axes, layers=10)
    num_layers, pages, cells, heads = kind.sizes
    assert [(region.tensor, region.layer) for region in regions] == [
        (name, 10 + layer) for layer in range(num_layers) for name in kind.names
    ]
    for region in regions:
        assert (region.slots, region.cells_per_slot, region.num_heads) == (pages, cells, heads)
        assert region.tokens_per_slot == cells * kind.axes.tokens_per_cell
        for page, cell, head in itertools.product(range(pages), range(cells), range(heads)):
            which = kind.names.index(region.tensor)
            expected = kind.cell(kind.pools, which, region.layer - 10, page, cell, head)
            address = address_of(region, page, cell, region.heads[0] + head)
            assert ctypes.string_at(address, region.head_bytes) == bytes_of(expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_bytes_written_by_address_are_read_by_torch(kind: Kind) -> None:
    region = regions_from_tensors(kind.names, kind.pools, kind.axes)[-1]
    _, pages, cells, heads = kind.sizes
    layer, which = region.layer, len(kind.names) - 1
    written = bytes(range(region.head_bytes))
    last = address_of(region, pages - 1, cells - 1, region.heads[1] - 1)
    ctypes.memmove(last, written, region.head_bytes)
    assert bytes_of(kind.cell(kind.pools, which, layer, pages - 1, cells - 1, heads - 1)) == written


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@given(
    st.permutations(["kv", "layer", "page", "token", "head"]),
    st.permutations(["kv", "layer", "page", "token", "head", "dim"]),
    st.tuples(*[st.integers(1, 3)] * 6),
)
def test_any_order_of_axes_in_memory_and_in_the_view(
    memory: list[str], shown: list[str], counts: tuple[int, ...]
) -> None:
    sizes = dict(zip([*memory, "dim"], counts, strict=True))
    storage = torch.arange(math.prod(counts), dtype=torch.int32).view(counts)
    pool = storage.permute([[*memory, "dim"].index(name) for name in shown])
    names = [f"tensor{index}" for index in range(sizes["kv"])]
    axes = Axes(" ".join(shown), (5, 5 + sizes["head"]))
    regions = {(r.tensor, r.layer): r for r in regions_from_tensors(names, [pool], axes, layers=2)}
    for index in itertools.product(*(range(sizes[name]) for name in memory)):
        at = dict(zip(memory, index, strict=True))
        region = regions[names[at["kv"]], 2 + at["layer"]]
        address = address_of(region, at["page"], at["token"], 5 + at["head"])
        assert ctypes.string_at(address, region.head_bytes) == bytes_of(storage[index])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_pools_are_registered_from_their_first_to_their_last_cell(kind: Kind) -> None:
    regions = regions_from_tensors(kind.names, kind.pools, kind.axes)
    layout = layout_from_components([Component("any", regions)], "m", tensors=kind.pools)
    assert len(layout.allocations) == len({pool.untyped_storage().data_ptr() for pool in kind.pools})
    assert sum(item.length for item in layout.allocations) <= sum(p.untyped_storage().nbytes() for p in kind.pools)


def test_both_ascend_shapes_are_one_geometry() -> None:
    pool = torch.zeros(2, 5, 16, 2, 8)
    plain = regions_from_tensors("k", [pool], Axes("layer page token head dim", (0, 2)))
    fia_axes = Axes("layer page*token 1 head dim", (0, 2), page_size=16)
    assert regions_from_tensors("k", [pool.view(2, 80, 1, 2, 8)], fia_axes) == plain
    assert plain[0].slot_stride == 16 * 2 * 8 * 4


def test_layers_of_a_sub_pool_are_named_one_by_one() -> None:
    pools = [torch.zeros(4, 2, 1, 8) for _ in range(3)]
    regions = regions_from_tensors("k", pools, Axes("page token head dim"), layers=[1, 3, 7], optional=True)
    assert [(region.layer, region.optional) for region in regions] == [(1, True), (3, True), (7, True)]


def test_components_of_a_hybrid_model_make_one_layout() -> None:
    full = torch.zeros(2, 2, 6, 16, 2, 8)
    window, conv, aux = torch.zeros(2, 4, 16, 2, 8), torch.zeros(3, 8, 4), torch.zeros(3, 10)
    q, k, v = split_tensors([conv], (2, 2, 4), dimension=1)
    components = [
        Component("kv", regions_from_tensors(("k", "v"), [full], Axes("kv layer page token head dim", (0, 2)))),
        Component(
            "swa", regions_from_tensors(("k", "v"), [window], Axes("kv page token head dim", (0, 2)), layers=[2])
        ),
        Component(
            "mamba",
            regions_from_tensors("conv.q", q, Axes("slot head dim", (2, 4)))
            + regions_from_tensors("conv.k", k, Axes("slot head dim", (2, 4)))
            + regions_from_tensors("conv.v", v, Axes("slot head dim", (4, 8))),
            kind="slot",
        ),
        Component("aux", regions_from_tensors("aux", [aux], Axes("slot dim")), kind="slot"),
    ]
    layout = layout_from_components(components, "m", tensors=[full, window, conv, aux])
    assert (layout.memory_kind, layout.device_id) == ("DRAM", 0)
    assert sorted((item.address, item.length) for item in layout.allocations) == sorted(
        (pool.data_ptr(), pool.nbytes) for pool in (full, window, conv, aux)
    )
    assert layout.component("kv").tokens_per_slot == 16


def test_regions_outside_the_named_tensors_are_refused() -> None:
    pool, other = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    component = Component("kv", regions_from_tensors("latent", [pool], Axes("page token dim"), layers=5))
    with pytest.raises(LayoutError, match="region lies outside every tensor") as error:
        layout_from_components([component], "m", tensors=[other])
    assert (error.value.values["tensor"], error.value.values["layer"]) == ("latent", 5)


@pytest.mark.parametrize("bytes_off", [-1, 1])
def test_regions_that_reach_over_the_named_tensors_are_refused(bytes_off: int) -> None:
    pool = torch.zeros(4, 2, 8)
    (region,) = regions_from_tensors("latent", [pool], Axes("page token dim"))
    moved = msgspec.structs.replace(region, address=region.address + bytes_off)
    with pytest.raises(LayoutError, match="region lies outside every tensor"):
        layout_from_components([Component("kv", (moved,))], "m", tensors=[pool])


def test_layout_from_tensors_describes_one_ordinary_pool() -> None:
    pools = {name: [torch.zeros(5, 4, 3, 8, dtype=torch.bfloat16) for _ in range(2)] for name in ("k", "v")}
    layout = layout_from_tensors(pools, axes="page token head dim", heads=(6, 9), fingerprint="m", layers=10)
    assert (layout.memory_kind, layout.device_id, layout.fingerprint) == ("DRAM", 0, "m")
    assert [(region.tensor, region.layer, region.dtype) for region in layout.component("kv").regions] == [
        ("k", 10, "bfloat16"),
        ("k", 11, "bfloat16"),
        ("v", 10, "bfloat16"),
        ("v", 11, "bfloat16"),
    ]


@pytest.mark.parametrize("new_pool", [torch.zeros, np.zeros], ids=["torch", "numpy"])
def test_layout_from_tensors_takes_opaque_pages_of_some_layers(new_pool: Callable[[tuple[int, ...]], Any]) -> None:
    layers = list(np.array([3, 7], np.int32))
    layout = layout_from_tensors(
        {"kv": [new_pool((5, 2, 16, 8)) for _ in layers]},
        axes="page head dim dim",
        heads=(0, 2),
        fingerprint="m",
        page_size=16,
        tokens_per_cell=16,
        layers=layers,
    )
    (first, second) = layout.component("kv").regions
    assert (first.layer, second.layer) == (3, 7)
    assert all(type(region.layer) is int for region in (first, second))
    assert (first.tokens_per_slot, first.cells_per_slot, first.num_heads) == (16, 1, 2)
    assert (first.slot_stride, first.head_stride) == (2 * first.head_bytes, first.head_bytes)


def test_views_of_one_allocation_are_registered_once() -> None:
    storage = torch.zeros(4, 2, 6, 16, 2, 8)  # layer, k or v, page, token, head, dim
    layout = layout_from_tensors(
        {"k": [layer[0] for layer in storage], "v": [layer[1] for layer in storage]},
        axes="page token head dim",
        heads=(0, 2),
        fingerprint="m",
    )
    assert [(item.address, item.length) for item in layout.allocations] == [(storage.data_ptr(), storage.nbytes)]


def test_only_the_part_that_is_used_is_registered() -> None:
    storage = torch.zeros(5, 4, 2, 8)  # layer, page, token, dim; the first and the last layer hold something else
    regions = regions_from_tensors("latent", [storage[3], storage[1], storage[2]], Axes("page token dim"))
    layout = layout_from_components([Component("kv", regions)], "m", tensors=[storage])
    assert [(item.address, item.length) for item in layout.allocations] == [
        (storage[1].data_ptr(), storage[1:4].nbytes)
    ]


def test_interleaved_and_transposed_views_keep_their_strides() -> None:
    storage = torch.zeros(6, 2, 16, 2, 8)  # page, k or v, token, head, dim
    layout = layout_from_tensors(
        {"k": [storage[:, 0]], "v": [storage[:, 1]]}, axes="page token head dim", heads=(0, 2), fingerprint="m"
    )
    k, v = layout.components[0].regions
    assert k.slot_stride == v.slot_stride == 2 * 16 * 2 * 8 * 4
    assert v.address - k.address == 16 * 2 * 8 * 4


def test_addresses_with_bit_63_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.zeros(2, 5, 4, 2, 8)
    start = pool.data_ptr()
    tensor_ptr, storage_ptr = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: tensor_ptr(tensor) - start + HIGH)
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: storage_ptr(storage) - start + HIGH)
    layout = layout_from_tensors({"k": [pool]}, axes="layer page token head dim", heads=(0, 2), fingerprint="m")
    assert [region.address for region in layout.components[0].regions] == [HIGH, HIGH + pool.nbytes // 2]
    assert [(item.address, item.length) for item in layout.allocations] == [(HIGH, pool.nbytes)]


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_device_tensors_are_described_by_the_same_code() -> None:
    pool = torch.zeros(2, 5, 4, 3, 8, device="cuda")
    layout = layout_from_tensors({"k": [pool]}, axes="layer page token head dim", heads=(0, 3), fingerprint="m")
    assert (layout.memory_kind, layout.device_id) == ("VRAM", pool.device.index)
    for layer, region in enumerate(layout.components[0].regions):
        assert address_of(region, 3, 2, 1) == pool[layer, 3, 2, 1].data_ptr()


def test_parts_are_views_that_together_are_the_whole() -> None:
    pools = [torch.zeros(4, 8, 2) for _ in range(2)]
    parts = split_tensors(pools, (1, 3, 4), dimension=1)
    assert [[tuple(view.shape) for view in part] for part in parts] == [[(4, size, 2)] * 2 for size in (1, 3, 4)]
    for index, pool in enumerate(pools):
        assert torch.equal(torch.cat([part[index] for part in parts], 1), pool)
        assert all(part[index].untyped_storage().data_ptr() == pool.data_ptr() for part in parts)
