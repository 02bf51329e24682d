"""Routes: exactly one owner for each wanted cell, with a fair share of the work, or a refusal that names the cell."""

from collections import Counter

import pytest
from msgspec.structs import replace

from kvflow.errors import RouteError
from kvflow.geometry import Component, KVLayout, RegionSlice, Route, TokenShard, bind_route, compile_routes, head_range
from tests.support.links import bytes_of
from tests.support.pools import PagedShape, Pool


def tp_layouts(total: int, tp_size: int, *, num_layers: int = 4, **changes: object) -> dict[int, KVLayout]:
    fields: dict[str, object] = {"num_pages": 2, "page_size": 4, "head_bytes": 8, "num_layers": num_layers}
    return {
        rank: Pool(PagedShape(**(fields | {"heads": head_range(total, tp_size, rank)} | changes)), 0).layout  # type: ignore[arg-type]
        for rank in range(tp_size)
    }


def cells(route: Route) -> list[tuple[str, int, int]]:
    return [
        (region_slice.tensor, region_slice.layer, head)
        for region_slice in route.slices
        for head in range(*region_slice.heads)
    ]


TP = [1, 2, 3, 4, 6, 8]
HEADS = [1, 2, 3, 4, 8]
PAIRS = [
    (heads, p, d)
    for heads in HEADS
    for p in TP
    for d in TP
    if not (heads % p and p % heads) and not (heads % d and d % heads)
]


@pytest.mark.parametrize(("heads", "prefill_tp", "decode_tp"), PAIRS)
def test_each_wanted_cell_has_exactly_one_owner(heads: int, prefill_tp: int, decode_tp: int) -> None:
    prefill = tp_layouts(heads, prefill_tp)
    for decode_rank, decode in tp_layouts(heads, decode_tp).items():
        routes = compile_routes(prefill, decode, decode_rank=decode_rank)
        assert [route.engine_rank for route in routes] == list(range(prefill_tp))
        owned = Counter(cell for route in routes for cell in cells(route))
        wanted = range(*head_range(heads, decode_tp, decode_rank))
        assert owned == {(tensor, layer, head): 1 for tensor in "kv" for layer in range(4) for head in wanted}
        for route in routes:
            held = range(*head_range(heads, prefill_tp, route.engine_rank))
            assert all(head in held for _, _, head in cells(route))


def test_replicas_share_the_layers() -> None:
    prefill = tp_layouts(3, 6, num_layers=10)
    (decode,) = tp_layouts(3, 1, num_layers=10).values()
    routes = compile_routes(prefill, decode, decode_rank=0)
    assert {route.engine_rank: len(cells(route)) for route in routes} == dict.fromkeys(range(6), 10)


def test_replicas_share_one_layer_among_decode_ranks() -> None:
    prefill = tp_layouts(1, 4, num_layers=1)
    owners = []
    for decode_rank, decode in tp_layouts(1, 4, num_layers=1).items():
        routes = compile_routes(prefill, decode, decode_rank=decode_rank)
        owners += [route.engine_rank for route in routes if route.slices]
    assert sorted(owners) == [0, 1, 2, 3]


def test_pipeline_stages_pair_by_layer() -> None:
    shape = PagedShape(2, 4, (0, 2), 8, num_layers=3)
    stages = {0: Pool(shape, 0).layout, 1: Pool(PagedShape(2, 4, (0, 2), 8, 3, first_layer=3), 0).layout}
    decode = Pool(PagedShape(2, 4, (0, 2), 8, num_layers=6), 0).layout
    routes = compile_routes(stages, decode, decode_rank=0)
    assert [sorted({region_slice.layer for region_slice in route.slices}) for route in routes] == [[0, 1, 2], [3, 4, 5]]


def test_missing_layer_is_named() -> None:
    with pytest.raises(RouteError) as error:
        compile_routes(tp_layouts(2, 1, num_layers=3), tp_layouts(2, 1, num_layers=4)[0], decode_rank=0)
    assert error.value.values == {"component": "kv", "tensor": "k", "layer": 3, "head": 0}


def test_missing_head_is_named() -> None:
    prefill = tp_layouts(4, 2)
    del prefill[1]
    with pytest.raises(RouteError) as error:
        compile_routes(prefill, tp_layouts(4, 1)[0], decode_rank=0)
    assert error.value.values["head"] == 2


def test_other_cell_size_is_refused_with_both_values() -> None:
    with pytest.raises(RouteError) as error:
        compile_routes(tp_layouts(2, 1), tp_layouts(2, 1, head_bytes=16)[0], decode_rank=0)
    assert error.value.values.items() >= {"field": "head_bytes", "prefill": 8, "decode": 16, "layer": 0}.items()


def test_other_model_is_refused_with_both_fingerprints() -> None:
    decode = tp_layouts(2, 1)[0]
    other = KVLayout(decode.components, "another-model", decode.allocations)
    with pytest.raises(RouteError) as error:
        compile_routes(tp_layouts(2, 1), other, decode_rank=0)
    assert error.value.values == {"engine_rank": 0, "prefill": "test-model", "decode": "another-model"}


