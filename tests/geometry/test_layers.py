"""Layers of a chunk: their cost, and how they are grouped."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.geometry import BoundRoute, ComponentSlice, build_page_table, plan
from kvflow.geometry.expected import ExpectedBytes, LayerBytes, expected_bytes
from kvflow.geometry.pages import TokenPages
from kvflow.geometry.ranges import ALL_LAYERS, WHOLE, LayerRange
from kvflow.geometry.split import LayerPiece, SplitPolicy, split_policy_for
from tests.support.links import links, max_descriptors
from tests.support.worlds import Rank, World, execute, worlds

TOKENS = {"kv": (0, 10)}


def split_policy(least: int | None, layers: range = range(8)) -> SplitPolicy:
    """Return a policy in which each layer costs ten bytes per token."""
    costs = LayerBytes.from_costs(dict.fromkeys(layers, 10))
    return SplitPolicy({"kv": ExpectedBytes(WHOLE, WHOLE, {1: 10 * len(layers)}, {1: costs})}, {"kv": 4}, 2**30, least)


def join(rule: SplitPolicy, *stops: int) -> list[LayerPiece]:
    return rule.split_layers(stops, TOKENS, TOKENS)


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 9)), st.integers(0, 22), st.none() | st.integers(0, 22))
def test_layers_of_a_range_are_added_up(costs: dict[int, int], start: int, stop: int | None) -> None:
    expected = sum(cost for layer, cost in costs.items() if start <= layer and (stop is None or layer < stop))
    assert LayerBytes.from_costs(costs).between((start, stop)) == expected


def test_groups_are_joined_until_they_are_worth_a_write() -> None:
    assert join(split_policy(300), 1, 2, 3, 4, 5, 6, 7, 8) == [((0, 3), 2), ((3, 6), 5), ((6, None), 7)]


def test_a_short_chunk_stays_whole_and_waits_for_its_last_group() -> None:
    assert join(split_policy(801), 1, 2, 3, 4, 5, 6, 7, 8) == [((0, None), 7)]


def test_a_group_that_is_worth_a_write_is_one() -> None:
    assert join(split_policy(1), 2, 5, 8) == [((0, 2), 0), ((2, 5), 1), ((5, None), 2)]


def test_the_last_group_has_all_that_remain() -> None:
    assert join(split_policy(1), 2, 3) == [((0, 2), 0), ((2, None), 1)]
    assert join(split_policy(1), 2) == [((0, None), 0)]


def test_groups_of_other_stages_are_neither_waited_for_nor_written() -> None:
    assert join(split_policy(100, range(4, 6)), 2, 4, 5, 6, 8) == [((0, 5), 2), ((5, None), 3)]


def test_a_peer_that_knows_no_layers_gets_one_piece() -> None:
    assert join(split_policy(None), 1, 2, 8) == [((0, None), 2)]


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), st.integers(1, 200), st.sets(st.integers(1, 6), min_size=1))
def test_pieces_of_layers_bring_every_wanted_cell_and_nothing_else(world: World, least: int, stops: set[int]) -> None:
    world.compute()
    for _, bound, source, target in links(world):
        send_by_layers(world, bound, (source, target), least, sorted(stops))
    world.assert_arrived()


def send_by_layers(world: World, bound: BoundRoute, sides: tuple[Rank, Rank], least: int, stops: list[int]) -> None:
    """Send everything as one chunk; each piece may read only layers that are ready with its group."""
    rule = split_policy_for(bound, sides[0].layout, sides[1].layout, 2**30, least)
    wanted = {name: world.wanted[name] for name in bound.expected if world.wanted[name][0] < world.wanted[name][1]}
    pieces = rule.split_layers(stops, wanted, wanted)
    assert [layers[0] for layers, _ in pieces] == [0, *(layers[1] for layers, _ in pieces[:-1])]
    assert pieces[-1].layers[1] is None
    for layers, group in pieces:
        components = {name: component_slice(sides, name, wanted[name]) for name in wanted}
        descriptors = plan(bound, components, layers=layers)
        assert descriptors.num_bytes == expected_bytes(bound.expected, wanted, wanted, layers)
        assert descriptors.num_bytes >= least or layers[1] is None
        assert len(descriptors.src) <= max_descriptors(bound, wanted, layers)
        if group < len(stops) - 1:
            late: LayerRange = (max(layers[0], stops[group]), layers[1])
            assert late[1] == late[0] or not plan(bound, components, layers=late).num_bytes
        execute(descriptors, *sides)
    assert expected_bytes(bound.expected, wanted, wanted) == sum(
        expected_bytes(bound.expected, wanted, wanted, layers) for layers, _ in pieces
    )


def component_slice(sides: tuple[Rank, Rank], name: str, tokens: tuple[int, int]) -> ComponentSlice:
    tables = [
        build_page_table(side.layout.component(name), TokenPages(tokens, side.pages(name, tokens))) for side in sides
    ]
    return ComponentSlice(tokens, tables[0], tables[1])


def test_layers_that_are_owed_are_known() -> None:
    expected = ExpectedBytes(
        WHOLE, WHOLE, {1: 3, 2: 4}, {1: LayerBytes.from_costs({3: 1, 5: 2}), 2: LayerBytes.from_costs({4: 4})}
    )
    assert (expected.highest_layer, expected.max_layers) == (5, 3)
    assert (ExpectedBytes(WHOLE, WHOLE, {1: 3}).highest_layer, ExpectedBytes(WHOLE, WHOLE, {1: 3}).max_layers) == (0, 1)
    assert expected.of_layers((4, 6)).cell_bytes == {1: 2, 2: 4}
    assert expected.of_layers(ALL_LAYERS) is expected
