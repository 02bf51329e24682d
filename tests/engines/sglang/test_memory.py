"""Layouts from SGLang's pointer lists, without SGLang."""

from typing import Any

import numpy as np
import pytest

from kvflow import LayoutError, PlanError, RouteError, TokenPages
from kvflow.engines.sglang.buffers import Shard
from kvflow.engines.sglang.memory import PoolMap, describe_pools
from kvflow.engines.sglang.states import REFUSED
from kvflow.geometry import Location, Route, TokenShard, compile_routes
from tests.engines.sglang.kv_args import PAGE, kv_args, with_state

DEVICE = Location("VRAM", 3)
WHOLE = Shard(kv_heads=8)


def describe(args: Any, shard: Shard = WHOLE) -> PoolMap:
    return describe_pools(args, shard, fingerprint="model", location=DEVICE)


def routes(prefill: list[PoolMap], decode: PoolMap, rank: int = 0) -> tuple[Route, ...]:
    return compile_routes({number: one.layout for number, one in enumerate(prefill)}, decode.layout, decode_rank=rank)


@pytest.mark.parametrize("kind", [*REFUSED, "something new"])
def test_states_that_are_not_moved_are_refused_with_a_reason(kind: str) -> None:
    with pytest.raises(LayoutError, match="does not move") as caught:
        describe(with_state(kv_args(), kind, [64]))
    assert (caught.value.values["state"], bool(caught.value.values["reason"])) == (kind, True)


@pytest.mark.parametrize(
    "more",
    [
        {"mla_compression_ratios": [4, 128]},
        {"kv_buf_groups": 3},
        {"kv_head_num": 4},
        {"num_draft_entries": 8},
        {"kv_cache_dtype_str": "fp4_e2m1"},
        {"host_kv_data_ptrs": [4096]},
    ],
    ids=["deepseek v4", "npu", "other heads", "draft alone", "scales in no list", "host memory"],
)
def test_pools_that_are_not_known_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        describe(kv_args(**more))


def test_stage_holds_its_layers() -> None:
    regions = describe(kv_args(2, prefill_start_layer=6), WHOLE._replace(pp_size=4, pp_rank=3)).layout.regions()
    assert [(key.tensor, key.layer) for key in regions] == [("k", 6), ("k", 7), ("v", 6), ("v", 7)]


def test_layers_that_sglang_names_are_taken() -> None:
    regions = describe(kv_args(2, kv_layer_ids=[3, 9, 3, 9])).layout.regions()
    assert [key.layer for key in regions] == [3, 9, 3, 9]


def test_draft_layers_are_optional_and_those_of_the_last_stage() -> None:
    args = kv_args(2, draft=1)
    layout = describe(args).layout
    assert [(key, region.optional) for key, region in layout.regions().items() if key.component == "draft"] == [
        (("draft", "k", 0), True),
        (("draft", "v", 0), True),
    ]
    assert "draft" not in describe(args, WHOLE._replace(pp_size=2)).layout.by_name


def test_draft_with_heads_on_several_ranks_goes_to_as_many_ranks() -> None:
    """SGLang does not report the head count, and two ranks with one head each may hold different heads."""
    four = [describe(kv_args(2, 1, draft=1), Shard(2, 4, rank)) for rank in range(4)]
    drafts = [(route.engine_rank, one.component) for route in routes(four, four[1], rank=1) for one in route.slices]
    assert {rank for rank, component in drafts if component == "draft"} == {1}
    two = describe(kv_args(2, 1, draft=1), Shard(2, 2, 1))
    assert not [one for route in routes(four, two) for one in route.slices if one.component == "draft"]


