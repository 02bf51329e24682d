"""Flat lists as engines keep them, with entries that a rank does not hold and items that only the engine can read.

The expected bytes come from slices of numpy arrays, without any of kvflow's arithmetic.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError, PlanError, RouteError
from kvflow.geometry import (
    BufferLists,
    Component,
    OpaqueItem,
    PagePart,
    compile_routes,
    layout_from_pointers,
    regions_from_pointers,
    ring_pages,
)
from tests.support.items import FILL, Bytes, ItemMemory, move
from tests.support.worlds import Rank

HIGH = 0xFFFF81AB54E01000
K, V = PagePart("k", 8, "uint8"), PagePart("v", 8, "uint8")


def filled(items: int, item_bytes: int) -> Bytes:
    return np.full((items, item_bytes), FILL, np.uint8)


def test_elided_entries_keep_the_place_of_their_layer() -> None:
    lists = BufferLists([4096, 0, 8192, 0, 0, 12288], [64, 0, 64, 0, 0, 64], [16, 0, 16, 16, 0, 16])
    regions = regions_from_pointers(lists, [[K], [V]], page_size=2, layers=[3, 5, 8])
    assert [(region.tensor, region.layer, region.address) for region in regions] == [
        ("k", 3, 4096),
        ("k", 8, 8192),
        ("v", 8, 12288),
    ]
    layout = layout_from_pointers([Component("kv", regions)], "m", buffers=[lists])
    assert [item.address for item in layout.allocations] == [4096, 8192, 12288]


def test_elided_entries_need_no_item_of_the_right_length() -> None:
    lists = BufferLists([4096, 77], [64, 0], [16, 3])
    assert len(regions_from_pointers(lists, [[K]], page_size=2, layers=[0, 1])) == 1


@pytest.mark.parametrize(
    ("address", "item", "field"), [(0, 16, "data_ptrs"), (4096, 0, "item_lens"), (0, 0, "data_ptrs")]
)
def test_only_elided_entries_may_have_zeros(address: int, item: int, field: str) -> None:
    with pytest.raises(LayoutError, match="only in an elided entry") as error:
        BufferLists([4096, address], [64, 64], [16, item])
    assert error.value.values == {"field": field, "index": 1, "expected": "> 0", "found": 0}


def test_a_layer_that_every_prefill_rank_elides_is_missed_at_the_handshake() -> None:
    def layout(*held: int) -> Component:
        lists = BufferLists(
            [4096 * (1 + place) * one for place, one in enumerate(held)], [64 * one for one in held], [16] * 2
        )
        return Component("kv", regions_from_pointers(lists, [[K]], page_size=2, layers=[0, 1]))

    layouts = [layout_from_pointers([part], "m", buffers=[]) for part in (layout(1, 0), layout(1, 1))]
    with pytest.raises(RouteError, match="no prefill rank has this part of the cache") as error:
        compile_routes({0: layouts[0]}, layouts[1], decode_rank=0)
    assert error.value.values["layer"] == 1


def test_opaque_items_take_the_length_that_the_list_says() -> None:
    lists = BufferLists([4096, 8192], [60, 75], [20, 25])
    regions = regions_from_pointers(lists, [OpaqueItem("index", shard=2)], page_size=4, layers=[0, 1])
    assert [(region.head_bytes, region.slot_stride, region.slots) for region in regions] == [(20, 20, 3), (25, 25, 3)]
    assert {(region.heads, region.tokens_per_slot, region.cells_per_slot) for region in regions} == {((2, 3), 4, 1)}


def test_opaque_items_of_other_lengths_are_refused_at_the_handshake() -> None:
    def layout(item: int) -> Component:
        lists = BufferLists([4096], [3 * item], [item])
        return Component("kv", regions_from_pointers(lists, [OpaqueItem("index")], page_size=4, layers=[0]))

    prefill, decode = (layout_from_pointers([layout(item)], "m", buffers=[]) for item in (20, 24))
    with pytest.raises(RouteError, match="layouts differ") as error:
        compile_routes({0: prefill}, decode, decode_rank=0)
    assert error.value.values["field"] == "head_bytes"


def test_opaque_items_of_other_page_sizes_are_refused_by_the_name_of_the_setting() -> None:
    def layout(page_size: int) -> Component:
        lists = BufferLists([4096], [3 * 8 * page_size], [8 * page_size])
        return Component("kv", regions_from_pointers(lists, [OpaqueItem("index")], page_size=page_size, layers=[0]))

    prefill, decode = (layout_from_pointers([layout(size)], "m", buffers=[]) for size in (4, 8))
    with pytest.raises(RouteError, match="copied as a whole") as error:
        compile_routes({0: prefill}, decode, decode_rank=0)
    assert error.value.values.items() >= {"field": "page_size", "prefill": 4, "decode": 8}.items()


@pytest.mark.parametrize(("items", "page_size", "item_tokens"), [(3, 4, 1), (3, 4, 2)])
def test_an_opaque_item_is_a_page(items: int, page_size: int, item_tokens: int) -> None:
    lists = BufferLists([4096], [20 * items], [20])
    with pytest.raises(LayoutError, match="item does not have the size of the parts of a page"):
        regions_from_pointers(lists, [OpaqueItem("index")], page_size=page_size, layers=[0], item_tokens=item_tokens)


def test_impossible_opaque_items_are_refused() -> None:
    with pytest.raises(LayoutError, match="must not be negative"):
        OpaqueItem("index", shard=-1)


@given(st.data())
def test_opaque_items_arrive_from_stages_that_elide_what_they_do_not_hold(data: st.DataObject) -> None:
    """Prefill has `pp` stages of `tp` ranks, decode is one rank; each layer has its own item length."""
    tp, pp, num_layers = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)))
    page_size, num_tokens = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 9)))
    is_shared = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    cuts = {"index": sorted(data.draw(st.sets(st.integers(0, num_tokens), max_size=2)))}
    num_pages, lengths = -(-num_tokens // page_size), rng.integers(1, 12, num_layers).tolist()
    shards = 1 if is_shared else tp
    content = [[rng.integers(1, 200, (num_pages, length), np.uint8) for length in lengths] for _ in range(shards)]

    def rank_of(pools: list[Bytes | None], tp_rank: int) -> tuple[ItemMemory, Component]:
        memory = ItemMemory(pools, base=HIGH if tp_rank % 2 else None)
        item = OpaqueItem("index", shard=0 if is_shared else tp_rank)
        regions = regions_from_pointers(memory.lists, [item], page_size=page_size, layers=range(num_layers))
        return memory, Component("index", regions)

    prefill, decode, expected = [], [], []
    for held in filter(len, np.array_split(np.arange(num_layers), pp)):
        for tp_rank in range(tp):
            pools: list[Bytes | None] = [None] * num_layers
            table = rng.permutation(num_pages + 2)[:num_pages].tolist()
            for layer in held.tolist():
                pool = pools[layer] = filled(num_pages + 2, lengths[layer])
                pool[table] = content[tp_rank % shards][layer]
            memory, component = rank_of(pools, tp_rank)
            prefill.append(memory.rank([component], {"index": table}))
    for tp_rank in range(tp):
        table = rng.permutation(num_pages + 1)[:num_pages].tolist()
        memory, component = rank_of([filled(num_pages + 1, length) for length in lengths], tp_rank)
        wanted = [filled(num_pages + 1, length) for length in lengths]
        for layer, pool in enumerate(wanted):
            pool[table] = content[tp_rank % shards][layer]
        decode.append(memory.rank([component], {"index": table}))
        expected.append(ItemMemory(wanted).memory)
    move(prefill, decode, {"index": (0, num_tokens)}, cuts)
    for rank, memory_then in zip(decode, expected, strict=True):
        np.testing.assert_array_equal(rank.memory, memory_then)


def test_tail_wraps_around_the_end_of_its_ring() -> None:
    """With groups of 4 tokens and 6 places, three of 7 tokens are live, and the last wraps to the start of the ring."""
    tokens, pages = ring_pages((4, 7), 6, row=3)
    assert (tokens, list(pages)) == ((4, 7), [22, 23, 18])
    assert list(ring_pages((16, 16), 6, row=3).pages) == []


@pytest.mark.parametrize(
    ("tokens", "ring_size", "row", "message"),
    [
        ((0, 7), 6, 0, "token range is longer than the ring"),
        ((5, 4), 6, 0, "range"),
        ((0, 1), 0, 0, "is out of range"),
        ((0, 1), 6, -1, "is out of range"),
        ((0, 1), 2**16, 2**15, "is out of range"),
    ],
)
def test_impossible_rings_are_refused(tokens: tuple[int, int], ring_size: int, row: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ring_pages(tokens, ring_size, row=row)


@given(st.tuples(st.integers(1, 7), st.integers(1, 7)), st.integers(0, 30), st.data())
def test_tails_arrive_in_rings_of_another_size(sizes: tuple[int, int], start: int, data: st.DataObject) -> None:
    stop = start + data.draw(st.integers(0, min(sizes)))
    cuts = {"tail": sorted(data.draw(st.sets(st.integers(start, stop), max_size=2)))}
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    keys, scales = rng.integers(1, 200, (stop, 5), np.uint8), rng.integers(1, 200, (stop, 2), np.uint8)
    groups = [[PagePart("key", 5, "uint8")], [PagePart("scale", 2, "uint8")]]
    ranks: list[Rank] = []
    for ring_size, has_tail in zip(sizes, (True, False), strict=True):
        row = int(rng.integers(3))
        pools = [filled(3, ring_size * content.shape[1]) for content in (keys, scales)]
        full = [pool.copy() for pool in pools]
        for pool, content in zip(full, (keys, scales), strict=True):
            for token in range(start, stop):
                pool[row].reshape(ring_size, -1)[token % ring_size] = content[token]
        memory = ItemMemory(full if has_tail else pools, base=HIGH)
        expected = ItemMemory(full).memory
        regions = regions_from_pointers(memory.lists, groups, page_size=1, layers=[2], item_tokens=ring_size)
        table = [row * ring_size + token % ring_size for token in range(stop)]
        assert list(ring_pages((start, stop), ring_size, row=row).pages) == table[start:]
        ranks.append(memory.rank([Component("tail", regions)], {"tail": table}))
    move(ranks[:1], ranks[1:], {"tail": (start, stop)}, cuts)
    np.testing.assert_array_equal(ranks[1].memory, expected)
