"""Rows with several blocks of heads, each sharded over the ranks separately: convolution states.

The expected bytes come from slicing and joining numpy arrays of the whole model.
"""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvflow.errors import LayoutError
from kvflow.geometry import Axes, Component, PagePart, PageRows, Region, head_range, regions_from_pointers
from kvflow.geometry.tensors import regions_from_tensors, split_tensors
from tests.support.items import FILL, Bytes, ItemMemory, move
from tests.support.worlds import Rank

BLOCKS = ("x", "B", "C")
SLOTS = 3


class Model(NamedTuple):
    """Sizes of the state of one layer.

    Attributes:
        rows: Rows of the convolution state.
        heads: Heads of each block, in the whole model.
        cell_bytes: Bytes of a head in one row.
        state_bytes: Bytes of a head of the recurrent state.
    """

    rows: int
    heads: tuple[int, int, int]
    cell_bytes: int
    state_bytes: int


class State(NamedTuple):
    """The state of a request in the whole model.

    Attributes:
        blocks: uint8[rows, heads, cell_bytes] for each block.
        ssm: uint8[heads of x, state_bytes].
    """

    blocks: tuple[Bytes, Bytes, Bytes]
    ssm: Bytes


def cut(heads: int, tp: int, rank: int) -> slice:
    """Return the heads of a block that a rank holds; neighbours share a head if there are more ranks than heads."""
    per_rank, copies = max(1, heads // tp), max(1, tp // heads)
    return slice(rank // copies * per_rank, rank // copies * per_rank + per_rank)


def items(state: State, tp: int, rank: int, *, by_row: bool) -> tuple[Bytes, Bytes]:
    """Return the convolution and the recurrent state of one rank, each as the bytes of one item."""
    held = [block[:, cut(block.shape[1], tp, rank)] for block in state.blocks]
    conv = np.concatenate(held if by_row else [block.swapaxes(0, 1) for block in held], axis=1 if by_row else 0)
    return conv.ravel(), state.ssm[cut(len(state.ssm), tp, rank)].ravel()


def describe(model: Model, memory: ItemMemory, tp: int, rank: int, *, by_row: bool, by_tensor: bool) -> Component:
    heads = [head_range(count, tp, rank) for count in model.heads]
    counts = [stop - start for start, stop in heads]
    ssm = PagePart("ssm", model.state_bytes, "uint8", heads[0], tokens_per_cell=model.rows)
    conv_lists, ssm_lists = memory.lists.split(1)
    regions: tuple[Region, ...]
    if by_tensor:
        (pool,) = [pool for pool in memory.pools[:1] if pool is not None]
        shape = (model.rows, sum(counts)) if by_row else (sum(counts), model.rows)
        views = split_tensors([pool.reshape(SLOTS, *shape, model.cell_bytes)], counts, dimension=2 if by_row else 1)
        order = "slot row head dim" if by_row else "slot head row dim"
        regions = tuple(
            regions_from_tensors(name, view, Axes(order, held), layers=4)[0]
            for name, view, held in zip(BLOCKS, views, heads, strict=True)
        )
    else:
        order = "NHD" if by_row else "HND"
        parts = [
            PagePart(name, model.cell_bytes, "uint8", held, order) for name, held in zip(BLOCKS, heads, strict=True)
        ]
        groups = [[PageRows(tuple(parts))] if by_row else parts]
        regions = regions_from_pointers(conv_lists, groups, page_size=model.rows, layers=[4])
    return Component(
        "mamba", regions + regions_from_pointers(ssm_lists, [[ssm]], page_size=model.rows, layers=[4]), kind="slot"
    )


models = st.builds(
    Model,
    st.integers(1, 4),
    st.tuples(st.sampled_from([4, 8, 12]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    st.sampled_from([1, 2, 6]),
    st.integers(1, 9),
)


@given(models, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 2**32 - 1), st.data())
def test_each_block_of_a_row_is_split_over_the_ranks_by_itself(
    model: Model, prefill_tp: int, decode_tp: int, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(1, 200, (model.rows, heads, model.cell_bytes), np.uint8) for heads in model.heads]
    state = State(
        (blocks[0], blocks[1], blocks[2]), rng.integers(1, 200, (model.heads[0], model.state_bytes), np.uint8)
    )

    def ranks(tp: int, *, has_state: bool) -> tuple[list[Rank], list[NDArray[np.uint8]]]:
        by_row, by_tensor = data.draw(st.booleans()), data.draw(st.booleans())
        found, expected = [], []
        for rank in range(tp):
            slot, own = int(rng.integers(SLOTS)), items(state, tp, rank, by_row=by_row)
            empty = [np.full((SLOTS, len(item)), FILL, np.uint8) for item in own]
            full = [pool.copy() for pool in empty]
            for pool, item in zip(full, own, strict=True):
                pool[slot] = item
            memory = ItemMemory(full if has_state else empty)
            component = describe(model, memory, tp, rank, by_row=by_row, by_tensor=by_tensor)
            found.append(memory.rank([component], {"mamba": [slot]}))
            expected.append(ItemMemory(full).memory)
        return found, expected

    prefill, _ = ranks(prefill_tp, has_state=True)
    decode, expected = ranks(decode_tp, has_state=False)
    move(prefill, decode, {"mamba": (0, model.rows)})
    for rank, memory in zip(decode, expected, strict=True):
        np.testing.assert_array_equal(rank.memory, memory)


def test_rows_are_as_long_as_their_parts_together() -> None:
    parts = tuple(
        PagePart(name, 2, "bfloat16", heads) for name, heads in zip(BLOCKS, [(4, 8), (1, 2), (1, 2)], strict=True)
    )
    memory = ItemMemory([np.full((SLOTS, 3 * 12), FILL, np.uint8)], base=4096)
    regions = regions_from_pointers(memory.lists, [[PageRows(parts)]], page_size=3, layers=[0])
    start = memory.lists.data_ptrs[0]
    assert [(region.address - start, region.slot_stride) for region in regions] == [(0, 36), (8, 36), (10, 36)]
    assert {(region.token_stride, region.head_stride, region.tokens_per_slot) for region in regions} == {(12, 2, 3)}
    with pytest.raises(LayoutError, match="item does not have the size of the parts of a page") as error:
        regions_from_pointers(memory.lists, [[PageRows(parts[:2])]], page_size=3, layers=[0])
    assert (error.value.values["expected"], error.value.values["found"]) == (30, 36)


def test_rows_may_follow_other_parts_of_an_item() -> None:
    first, k, v = (PagePart(name, size, "uint8") for name, size in (("scale", 4), ("k", 2), ("v", 3)))
    memory = ItemMemory([np.full((SLOTS, 18), FILL, np.uint8)])
    regions = regions_from_pointers(memory.lists, [[first, PageRows((k, v))]], page_size=2, layers=[0])
    start = memory.lists.data_ptrs[0]
    assert [(region.address - start, region.token_stride) for region in regions] == [(0, 4), (8, 5), (10, 5)]


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ((), "parts"),
        ((PagePart("k", 2, "uint8"), PagePart("v", 2, "uint8", order="HND")), "order"),
        ((PagePart("k", 2, "uint8"), PagePart("v", 2, "uint8", tokens_per_cell=2)), "tokens_per_cell"),
    ],
)
def test_parts_that_cannot_share_rows_are_refused(parts: tuple[PagePart, ...], field: str) -> None:
    with pytest.raises(LayoutError) as error:
        PageRows(parts)
    assert error.value.values["field"] == field