def test_draft_with_heads_beside_latents_goes_to_the_same_rank() -> None:
    """Latents are replicated, the draft's K and V are not."""
    args = kv_args(4, 1, groups=1, draft=2)
    args.kv_item_lens[4:] = [PAGE * 64] * 2
    two = [describe(args, Shard(1, 2, rank, is_mla=True)) for rank in range(2)]
    for rank in range(2):
        drafts = {
            route.engine_rank
            for route in routes(two, two[rank], rank=rank)
            for one in route.slices
            if one.component == "draft"
        }
        assert drafts == {rank}
    whole = describe(args, Shard(1, is_mla=True))
    assert {one.component for route in routes(two, whole) for one in route.slices} == {"kv"}


def test_tokens_that_ranks_share() -> None:
    """An entry of the indices is a page on each of two ranks, and one larger page of a draft model."""
    args = kv_args(4, 1, groups=1, draft=1)
    args.kv_item_lens[4], args.kv_data_lens[4] = 2 * args.kv_item_lens[4], 2 * args.kv_data_lens[4]
    two = [describe(args, Shard(1, 2, rank, is_mla=True, tokens=TokenShard(2, rank))) for rank in range(2)]
    whole = describe(kv_args(4, 1, groups=1, draft=1), Shard(1, is_mla=True))
    for prefill, decode in ((two, whole), ([whole], two[1])):
        found = {(route.engine_rank, one.component) for route in routes(prefill, decode) for one in route.slices}
        assert found == {(rank, "kv") for rank in range(len(prefill))} | {(0, "draft")}
    tokens = two[1].tokens(32, 1, 2, 33)
    assert tokens == (64, 112)
    tables: Any = two[1].pages(tokens, np.array([3, 5]))
    assert (tables["kv"].pages.tolist(), tables["draft"].tolist()) == ([3, 5], [3, 5])
    tables = two[1].pages((64, 65), np.array([3]))
    assert (tables["kv"].pages.tolist(), tables["draft"].tolist()) == ([], [3])
    with pytest.raises(PlanError, match="number of tokens is unknown"):
        two[1].tokens(0, 0, 2, None)
    with pytest.raises(PlanError, match="do not fit"):
        two[1].pages((64, 112), np.array([3]))
    assert whole.tokens(32, 1, 2, None) == (48, 80)


def test_tokens_of_heads_are_not_shared() -> None:
    with pytest.raises(LayoutError, match="only latents are shared"):
        describe(kv_args(), WHOLE._replace(tokens=TokenShard(2, 0)))


def test_pages_of_an_unknown_order_go_to_as_many_ranks() -> None:
    two = [
        describe(kv_args(2, 4), WHOLE._replace(tp_size=2, tp_rank=rank, has_unknown_order=True)) for rank in range(2)
    ]
    assert {route.engine_rank for route in routes(two, two[1], rank=1) for _ in route.slices} == {1}
    with pytest.raises(RouteError, match="no prefill rank has this part of the cache"):
        routes(two, describe(kv_args(2), WHOLE._replace(has_unknown_order=True)))


def test_index_pairs_by_the_layers_of_its_stage() -> None:
    stages = [
        describe(
            with_state(kv_args(2, 1, groups=1, prefill_start_layer=2 * stage), "dsa", [40, 40]),
            Shard(1, pp_size=2, pp_rank=stage, is_mla=True),
        )
        for stage in range(2)
    ]
    decode = describe(with_state(kv_args(4, 1, groups=1), "dsa", [40] * 4), Shard(1, is_mla=True))
    for route in routes(stages, decode):
        layers = {one.layer for one in route.slices if one.component == "dsa"}
        assert layers == {2 * route.engine_rank, 2 * route.engine_rank + 1}


def test_index_of_draft_layers_is_optional() -> None:
    args = with_state(kv_args(2, 1, draft=1, groups=1), "dsa", [40, 40, 40])
    decode = describe(args, Shard(1, is_mla=True))
    prefill = describe(with_state(kv_args(2, 1, groups=1), "dsa", [40, 40]), Shard(1, is_mla=True))
    assert {one.component for one in routes([prefill], decode)[0].slices} == {"kv", "dsa"}
    assert set(decode.state_pages((0, 32), [[1, 2]])) == {"dsa", "dsa_draft"}


