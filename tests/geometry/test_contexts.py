"""Context parallelism: each rank holds a shard of the tokens. Any shards to any shards, against the slow model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow.errors import LayoutError, PlanError
from kvflow.geometry import (
    BoundRoute,
    ComponentSlice,
    PageTable,
    RouteBlocks,
    TokenShard,
    bind_route,
    compile_routes,
    plan,
    shard_pages,
)
from kvflow.geometry.ranges import overlap_pattern
from tests.support.contexts import PAIRS, context_world, split
from tests.support.examples import examples
from tests.support.links import links, max_descriptors, send
from tests.support.pools import PagedShape, Pool
from tests.support.worlds import Split

SHAPE = PagedShape(num_pages=64, page_size=4, heads=(0, 2), head_bytes=8, num_layers=3)
WHOLE = TokenShard()


@pytest.mark.parametrize("model", ["gqa", "mla"])
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_every_wanted_cell_arrives_and_nothing_else_changes(model: str, prefill: Split, decode: Split) -> None:
    world = context_world(model, prefill, decode)
    for _, bound, source, target in links(world):
        send(world, bound, source, target)
    world.assert_arrived()


def test_tokens_of_an_interleave_that_is_not_the_declared_one_arrive_elsewhere() -> None:
    world = context_world("mla", split(1, 2, 1), split(1, 1, 1), declared=16)
    for _, bound, source, target in links(world):
        send(world, bound, source, target)
    with pytest.raises(AssertionError):
        world.assert_arrived()


def test_states_and_windows_that_every_rank_holds_come_from_one_of_them() -> None:
    """Each decode rank gets its shard of the main component, and all of the others."""
    world = context_world("gqa", split(1, 2, 16), split(1, 2, 16))
    names = [{one.component for one in link.route.slices} for link in links(world)]
    assert [sorted(name for found in pair for name in found) for pair in (names[:2], names[2:])] == [
        ["kv", "mamba", "swa"]
    ] * 2


def bind(src: TokenShard, dst: TokenShard) -> BoundRoute:
    source, target = (
        replace(pool, components=(replace(pool.components[0], shard=shard),))
        for pool, shard in ((Pool(SHAPE, 0).layout, src), (Pool(SHAPE, 0).layout, dst))
    )
    whole = {
        number: replace(source, components=(replace(source.components[0], shard=one),))
        for number, one in enumerate(TokenShard(src.size, rank, src.interleave) for rank in range(src.size))
    }
    route = compile_routes(whole, target, decode_rank=0)[src.rank]
    return bind_route(route, source, target)


def table(shard: TokenShard, num_pages: int) -> PageTable:
    return PageTable(np.arange(num_pages, dtype=np.uint32), 0, SHAPE.page_size, shard)


@pytest.mark.parametrize("interleave", [1, 4, 8])
def test_equal_shards_are_moved_as_if_they_were_all_tokens(interleave: int) -> None:
    """Twelve pages in a row on both sides are one descriptor for each region, or twelve blocks."""
    shard = TokenShard(2, 1, interleave)
    bound, component = bind(shard, shard), {"kv": ComponentSlice((0, 96), table(shard, 12), table(shard, 12))}
    assert len(plan(bound, component).src) == 6
    blocks = RouteBlocks.from_route(bound)
    assert blocks is not None
    planned = blocks.plan(component)
    assert planned is not None
    assert (len(planned.src), planned.num_bytes) == (6 * 12, bound.expected["kv"].num_bytes((0, 96), final=True))


def test_pages_that_hold_other_tokens_on_the_other_side_are_no_blocks() -> None:
    for shards in ((WHOLE, TokenShard(2, 0, 4)), (TokenShard(2, 0, 4), WHOLE), (TokenShard(2, 0, 4), TokenShard(4))):
        bound = bind(*shards)
        assert RouteBlocks.from_route(bound) is None
        assert not bound.pages_contiguous


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (WHOLE, TokenShard(2, 1, 1)),
        (TokenShard(2, 0, 4), WHOLE),
        (TokenShard(4, 3, 2), TokenShard(2, 1, 4)),
        (TokenShard(3, 1, 1), TokenShard(2, 0, 4)),
        (TokenShard(2, 1, 1), TokenShard(2, 1, 1)),
    ],
)
def test_bound_for_the_descriptors_is_close(src: TokenShard, dst: TokenShard) -> None:
    """Pages in reverse order, so that no two of them are joined."""
    bound, num_tokens = bind(src, dst), 192
    tables = [
        table(shard, 48 // shard.size)._replace(pages=table(shard, 48 // shard.size).pages[::-1])
        for shard in (src, dst)
    ]
    found = len(plan(bound, {"kv": ComponentSlice((0, num_tokens), tables[0], tables[1])}).src)
    limit = max_descriptors(bound, {"kv": (0, num_tokens)})
    assert found <= limit <= 2 * found + 6 * 3


def test_whole_side_goes_with_any_shard() -> None:
    """Only two shards can be incompatible: their overlap may take long to repeat."""
    large = TokenShard(256, 255, 2**16)
    assert overlap_pattern(WHOLE, large) == overlap_pattern(large, TokenShard(1, 0, 3)) == (2**16, 2**24)
    with pytest.raises(LayoutError, match="incompatible"):
        overlap_pattern(large, TokenShard(3, 0, 1))


def test_log_says_which_tokens_a_rank_holds() -> None:
    (component,) = Pool(SHAPE, 0).layout.components
    assert "tokens from" not in component.summary
    sharded = replace(component, shard=TokenShard(4, 3, 16))
    assert sharded.summary.endswith(", 16 of every 64 tokens from 48 on")


@settings(max_examples=examples(200))
@given(st.data())
def test_pages_of_a_rank_are_those_that_hold_its_tokens(data: st.DataObject) -> None:
    """An engine puts the token at position `t` into place `t` of its group's pages, one page on each rank at a time."""
    size, page_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    interleave = data.draw(st.sampled_from([step for step in range(1, page_size + 1) if page_size % step == 0]))
    rank, stop = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 60))
    start = data.draw(st.integers(0, stop))
    pages = data.draw(st.permutations(range(60)))
    span = page_size * size
    virtual = [
        pages[number] for number in range(60) if any(start <= t < stop and t // span == number for t in range(60))
    ]
    held = [token for token in range(start, stop) if token // interleave % size == rank]
    expected = list(dict.fromkeys(pages[token // span] for token in held))
    shard = TokenShard(size, rank, interleave)
    assert shard_pages((start, stop), virtual, shard, page_size) == ((start, stop), expected)
    with pytest.raises(PlanError, match="do not fit"):
        shard_pages((start, stop), [*virtual, 0], shard, page_size)


def test_pages_that_ranks_fill_with_tokens_of_different_ranges_are_refused() -> None:
    with pytest.raises(PlanError, match="do not fit"):
        shard_pages((0, 8), [1], TokenShard(2, 0, 8), 4)