@pytest.mark.parametrize(
    "region_slice",
    [
        RegionSlice("kv", "k", 9, (0, 1)),
        RegionSlice("kv", "latent", 0, (0, 1)),
        RegionSlice("swa", "k", 0, (0, 1)),
        RegionSlice("kv", "k", 0, (1, 3)),
        RegionSlice("kv", "k", 0, (1, 1)),
    ],
)
def test_route_from_the_network_is_not_trusted(region_slice: RegionSlice) -> None:
    layout = tp_layouts(2, 1)[0]
    with pytest.raises(RouteError, match="this side does not have"):
        bind_route(Route(0, (region_slice,)), layout, layout)


def test_layers_of_equal_geometry_share_a_leg() -> None:
    prefill = tp_layouts(4, 2, num_layers=80)
    decode = tp_layouts(4, 1, num_layers=80)[0]
    (first, _) = compile_routes(prefill, decode, decode_rank=0)
    bound = bind_route(first, prefill[0], decode)
    assert len(bound.copy_groups) == 1
    assert bytes_of(bound, "kv", (0, 1), final=True) == 2 * 80 * 2 * 8


def reshaped(layout: KVLayout, *, shard: TokenShard | None = None, kind: str = "paged", **region: object) -> KVLayout:
    """Return the layout with other attributes of its component or its regions."""
    (component,) = layout.components
    regions = tuple(replace(item, **region) for item in component.regions)
    return replace(layout, components=(Component("kv", regions, kind, shard or TokenShard()),))


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"dtype": "float16"}, "dtype", ("uint8", "float16")),
        ({"head_bytes": 4}, "head_bytes", (8, 4)),
        ({"tokens_per_cell": 2}, "tokens_per_cell", (1, 2)),
        ({"kind": "slot"}, "kind", ("paged", "slot")),
    ],
)
def test_cells_that_differ_are_named_with_both_values(
    changes: dict[str, object], field: str, values: tuple[object, object]
) -> None:
    (layout,) = tp_layouts(2, 1).values()
    with pytest.raises(RouteError, match="layouts differ") as caught:
        compile_routes({0: layout}, reshaped(layout, **changes), decode_rank=0)  # type: ignore[arg-type]
    assert (caught.value.values["field"], caught.value.values["layer"]) == (field, 0)
    assert (caught.value.values["prefill"], caught.value.values["decode"]) == values


def test_slots_of_another_shape_are_refused() -> None:
    (layout,) = tp_layouts(2, 1).values()
    smaller = reshaped(tp_layouts(2, 1, page_size=2)[0], kind="slot")
    with pytest.raises(RouteError) as caught:
        compile_routes({0: reshaped(layout, kind="slot")}, smaller, decode_rank=0)
    assert caught.value.values.items() >= {"field": "tokens_per_slot", "prefill": 4, "decode": 2}.items()


def test_tokens_that_no_rank_holds_are_refused() -> None:
    """Two of three ranks that share the tokens do not suffice, unless decode wants only their share."""
    (layout,) = tp_layouts(2, 1).values()
    shares = [reshaped(layout, shard=TokenShard(3, rank, 1)) for rank in range(3)]
    with pytest.raises(RouteError, match="no prefill rank has this part of the cache"):
        compile_routes({0: shares[0], 1: shares[1]}, layout, decode_rank=0)
    routes = compile_routes({0: shares[0], 1: shares[1]}, shares[1], decode_rank=0)
    assert [bool(route.slices) for route in routes] == [False, True]


def test_a_rank_that_holds_every_token_is_taken_alone() -> None:
    (layout,) = tp_layouts(2, 1).values()
    shares = {rank: reshaped(layout, shard=TokenShard(2, rank, 1)) for rank in range(2)}
    routes = compile_routes({**shares, 2: layout}, layout, decode_rank=0)
    assert [bool(route.slices) for route in routes] == [False, False, True]


def test_optional_layers_without_a_counterpart_are_left_out_on_either_side() -> None:
    (more,) = tp_layouts(2, 1, num_layers=5).values()
    (fewer,) = tp_layouts(2, 1, num_layers=4).values()
    draft = replace(
        more,
        components=(Component("kv", tuple(replace(r, optional=r.layer == 4) for r in more.components[0].regions)),),
    )
    for prefill, decode in ((fewer, draft), (more, fewer)):
        (route,) = compile_routes({0: prefill}, decode, decode_rank=0)
        assert {region_slice.layer for region_slice in route.slices} == {0, 1, 2, 3}


@pytest.mark.parametrize("heads", [[(0, 2), (0, 2)], [(0, 1), (0, 2)], [(0, 2), (1, 2)]])
def test_a_route_that_asks_twice_is_refused(heads: list[tuple[int, int]]) -> None:
    layout = tp_layouts(2, 1)[0]
    pieces = tuple(RegionSlice("kv", "k", 0, each) for each in heads)
    with pytest.raises(RouteError, match="heads twice"):
        bind_route(Route(0, pieces), layout, layout)


def test_a_route_with_more_slices_than_heads_is_refused_at_once() -> None:
    layout = tp_layouts(2, 1)[0]
    with pytest.raises(RouteError, match="more slices than there are heads") as caught:
        bind_route(Route(0, (RegionSlice("kv", "k", 0, (0, 1)),) * 100_000), layout, layout)
    assert caught.value.values == {"slices": 100_000, "heads": 2 * 4 * 2}