@pytest.mark.parametrize(
    ("layout", "shard"),
    [("vectorized_5d", WHOLE), (None, WHOLE), ("nhd", WHOLE._replace(pp_size=2)), ("nhd", Shard(1, is_mla=True))],
    ids=["order unknown", "no layout", "stages", "latents"],
)
def test_windows_that_are_not_known_are_refused(layout: str | None, shard: Shard) -> None:
    groups = 1 if shard.is_mla else 2
    args = with_state(kv_args(2, groups=groups, swa_kv_cache_layout=layout), "swa", [PAGE * 8 * 64] * 4)
    with pytest.raises(LayoutError, match="sliding window"):
        describe(args, shard)


def test_items_need_layers_in_stages_unless_they_are_those_of_the_main_pool() -> None:
    stage = WHOLE._replace(pp_size=2, pp_rank=1)
    with pytest.raises(LayoutError, match="layer numbers"):
        describe(with_state(kv_args(2), "minimax_index_k", [64]), stage)
    scales = describe(with_state(kv_args(2, prefill_start_layer=2), "block_scale", [64] * 4), stage)
    assert [(key.layer, key.tensor[:5]) for key in scales.layout.regions() if key.component == "block_scale"] == [
        (2, "item0"),
        (3, "item0"),
        (2, "item1"),
        (3, "item1"),
    ]


def test_stage_may_have_no_items() -> None:
    pools = describe(with_state(kv_args(2), "qsa_pending", []))
    assert list(pools.layout.by_name) == ["kv"]
    assert pools.state_pages((0, 16), [[3]]) == {}


def test_rows_are_the_first_of_sglangs_indices_and_pages_of_a_prefix_are_not_needed() -> None:
    args = with_state(with_state(kv_args(2), "dsa_tail", [64] * 4), "block_scale", [64] * 4)
    pools = describe(args)
    tables = pools.state_pages((48, 64), [[5, 2, 1, 0, 0, 6], [9, 8, 7, 6]])
    found = {name: (one.tokens, list(one.pages)) for name, one in tables.items() if isinstance(one, TokenPages)}
    assert found == {"dsa_tail": ((0, 1), [5]), "block_scale": ((48, 64), [6])}
    assert pools.state_pages((64, 64), [[], [9, 8, 7, 6]]) == {"dsa_tail": None, "block_scale": None}


def test_window_may_have_heads_on_the_outside() -> None:
    args = with_state(kv_args(2, swa_kv_cache_layout="hnd"), "swa", [PAGE * 8 * 64] * 4)
    region = describe(args).layout.by_name["swa"].regions[0]
    assert (region.head_stride, region.token_stride) == (PAGE * 64, 64)


