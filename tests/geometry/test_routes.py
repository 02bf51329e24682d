"""Routes: exactly one owner for each wanted cell, shared fairly, or a refusal that names the cell."""

from collections import Counter

import pytest

from kvflow.errors import RouteError
from kvflow.geometry import KVLayout, Route, RoutePiece, bind_route, compile_routes, head_range
from tests.support.pools import Pool, PoolShape


def tp_layouts(total: int, tp_size: int, *, num_layers: int = 4, **changes: object) -> dict[int, KVLayout]:
    fields: dict[str, object] = {"num_pages": 2, "page_size": 4, "head_bytes": 8, "num_layers": num_layers}
    return {
        rank: Pool(PoolShape(**(fields | {"heads": head_range(total, tp_size, rank)} | changes)), 0).layout  # type: ignore[arg-type]
        for rank in range(tp_size)
    }


def cells(route: Route) -> list[tuple[str, int, int]]:
    return [(piece.tensor, piece.layer, head) for piece in route.pieces for head in range(*piece.heads)]


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
        owners += [route.engine_rank for route in routes if route.pieces]
    assert sorted(owners) == [0, 1, 2, 3]


def test_pipeline_stages_pair_by_layer() -> None:
    shape = PoolShape(2, 4, (0, 2), 8, num_layers=3)
    stages = {0: Pool(shape, 0).layout, 1: Pool(PoolShape(2, 4, (0, 2), 8, 3, first_layer=3), 0).layout}
    decode = Pool(PoolShape(2, 4, (0, 2), 8, num_layers=6), 0).layout
    routes = compile_routes(stages, decode, decode_rank=0)
    assert [sorted({piece.layer for piece in route.pieces}) for route in routes] == [[0, 1, 2], [3, 4, 5]]


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
    "piece",
    [
        RoutePiece("kv", "k", 9, (0, 1)),
        RoutePiece("kv", "latent", 0, (0, 1)),
        RoutePiece("swa", "k", 0, (0, 1)),
        RoutePiece("kv", "k", 0, (1, 3)),
        RoutePiece("kv", "k", 0, (1, 1)),
    ],
)
def test_route_from_the_network_is_not_believed(piece: RoutePiece) -> None:
    layout = tp_layouts(2, 1)[0]
    with pytest.raises(RouteError, match="this side does not have"):
        bind_route(Route(0, (piece,)), layout, layout)


def test_layers_of_equal_geometry_share_a_leg() -> None:
    prefill = tp_layouts(4, 2, num_layers=80)
    decode = tp_layouts(4, 1, num_layers=80)[0]
    (first, _) = compile_routes(prefill, decode, decode_rank=0)
    bound = bind_route(first, prefill[0], decode)
    assert len(bound.legs) == 1
    assert bound.num_bytes("kv", (0, 1), closing=True) == 2 * 80 * 2 * 8