def recurrent(tp_size: int, rank: int, groups: list[int] | None) -> PoolMap:
    """Return the map of a convolution state of 12 channels in three rows, and a recurrent state of 4 heads."""
    args = with_state(
        kv_args(1, 8 // tp_size),
        "mamba",
        [3 * 12 // tp_size * 2, 4 // tp_size * 32],
        layer_ids=[0, 0],
        dim_per_tensor=[12 // tp_size, 4 // tp_size],
        conv_shard_groups=[groups, None],
        slice_outer_counts=[3, 1],
    )
    return describe(args, Shard(8, tp_size, rank))


def test_blocks_of_a_convolution_are_sharded_each_by_itself() -> None:
    two = [recurrent(2, rank, [2, 2, 8]) for rank in range(2)]
    regions = {key.tensor: region for key, region in two[1].layout.regions().items() if key.component == "mamba"}
    assert {name: (one.heads, one.head_bytes, one.tokens_per_cell) for name, one in regions.items()} == {
        "state0.0": ((1, 2), 2, 1),
        "state0.1": ((1, 2), 2, 1),
        "state0.2": ((4, 8), 2, 1),
        "state1": ((2, 4), 32, 3),
    }
    slices = [one for route in routes(two, recurrent(1, 0, [2, 2, 8])) for one in route.slices]
    assert sum(one.component == "mamba" for one in slices) == 8


@pytest.mark.parametrize("groups", [None, [3, 3, 5]], ids=["none named", "not those that it has"])
def test_state_whose_blocks_are_not_known_goes_to_as_many_ranks(groups: list[int] | None) -> None:
    same = [recurrent(2, rank, groups) for rank in range(2)]
    assert len(routes(same, same[0])[0].slices) > 0
    with pytest.raises(RouteError, match="no prefill rank has"):
        routes(same, recurrent(1, 0, groups))


def test_state_without_layers_is_refused_in_stages() -> None:
    args = with_state(kv_args(1), "mamba", [64], dim_per_tensor=[8])
    with pytest.raises(LayoutError, match="layer numbers"):
        describe(args, WHOLE._replace(pp_size=2))


def test_pages_of_states_end_with_the_request() -> None:
    args = with_state(kv_args(2, swa_kv_cache_layout="nhd"), "swa", [PAGE * 8 * 64] * 4)
    pools = describe(with_state(args, "mamba", [64], dim_per_tensor=[0], layer_ids=[0]))
    tables = pools.state_pages((0, 160), [np.array([5, 6]), [np.array([3])]])
    window, slot = tables["swa"], tables["mamba"]
    assert isinstance(window, TokenPages)
    assert isinstance(slot, TokenPages)
    assert (window.tokens, list(window.pages)) == ((128, 160), [5, 6])
    assert (slot.tokens, list(slot.pages)) == ((0, 1), [3])
    assert pools.state_pages((0, 160), None) == {"swa": None, "mamba": None}
    assert pools.state_pages((0, 160), [[], None]) == {"swa": None, "mamba": None}


@pytest.mark.parametrize("indices", [[[1, 2]], [[1], [2]]], ids=["two slots", "one state too many"])
def test_indices_that_are_not_one_for_each_state_are_refused(indices: list[list[int]]) -> None:
    pools = describe(with_state(kv_args(2), "mamba", [64], dim_per_tensor=[0], layer_ids=[0]))
    with pytest.raises(PlanError):
        pools.state_pages((0, 16), indices)


def test_two_states_of_one_kind_are_two_components() -> None:
    args = kv_args(2)
    for layer in range(2):
        args = with_state(args, "mamba", [64], dim_per_tensor=[0], layer_ids=[layer])
    assert list(describe(args).layout.by_name) == ["kv", "mamba", "mamba#1"]


@pytest.mark.parametrize(("dims", "senders"), [([0], {0, 1}), ([], {1})], ids=["replicated", "not said"])
def test_state_that_sglang_says_nothing_about_is_one_of_its_rank(dims: list[int], senders: set[int]) -> None:
    """Ranks share the sending only of states that they all hold."""
    two = [
        describe(
            with_state(
                with_state(kv_args(1, 4), "mamba", [64], dim_per_tensor=dims, layer_ids=[0] if dims else []),
                "mamba",
                [64],
                dim_per_tensor=dims,
                layer_ids=[1] if dims else [],
            ),
            Shard(8, 2, rank),
        )
        for rank in range(2)
    ]
    sent = [(route.engine_rank, one) for route in routes(two, two[1], rank=1) for one in route.slices]
    assert {rank for rank, one in sent if one.component.startswith("mamba")} == senders


def test_index_of_ordinary_attention_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not move"):
        describe(with_state(kv_args(2), "dsa", [40, 40]))


def test_lists_of_different_lengths_are_refused() -> None:
    args = kv_args(2)
    args.kv_item_lens.pop()
    with pytest.raises(LayoutError, match="differ in length"):
        describe(args)
